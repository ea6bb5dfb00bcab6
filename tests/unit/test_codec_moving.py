"""A state that other threads change while it is encoded: the text is of a moment that there was, types and all.

Each test lets a thread change a value between two forms for as long as it takes, with threads switched as often as the
interpreter can, and every text must be that of one form or the other.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.messages import AIMessage

import perdure
from perdure.values.codec import Codec, decode, encode

NAN = float("nan")
TIMES = 2000


@pytest.fixture
def codec() -> Codec:
    return Codec(trust=[__name__])


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextmanager
def changing(change: Callable[[int], None]) -> Iterator[None]:
    """A thread that calls `change` again and again."""
    done = threading.Event()

    def run() -> None:
        number = 0
        while not done.is_set():
            change(number)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


FORMS: list[tuple[Any, Any]] = [(1.5, NAN), ([1, 2], (1, 2)), ([], (1,)), ({"a": 1}, {"a": (1,)}), (None, {1, 2})]


@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: repr(forms[1]))
def test_a_value_that_changes_its_type_keeps_it(forms: tuple[Any, Any], codec: Codec) -> None:
    value: dict[str, Any] = {"log": list(range(50)), "deep": {"list": [{"x": forms[0]}]}}
    inner = value["deep"]["list"][0]
    wanted = {encode(form, codec) for form in forms}
    with changing(lambda number: inner.__setitem__("x", forms[number % 2])):
        found = [decode(encode(value, codec, moving=True), codec) for _ in range(TIMES)]
    assert {encode(one["deep"]["list"][0]["x"], codec) for one in found} <= wanted


@dataclass
class Holder:
    inner: Any


@pytest.mark.parametrize("around", [Holder, OrderedDict, bytearray, AIMessage])
def test_the_same_beside_values_that_cannot_be_copied_at_once(around: Any, codec: Codec) -> None:
    """An object, or whatever is no built-in type, is taken apart by Python code: what it holds is still exact."""
    inner: dict[str, Any] = {"x": 1.5}
    makers: dict[Any, Callable[[], Any]] = {
        Holder: lambda: Holder(inner),
        OrderedDict: lambda: OrderedDict(inner=inner),
        bytearray: lambda: [bytearray(b"x"), inner],
        AIMessage: lambda: AIMessage("x", additional_kwargs=inner),
    }
    held = makers[around]()
    value = {"held": [held] * 3, "x": [0]}
    with changing(lambda number: inner.__setitem__("x", (1.5, NAN, (1, 2))[number % 3])):
        texts = [encode(value, codec, moving=True) for _ in range(TIMES // 4)]
    for text in set(texts):
        assert b'"x":null' not in text
        assert b'"x":[1,2]' not in text


def test_parts_that_are_changed_as_one_are_saved_as_one(codec: Codec) -> None:
    """Of built-in types the whole state is of one moment."""
    value: dict[str, Any] = {"first": 0, "log": [(0,)] * 50, "last": 0}
    with changing(lambda number: value.update(first=number, last=number)):
        found = [decode(encode(value, codec, moving=True), codec) for _ in range(TIMES)]
    assert all(one["first"] == one["last"] for one in found)


def test_a_value_that_grows_and_shrinks_is_saved(codec: Codec) -> None:
    """No error of an iteration whose container has changed."""
    value: dict[Any, Any] = {"objects": [Holder(1)], "set": {0}, "ordered": OrderedDict(), (1,): 1}

    def change(number: int) -> None:
        value["ordered"][number] = value[f"k{number % 50}"] = number
        value["set"].add(number % 1000)
        if number % 50 == 49:
            for key in [key for key in value if isinstance(key, str) and key[0] == "k"]:
                del value[key]
            value["ordered"].clear()

    with changing(change):
        for _ in range(TIMES // 10):
            encode(value, codec, moving=True)


COLLECTING = """
import gc, sys, threading
from perdure.values.snapshot import still

gc.callbacks.append(lambda *_: [number for number in range(200)])  # as tools that watch the collector do
value, ended = {0}, threading.Event()

def change():
    number = 0
    while not ended.is_set():
        number += 1
        value.add(number % 5000)
        if number % 5000 == 0:
            value.clear()

sys.setswitchinterval(1e-6)
gc.set_threshold(50)
changing = threading.Thread(target=change)
changing.start()
for _ in range(3000):
    still(value)
ended.set()
changing.join()
"""


def test_a_collection_of_garbage_lets_no_thread_into_a_copy() -> None:
    """`marshal` writes beyond its memory if a set grows meanwhile: the process would crash."""
    done = subprocess.run([sys.executable, "-c", COLLECTING], check=False, timeout=60)
    assert done.returncode == 0


def test_copies_are_exact(codec: Codec) -> None:
    """What `marshal` would turn into something else is not copied by it."""
    value = {"a": bytearray(b"x"), "b": b"x", "c": (1, [NAN, -0.0, 2**70, "\ud800"]), "d": memoryview(b"x")}
    with pytest.raises(perdure.Unstorable):
        encode(value, codec, moving=True)
    del value["d"]
    assert encode(value, codec, moving=True) == encode(value, codec)


def test_an_autosave_in_the_background_is_not_torn(tmp_path: Any) -> None:
    """Values are changed by one thread while another makes the changes that save."""
    with perdure.open(tmp_path / "a.db", durability="normal") as store:
        thread = store.thread("t")
        inner: dict[str, Any] = {"x": 1.5, "n": 0}
        with (
            thread.autosave(perdure.autosave.every(1), background=True, initial={"turn": 0}) as state,
            changing(lambda number: inner.update(x=(1.5, NAN, (1, 2))[number % 3], n=number % 3)),
        ):
            state["inner"] = inner
            for turn in range(300):
                state["turn"] = turn
        for checkpoint in thread.history():
            if (found := checkpoint.state.get("inner")) is not None:
                assert repr((found["x"], found["n"])) in ("(1.5, 0)", "(nan, 1)", "((1, 2), 2)")
