"""The accelerator does what Python does: the same messages are unchanged, the same copies are made, texts differ in the
same places, the same values are plain, vectors have the same products. It keeps count of every object, survives what is
no message, and the garbage collector sees its copies as it sees those of Python."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, ToolMessage
from messages_kit import accelerator, change, message_codec, messages, mutable_parts
from soak import examples

from perdure.langgraph import columns
from perdure.langgraph.columns import Columns, PlainColumns, SpeedColumns
from perdure.langgraph.remembered import NOTHING, write_messages
from perdure.memory.segments import Vectors
from perdure.values import accelerator as accelerator_module
from perdure.values import diff
from perdure.values import plain as plain_values


@pytest.fixture(autouse=True)
def speed() -> Any:
    return accelerator()


def both_columns(values: list[Any]) -> list[Columns]:
    """What is remembered of messages, in both ways."""
    made: list[Columns] = []
    codec = message_codec()
    for kind in (PlainColumns, SpeedColumns):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(columns, "columns_class", kind)
            written = write_messages(values, NOTHING, codec)
        made.append(written.messages.columns if written is not None else kind())
    assert len(made[0].kinds) == len(made[1].kinds)
    return made


def plain(message: Any) -> tuple[Any, ...]:
    """All of a message, with the order of its fields and the types of its values."""
    slots = message.__pydantic_fields_set__, message.__pydantic_extra__, message.__pydantic_private__
    return type(message), repr(message.__dict__), *slots


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_both_find_the_same_messages_unchanged_and_make_the_same_copies(data: st.DataObject) -> None:
    values: list[Any] = data.draw(st.lists(messages(), max_size=6))
    python, c = both_columns(values)
    number = len(c.kinds)
    made = [one.copies(number) for one in (python, c)]
    assert [plain(message) for message in made[0]] == [plain(message) for message in made[1]]
    assert mutable_parts(made[1]).isdisjoint(mutable_parts([*c.fields, *c.names, *values, *c.copies(number)]))
    for handed in (values, *made):
        for _ in range(data.draw(st.integers(0, 3))):
            change(handed, data)
        assert not number or python.unchanged(handed, number) == c.unchanged(handed, number)


def samples() -> list[Any]:
    return [message for _ in range(8) for message in different()]


def different() -> list[Any]:
    return [
        HumanMessage("text", id="1"),
        AIMessage("", tool_calls=[{"name": "f", "args": {"a": [1, 2.5, None, {"b": True}]}, "id": "2"}]),
        ToolMessage([{"type": "text", "text": "ü"}], tool_call_id="2", artifact={"deep": [[[{}]]]}),
        AIMessageChunk(content="", usage_metadata={"input_tokens": 1, "output_tokens": 2**62, "total_tokens": 3}),
    ]


def test_copies_keep_no_memory_and_change_no_count(speed: Any) -> None:
    _, c = both_columns(samples())
    number = len(c.kinds)
    assert number == 32
    other = samples()
    other[20].additional_kwargs["odd"] = object()

    def work() -> None:
        for _ in range(200):
            made = c.copies(number)
            assert c.unchanged(made, number) == number
            assert c.unchanged(other, number) == 20
            with pytest.raises(TypeError):
                speed.copies(c.kinds, [*c.fields[:-1], None], c.names, c.extras, [number])
            with pytest.raises(IndexError):
                speed.unchanged(made, c.kinds, c.fields, c.names, c.extras[:5], number)

    shared: list[Any] = [HumanMessage, None, "1", "text", c.fields[0], c.names[0], {}.__class__]
    work()
    gc.collect()
    tracemalloc.start()
    try:
        counts, (before, _) = [sys.getrefcount(one) for one in shared], tracemalloc.get_traced_memory()
        work()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert (
            max(abs(sys.getrefcount(one) - count) for one, count in zip(shared, counts, strict=True)) < 1000
        )  # of 6,400 copies
        assert after - before < 20_000
    finally:
        tracemalloc.stop()


def test_the_garbage_collector_tracks_copies_as_it_does_those_of_python() -> None:
    python, c = both_columns(samples())
    parts = [_parts(one.copies(32)) for one in (python, c)]
    assert [type(part) for part in parts[0]] == [type(part) for part in parts[1]]
    # A dict that Python has made of values that hold nothing is not tracked until something else is put into it.
    hidden = [part for part in parts[1] if not gc.is_tracked(part) and type(part) is not dict]
    assert not hidden, "is this an old build? pip install --force-reinstall ./speed"
    for one in (one for one in parts[1] if type(one) is dict):
        assert gc.is_tracked(one) or not any(map(gc.is_tracked, one.values()))
        one["more"] = []
        assert gc.is_tracked(one)


def _parts(values: list[Any]) -> list[Any]:
    """Return the messages and everything in them that the garbage collector may track."""
    parts: list[Any] = [values]
    for part in parts:
        inside = [] if isinstance(part, set) else part.values() if isinstance(part, dict) else part
        if not isinstance(part, list | dict | set):
            inside = (part.__dict__, part.__pydantic_fields_set__, part.__pydantic_extra__)
        parts += [one for one in inside if one is not None and type(one) not in (str, int, float, bool)]
    return parts


class Token:
    """Something that a weak reference can watch."""


def test_a_copy_that_refers_to_itself_is_collected() -> None:
    _, c = both_columns(samples())
    made = c.copies(32)
    tokens = []
    for message in made:
        token = Token()
        message.additional_kwargs["me"] = [message, token]
        tokens.append(weakref.ref(token))
    del made, message, token
    gc.collect()
    assert not any(token() for token in tokens)


def test_the_collector_is_as_it_was_after_copies_and_after_an_error(speed: Any) -> None:
    _, c = both_columns(samples())
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            c.copies(32)
            with pytest.raises(TypeError):
                speed.copies(c.kinds, [*c.fields[:-1], None], c.names, c.extras, [3, 32])
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()


def test_copies_are_freed_when_the_last_reference_goes() -> None:
    _, c = both_columns(samples())
    gc.disable()
    try:
        alive = tracemalloc_bytes(lambda: c.copies(32))
    finally:
        gc.enable()
    assert alive < 20_000  # Python keeps a few for the next


def tracemalloc_bytes(make: Any) -> int:
    """Return how many bytes are left of what was made and dropped a hundred times."""
    make()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            make()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.fixture
def lends_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LEND_MIN", 0)


@pytest.mark.usefixtures("lends_few")
@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_lent_messages_are_as_new_and_belong_to_one_caller(data: st.DataObject) -> None:
    _, c = both_columns(data.draw(st.lists(messages(), max_size=6)))
    number = len(c.kinds)
    expected = [plain(message) for message in c.copies(number)]
    held: list[Any] = []
    for _ in range(6):
        lent = c.lend(number)
        assert [plain(message) for message in lent] == expected
        assert mutable_parts(lent).isdisjoint(mutable_parts([*held, *c.fields, *c.names]))
        for _ in range(data.draw(st.integers(0, 2))):
            change(lent, data)
        kept = data.draw(st.sampled_from(["none", "list", "message", "fields", "names", "kwargs"]))
        if kept == "list":
            held.append(lent)
        elif kept != "none" and lent:
            one = lent[data.draw(st.integers(0, len(lent) - 1))]
            inside = {"fields": one.__dict__, "names": one.__pydantic_fields_set__, "kwargs": one.additional_kwargs}
            held.append(inside.get(kept, one))
            del one, inside
        del held[: data.draw(st.integers(0, 1))]


@pytest.mark.usefixtures("lends_few")
def test_a_message_is_lent_again_only_when_nothing_else_refers_to_it_or_to_a_part_of_it() -> None:
    _, c = both_columns(samples())

    def again(keep: Callable[[Any], Any], place: int = 1) -> bool:
        """Return whether two objects are lent for a message, one after the other, while a part of it is held."""
        first = c.lend(32)
        held, ids = keep(first[place]), {id(first[place])}
        del first
        second = c.lend(32)[place]
        ids.add(id(second))
        del second, held
        return len(ids) == 1

    assert again(lambda one: None)
    assert not again(lambda one: one)
    assert not again(lambda one: one.__dict__)
    assert not again(lambda one: one.__pydantic_fields_set__)
    assert not again(lambda one: one.tool_calls[0]["args"]["a"])
    assert not again(lambda one: iter(one.tool_calls))
    assert not again(weakref.ref)
    assert not again(lambda one: weakref.ref(one.__pydantic_fields_set__))
    assert not again(lambda one: one.__pydantic_extra__, place=0)
    assert again(lambda one: one.tool_calls[0]["name"]), "text cannot be changed"


@pytest.mark.usefixtures("lends_few")
def test_the_last_result_may_be_held_while_the_next_is_asked_for() -> None:
    _, c = both_columns(samples())
    seen: set[int] = set()
    result: list[Any] = []
    for _ in range(10):
        result = c.lend(32)
        seen |= {id(message) for message in result}
    assert len(seen) == 64


@pytest.mark.usefixtures("lends_few")
def test_lending_keeps_no_more_than_two_objects_of_a_message() -> None:
    _, c = both_columns(samples())
    gc.disable()
    try:
        alive = tracemalloc_bytes(lambda: [c.lend(32) for _ in range(3)])
    finally:
        gc.enable()
    assert alive < 100_000  # Python's copies are 0.7 KB each
    before = c.first(20)
    assert isinstance(before, SpeedColumns)
    assert isinstance(c, SpeedColumns)
    assert (len(before.lent), c.lent) == (40, []), "moved, not shared"


@pytest.mark.usefixtures("lends_few")
def test_a_lent_message_that_was_spoiled_is_replaced_and_its_finalizer_runs(speed: Any) -> None:
    _, c = both_columns(samples())
    expected = [plain(message) for message in c.copies(32)]
    ended: list[int] = []

    class Loud:
        def __del__(self) -> None:
            ended.append(len(c.lend(32)))  # lends again, in the middle of the end of a call

    lent = c.lend(32)
    lent[3].additional_kwargs["loud"] = Loud()
    lent[4].__pydantic_fields_set__ = {Evil(lent) if name == "id" else name for name in c.names[4]}
    del lent[5].__pydantic_extra__, lent[6].__pydantic_fields_set__
    lent[7].__dict__ = {**lent[7].__dict__}
    lent[8].__class__ = ToolMessage
    lent.clear()
    for _ in range(3):
        assert [plain(message) for message in c.lend(32)] == expected
    assert ended == [32]
    with pytest.raises(TypeError):
        speed.lend(c.kinds, c.fields, c.names, c.extras, None, 32)
    with pytest.raises(IndexError):
        speed.lend(c.kinds, c.fields, c.names, c.extras, [], 33)


class Evil:
    """Compares by code that changes the list that is being compared."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __hash__(self) -> int:
        return hash("id")

    def __eq__(self, other: object) -> bool:
        self.values.clear()
        raise ZeroDivisionError


