"""A filter is applied before items are ranked: it finds the same as decoding every item, and decodes few."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure import UsageError
from perdure.langgraph import PerdureStore
from perdure.memory import reading, search
from perdure.memory.columns import FieldColumn
from perdure.memory.filters import CONDITIONS_MAX, MISSING, OPERATORS, field_condition, matcher
from perdure.memory.segments import IndexScope

PAST = datetime(2026, 1, 1)
numbers = [0, 1, 1.0, 2, Decimal("1.5"), float("nan"), True, False]
times = [PAST, PAST.replace(tzinfo=UTC), PAST.date()]
scalars = st.sampled_from([*numbers, None, "", "a", "ab", "b", b"a", b"ab", *times])
values = (
    scalars | st.lists(scalars, max_size=2) | st.just({"a": 1}) | st.just(MISSING) | st.builds(numpy.zeros, st.just(2))
)


@given(st.lists(values, max_size=12), st.sampled_from([*OPERATORS]), scalars | st.lists(scalars, max_size=3))
def test_a_column_selects_what_the_condition_accepts(stored: list[Any], operator: str, operand: Any) -> None:
    try:
        test = field_condition((), operator, operand)
    except UsageError:
        return
    assert FieldColumn(stored).select(test).tolist() == [test(value) for value in stored]


texts = st.text(st.sampled_from("ab\0é🐟\ud800"), max_size=6)


@given(st.lists(texts, max_size=12), texts)
def test_a_column_of_texts_selects_those_that_contain_another(stored: list[str], operand: str) -> None:
    test = field_condition((), "contains", operand)
    assert FieldColumn(stored).select(test).tolist() == [operand in text for text in stored]


FILTERS: list[dict[str, Any]] = [
    {"even": True, "n": {"gte": 10}},
    {"n": {"lt": 3}},
    {"n": {"gt": 1000}},
    {"tags": {"contains": "t7"}},
    {"text": {"contains": "11"}},
    {"not": {"n": {"lt": 190}}},
    {"or": [{"n": 5}, {"n": 6}, {"rare": {"exists": True}}]},
    {"author.name": {"in": ["ann3", "ann4"]}},
]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the items that searches decode, once for each time."""
    decoded: list[str] = []
    for name in ("item_of", "value_of"):

        def counting(row: Any, *args: Any, original: Callable[..., Any] = getattr(reading, name), **kwargs: Any) -> Any:
            decoded.append(row.key)
            return original(row, *args, **kwargs)

        monkeypatch.setattr(reading, name, counting)
    monkeypatch.setattr(search, "_DECODED_MAX", 16)
    return decoded


def test_a_filter_finds_what_decoding_everything_finds_and_decodes_each_item_once(
    tmp_path: Path, counted: list[str]
) -> None:
    with perdure.open(tmp_path / "a.db", durability="normal") as store:
        memory = store.memory("u")
        for start in (0, 100):
            for n in range(start, start + 100):
                value = {
                    "n": n,
                    "even": n % 2 == 0,
                    "text": f"fish {n}",
                    "tags": [f"t{n % 9}"],
                    "author": {"name": f"ann{n}"},
                }
                memory.put(f"k{n}", value | ({"rare": 1} if n == 77 else {}), kind="odd" if n % 2 else "even")
            for where in FILTERS:
                found = memory.search("fish", where=where, limit=20)
                assert {item.key for item in found} <= {item.key for item in memory.list(where=where, limit=None)}
                assert len(found) == min(20, len(memory.list(where=where, limit=None))), where
        memory.delete("k6")
        memory.put("k5", {"text": "fish", "n": 5000})
        assert [item.key for item in memory.search("fish", where={"n": {"gt": 1000}})] == ["k5"]
        assert [item.key for item in memory.search("fish", where=FILTERS[6])] == ["k77"]
        counted.clear()
        assert [item.key for item in memory.search("fish", where={"n": 199}, kind="odd")] == ["k199"]
        assert memory.search("fish", where={"n": 199}, kind="even") == []
        assert {*counted} == {"k199"}


def test_a_filter_that_many_of_the_first_items_fail_needs_one_ranking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rankings: list[int] = []

    def counting(scope: IndexScope, *args: Any, original: Any = IndexScope.rank, **options: Any) -> Any:
        rankings.append(scope.count)
        return original(scope, *args, **options)

    monkeypatch.setattr(IndexScope, "rank", counting)
    with perdure.open(tmp_path / "a.db", durability="normal") as store:
        memory = store.memory("u")
        memory.put_many({f"k{n}": {"text": "fish", "even": n % 2 == 0} for n in range(200)})
        for _ in range(3):
            rankings.clear()
            assert len(memory.search("fish", where={"even": True}, limit=15)) == 15
        assert rankings == [200]


def test_a_filter_of_langgraph_is_applied_before_ranking_too(tmp_path: Path, counted: list[str]) -> None:
    with PerdureStore(str(tmp_path / "a.db")) as store:
        for n in range(100):
            store.put(("u",), f"k{n}", {"text": "fish", "author": {"age": n}})
        old = {"author": {"age": {"$gte": 98}}}
        assert {item.key for item in store.search(("u",), query="fish", filter=old, limit=2)} == {"k98", "k99"}
        counted.clear()
        assert {item.key for item in store.search(("u",), query="fish", filter=old, limit=10)} == {"k98", "k99"}
        assert {*counted} == {"k98", "k99"}
        store.put(("u",), "stone", {"text": "stone", "author": {"age": 98}})
        found = store.search(("u",), query="fish", filter=old, limit=10)
        assert [item.key for item in found][2:] == ["stone"]  # without a score
        counted.clear()
        assert store.search(("u",), query="fish", filter=old, limit=10) == found
        assert store.search(("u",), query="fish", filter=old, limit=1, offset=2) == found[2:]
        assert {*counted} == {"k98", "k99", "stone"}


def test_a_migration_that_is_registered_later_changes_what_a_filter_finds(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.memory.schemas._steps", {})
    with perdure.open(tmp_path / "a.db", durability="normal") as store:
        memory = store.memory("u")
        for n in range(50):
            memory.put(f"k{n}", {"text": "fish", "n": n}, schema="profile:1")
        assert len(memory.search("fish", where={"n": 7})) == 1
        perdure.memory.migration("profile", 1, 2)(lambda value: {**value, "n": 7})
        assert len(memory.search("fish", where={"n": 7}, limit=100)) == 50


def test_a_filter_of_too_many_conditions_is_refused() -> None:
    with pytest.raises(UsageError, match=r"1,001 conditions.*in"):
        matcher({"or": [{"n": n} for n in range(CONDITIONS_MAX + 1)]})
