"""What cannot be kept exactly is refused, with its path and the fix, before anything is written."""

from __future__ import annotations

import math
import threading
import time as clock
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

import numpy as np
import pytest

from perdure.errors import Unstorable
from perdure.values.codec import DEPTH_MAX, Codec, decode, encode
from perdure.values.registry import register

CODEC = Codec()


@register
@dataclass
class Base:
    title: str


class MyStr(str):
    pass


class MyDict(dict[str, Any]):
    pass


class OddZone(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(0)

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "odd"


@dataclass
class Unregistered:
    callback: Any = None


def local() -> Any:
    @dataclass
    class Local:
        pass

    return Local()


@register
@dataclass
class Holder:
    callback: Any = None


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({"plan": [1, 2, 3, Holder(len)]}, 'state["plan"][3].callback', "not data"),
        ({"a": Unregistered()}, 'state["a"]', "@perdure.register"),
        ({"a": local()}, 'state["a"]', "inside a function, so that nothing finds it by its name"),
        ({"a": MyStr("x")}, 'state["a"]', "MyStr"),
        ({"a": MyDict()}, 'state["a"]', "MyDict"),
        ({MyStr("x"): 1}, "state.<key MyStr>", "MyStr"),
        ([threading.Lock()], "state[0]", "not data"),
        ([iter(())], "state[0]", "not data"),
        ([slice(1)], "state[0]", "not data"),
        ([math], "state[0]", "not data"),
        (Holder({1: {object()}}), "state.callback[1].<member object>", "not data"),
        ({"a": defaultdict(list)}, 'state["a"]', "defaultdict"),
        ({"a": 1j}, 'state["a"]', "complex"),
        ({"a": np.zeros(1, [("x", "i4")])}, 'state["a"]', "dtype"),
        ({"a": datetime(2024, 1, 1, tzinfo=OddZone())}, 'state["a"]', "OddZone"),
        ({"a": np.array([None])}, 'state["a"]', "Python objects"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_path_and_the_fix(value: Any, path: str, words: str) -> None:
    with pytest.raises(Unstorable) as caught:
        encode(value, CODEC)
    assert caught.value.path == path
    assert path in str(caught.value)
    assert words in str(caught.value)


def test_an_attribute_that_is_no_field_is_refused_rather_than_lost() -> None:
    value = Base("t")
    value.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(Unstorable, match="'extra' is not a field"):
        encode(value, CODEC)


def test_a_value_that_holds_itself_is_refused_quickly() -> None:
    narrow: list[Any] = []
    narrow.append(narrow)
    wide: dict[str, Any] = {}
    wide["a"] = [wide] * 50
    tagged: list[Any] = []
    tagged.append((tagged, {1: tagged}))
    begin = clock.monotonic()
    for value in (narrow, wide, tagged, Holder(wide)):
        with pytest.raises(Unstorable, match="refers to itself"):
            encode(value, CODEC)
    assert clock.monotonic() - begin < 20


def test_sharing_that_would_explode_is_refused() -> None:
    value: Any = [1]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(Unstorable, match="values"):
        encode(value, CODEC)


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [(lambda v: [v], 1), (lambda v: (v,), 2), (lambda v: {"a": v}, 1), (lambda v: {1: v}, 3), (Holder, 3)],
)
def test_nesting_up_to_the_limit_comes_back_and_beyond_it_is_refused(wrap: Any, levels: int) -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX // levels):
        value = wrap(value)
    assert encode(decode(encode(value, CODEC), CODEC), CODEC) == encode(value, CODEC)
    for _ in range(4):
        value = wrap(value)
    with pytest.raises(Unstorable, match="deep"):
        encode(value, CODEC)