def test_what_is_no_message_is_changed_and_harms_nothing(speed: Any) -> None:
    _, c = both_columns(samples())

    def unchanged(spoil: Any) -> int:
        values: list[Any] = c.copies(32)
        spoil(values)
        return c.unchanged(values, 32)

    def delete_slots(values: list[Any]) -> None:
        del values[3].__pydantic_fields_set__, values[4].__pydantic_extra__

    def other_dict(values: list[Any]) -> None:
        values[5].__dict__ = {**values[5].__dict__, "more": 1}

    def cycle(values: list[Any]) -> None:
        values[2].artifact["deep"][0][0][0]["self"] = values[2].artifact

    class Sub(HumanMessage):
        pass

    def subclass(values: list[Any]) -> None:
        values[0] = Sub(content="text", id="1")

    assert unchanged(delete_slots) == 3
    assert unchanged(other_dict) == 5
    assert unchanged(cycle) == 2
    assert unchanged(subclass) == 0
    assert unchanged(lambda values: values.__setitem__(7, None)) == 7
    assert unchanged(lambda values: values.__delitem__(slice(9, None))) == 9
    values: list[Any] = c.copies(32)
    values[4].__pydantic_fields_set__ = {Evil(values) if name == "id" else name for name in c.names[4]}
    with pytest.raises(ZeroDivisionError):
        c.unchanged(values, 32)
    assert values == []
    wrongs: list[tuple[Any, ...]] = [(), (1,), ([], [], [], [], -1), ([], [], [], [], [], "1"), ([], [], [], (), [], 1)]
    for wrong in wrongs:
        for function in (speed.copies, speed.unchanged):
            with pytest.raises((TypeError, IndexError)):
                function(*wrong)
    with pytest.raises(TypeError):
        speed.copies([int], [{}], [set()], [None], [1])


