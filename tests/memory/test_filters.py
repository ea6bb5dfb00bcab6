"""Filters compare by type, and agree with what they say."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import UsageError
from perdure.memory.filters import matcher, same

VALUE = {
    "topic": "ui",
    "age": 30,
    "done": True,
    "none": None,
    "tags": ["vip", 1],
    "author": {"name": "ann", "age": 7},
    "dotted.name": "x",
    "at": datetime(2026, 1, 1, tzinfo=UTC),
    "array": numpy.zeros(2),
}


@pytest.mark.parametrize(
    "where",
    [
        {},
        None,
        {"topic": "ui", "age": 30},
        {"age": 30.0},
        {"age": {"gt": 29, "gte": Decimal(30), "lt": 30.5, "lte": 30, "ne": 31}},
        {"topic": {"gt": "u", "contains": "u", "in": ["x", "ui"]}},
        {"tags": {"contains": "vip"}},
        {"tags": ("vip", 1)},
        {"none": None},
        {"none": {"exists": True}},
        {"absent": {"exists": False}},
        {"absent": {"ne": 1}},
        {"not": {"absent": 1}},
        {"author.name": "ann"},
        {"author": {"eq": {"name": "ann", "age": 7}}},
        {"dotted.name": "x"},
        {"at": {"lt": datetime(2027, 1, 1, tzinfo=UTC)}},
        {"or": [{"topic": "no"}, {"and": [{"age": 30}, {"done": True}]}]},
        {"not": {"or": []}},
    ],
)
def test_what_matches(where: dict[str, Any] | None) -> None:
    assert matcher(where)(VALUE)


@pytest.mark.parametrize(
    "where",
    [
        {"topic": "ui", "age": 31},
        {"age": "30"},
        {"age": {"gt": "2"}},
        {"age": {"gt": 30}},
        {"done": 1},
        {"done": {"gte": 0}},
        {"tags": {"contains": True}},
        {"tags": {"contains": "vi"}},
        {"topic": {"contains": 1}},
        {"none": {"lt": 1}},
        {"absent": None},
        {"absent": {"gt": 0}},
        {"absent": {"in": [None]}},
        {"author.name.first": {"exists": True}},
        {"at": {"lt": datetime(2027, 1, 1)}},  # no zone
        {"array": 0},
        {"age": {"lt": float("nan")}},
        {"or": []},
    ],
)
def test_what_does_not_match(where: dict[str, Any]) -> None:
    assert not matcher(where)(VALUE)


@pytest.mark.parametrize(
    "where",
    [
        "topic",
        {"topic": {"$gt": 1}},
        {"topic": {"gt": 1, "name": "x"}},
        {"topic": {}},
        {"topic": {"gt": None}},
        {"topic": {"gt": True}},
        {"topic": {"in": "ui"}},
        {"topic": {"exists": 1}},
        {"or": {"topic": "ui"}},
        {"and": "topic"},
        {"not": ["topic"]},
        {"$or": [{"topic": "ui"}]},
        {1: 2},
    ],
)
def test_what_is_no_filter_is_refused(where: Any) -> None:
    with pytest.raises(UsageError):
        matcher(where)


def test_a_filter_of_any_depth_is_refused_in_time() -> None:
    where: dict[str, Any] = {}
    for _ in range(100_000):
        where = {"not": where}
    with pytest.raises(UsageError, match="deep"):
        matcher(where)


def test_values_that_are_objects_have_their_attributes_as_fields() -> None:
    @dataclass
    class Profile:
        name: str

        @property
        def computed(self) -> str:
            raise AssertionError("a filter runs no code of a value")

    assert matcher({"name": "ann"})(Profile("ann"))
    assert matcher({"computed": {"exists": False}})(Profile("ann"))
    assert not matcher({"name": "ann"})("ann")


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.sampled_from(("", "1", "a")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
)


@given(plain, plain)
def test_each_operator_agrees_with_the_others(one: Any, other: Any) -> None:
    def holds(name: str) -> bool:
        return matcher({"field": {name: [other] if name == "in" else other}})({"field": one})

    assert holds("eq") == (not holds("ne")) == holds("in") == same(other, one)
    assert same(one, one)
    if isinstance(other, int | float | str) and not isinstance(other, bool):
        assert holds("gte") == (holds("gt") or (holds("eq")))
        assert holds("lte") == (holds("lt") or (holds("eq")))
        assert not (holds("gt") and holds("lt"))