def in_python(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(accelerator_module, "speed", None)
        return work()


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(a=st.binary(max_size=200), b=st.binary(max_size=200), same=st.binary(max_size=5000), where=st.integers(0, 3))
def test_both_find_the_same_difference_of_two_texts(
    monkeypatch: pytest.MonkeyPatch, a: bytes, b: bytes, same: bytes, where: int
) -> None:
    one, two = [(a, b), (same + a, same + b), (a + same, b + same), (same + a + same, same + b + same)][where]
    assert diff.find(one, two) == in_python(monkeypatch, lambda: diff.find(one, two))


class Text(str):
    """A subclass: its text would become plain text."""


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(value=json | st.tuples(json) | st.builds(Text) | st.lists(st.builds(Text)), room=st.integers(-1, 4))
def test_both_write_the_same_plain_values(monkeypatch: pytest.MonkeyPatch, value: Any, room: int) -> None:
    assert plain_values.plain_text(value, room) == in_python(monkeypatch, lambda: plain_values.plain_text(value, room))


@pytest.mark.parametrize("width", [1, 31, 32, 100])
def test_both_multiply_vectors(speed: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    random = numpy.random.default_rng(width)
    vectors = Vectors.of(random.normal(size=(50, width)).astype("f2"), numpy.arange(0, 100, 2), 100)
    target = random.normal(size=width).astype("f4")
    products = vectors.products(target)
    assert numpy.isnan(products).tolist() == [False, True] * 50
    numpy.testing.assert_allclose(products, in_python(monkeypatch, lambda: vectors.products(target)), atol=1e-4)
    assert products[40:60:2].tolist() == Vectors(*(each[40:60:2].copy() for each in vectors)).products(target).tolist()
    for wrong in [
        (*vectors, target[1:], products),
        (*vectors, target, products[1:]),
        (*vectors, target, bytes(400)),
        (),
    ]:
        with pytest.raises((TypeError, ValueError, BufferError)):
            speed.products(*wrong)


def test_texts_and_values_are_read_within_their_limits(speed: Any) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert speed.is_plain(cycle, 200, 8_000_000) is False
    assert speed.is_plain([[0] * 50] * 50, 200, 1000) is None
    for wrong in [(b"a", 2, b"a", 0, 0, False), (b"a", 0, b"a", 0, 2, False), (b"ab", 1, b"ab", 1, 2, True)]:
        with pytest.raises(IndexError):
            speed.common(*wrong)
    for odd in [(), ("a", 0, b"a", 0, 1, False), (b"a", 0, b"a", 0, "1", False)]:
        with pytest.raises(TypeError):
            speed.common(*odd)
    with pytest.raises(TypeError):
        speed.is_plain()


@pytest.mark.parametrize(("setting", "expected"), [("0", "PlainColumns"), ("", "SpeedColumns")])
def test_it_is_used_where_it_is_installed_unless_a_variable_leaves_it_out(setting: str, expected: str) -> None:
    code = "from perdure.langgraph.columns import new_columns; print(type(new_columns()).__name__)"
    environment = {**os.environ, "PERDURE_SPEED": setting}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_a_message_that_was_copied_is_a_message_like_any_other() -> None:
    _, c = both_columns(samples())
    made: list[AnyMessage] = c.copies(4)
    for one, expected in zip(made, samples(), strict=False):
        assert one == expected
        assert one.model_dump_json() == expected.model_dump_json()
        assert copy.deepcopy(one) == one.model_copy(deep=True) == expected
        assert one.model_copy(update={"content": "x"}).content == "x"
