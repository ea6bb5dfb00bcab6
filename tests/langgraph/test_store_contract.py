"""LangGraph's contract of a store: items, batches, lists of namespaces, filters, expiry, what search finds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    SearchOp,
)
from memory_fixtures import START_US
from store_kit import ALICE, BOTH, MODES, Caller, letters

from perdure.errors import UsageError

on_all = pytest.mark.parametrize("caller", MODES, indirect=True)
on_both = pytest.mark.parametrize("caller", BOTH, indirect=True)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(START_US / 1e6 + seconds, UTC)


@on_all
async def test_an_item_is_put_read_replaced_and_deleted(caller: Caller) -> None:
    store = caller.open()
    assert await caller.get(store, "hobby") is None
    await caller.put(store, "hobby", {"fact": "hiking", "places": ["Rome", {"since": 2019}]})
    await caller.put(store, "theme", {"fact": "dark"})
    item = await caller.get(store, "hobby")
    assert item is not None
    assert (item.namespace, item.key) == (ALICE, "hobby")
    assert item.value == {"fact": "hiking", "places": ["Rome", {"since": 2019}]}
    assert item.created_at == item.updated_at == at(0.002)
    await caller.put(store, "hobby", {"fact": "sailing"})
    item = await caller.get(store, "hobby")
    assert item is not None
    assert (item.value, item.created_at, item.updated_at) == ({"fact": "sailing"}, at(0.002), at(0.005))
    assert await caller.keys(store) == ["hobby", "theme"]  # the newest first
    assert [found.score for found in await caller.search(store, ("users",))] == [None, None]
    await caller.call(store, "delete", ALICE, "hobby")
    await caller.call(store, "delete", ALICE, "hobby")
    assert await caller.get(store, "hobby") is None
    assert await caller.keys(store, ()) == ["theme"]


@on_all
async def test_a_batch_reads_what_was_there_before_it_and_the_last_put_of_a_key_counts(caller: Caller) -> None:
    store = caller.open()
    await caller.put(store, "a", {"n": 1})
    ops: list[Op] = [
        PutOp(ALICE, "a", {"n": 2}),
        GetOp(ALICE, "a"),
        PutOp(("other",), "b", {"n": 3}),
        SearchOp(()),
        PutOp(ALICE, "a", {"n": 4}),
        ListNamespacesOp(),
        PutOp(("other",), "c", {"n": 5}),
        PutOp(("other",), "c", None),
        GetOp(("other",), "nothing"),
    ]
    found: list[Any] = await caller.call(store, "batch", (op for op in ops))
    assert [found[place] for place in (0, 2, 4, 6, 7, 8)] == [None] * 6
    assert found[1].value == {"n": 1}
    assert [item.key for item in found[3]] == ["a"]
    assert found[5] == [ALICE]
    assert [(item.key, item.value["n"]) for item in await caller.search(store, ())] in (
        [("b", 3), ("a", 4)],
        [("a", 4), ("b", 3)],
    )
    assert [one.version for one in store.store.memory(*ALICE).history("a")] == [1, 2]
    assert await caller.call(store, "batch", []) == []


@on_both
async def test_namespaces_are_listed_by_prefix_suffix_wildcard_and_depth(caller: Caller) -> None:
    store = caller.open()
    spaces = [("a", "b", "c"), ("a", "b", "d", "e"), ("a", "b", "d", "i"), ("a", "b", "f"), ("a", "c", "f"), ("z",)]
    await caller.call(store, "batch", [PutOp(space, "k", {}) for space in spaces])

    async def listed(**conditions: Any) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = await caller.call(store, "list_namespaces", **conditions)
        return found

    assert await listed() == spaces
    assert await listed(prefix=("a", "b"), max_depth=3) == [("a", "b", "c"), ("a", "b", "d"), ("a", "b", "f")]
    assert await listed(prefix=("a", "*", "f")) == [("a", "b", "f"), ("a", "c", "f")]
    assert await listed(prefix=("*", "b"), suffix=("*", "e")) == [("a", "b", "d", "e")]
    assert await listed(suffix=("f",)) == [("a", "b", "f"), ("a", "c", "f")]
    assert await listed(suffix=("a", "b", "c", "z")) == await listed(prefix=("a", "b", "c", "z")) == []
    # A page is cut from what is left at that depth.
    assert await listed(max_depth=1) == [("a",), ("z",)]
    assert await listed(max_depth=2, limit=1, offset=1) == [("a", "c")]
    assert await listed(limit=2, offset=5) == [("z",)]
    await caller.call(store, "delete", ("z",), "k")
    assert ("z",) not in await listed()


FILTERS: list[tuple[dict[str, Any], str]] = [
    ({"n": 10}, "ten"),
    ({"n": 10.0}, "ten"),
    ({"n": {"$eq": 10}}, "ten"),
    ({"n": {"$ne": 10}}, "one text true"),
    ({"n": {"$gt": 1}}, "ten"),
    ({"n": {"$gte": 1, "$lt": 10}}, "one"),
    ({"n": {"$lte": 10}}, "one ten"),
    ({"n": {"$gt": "9"}}, ""),
    ({"n": {"$gte": "10"}}, "text"),
    ({"n": "10"}, "text"),
    ({"n": True}, "true"),
    ({"meta": {"by": "ann"}}, "one ten"),
    ({"meta": {"by": "ann", "at": {"$gt": 3}}}, "ten"),
    ({"meta": {"$eq": {"by": "ann"}}}, ""),
    ({"meta.by": "bo"}, "text"),
    ({"a.b": 1}, "one"),
    ({"tags": ["x", "y"]}, "ten"),
    ({"and": 7}, "text"),
    ({"missing": {"$gt": 0}}, ""),
    ({"missing": None}, ""),
    ({"none": None}, "true"),
    ({"n": 1, "a.b": 1}, "one"),
    ({}, "one ten text true"),
]


@on_both
async def test_filters_are_typed_and_lose_no_page(caller: Caller) -> None:
    store = caller.open()
    await caller.put(store, "one", {"n": 1, "a.b": 1, "meta": {"by": "ann", "at": 3}})
    await caller.put(store, "ten", {"n": 10, "a": {"b": 2}, "meta": {"by": "ann", "at": 4}, "tags": ["x", "y"]})
    await caller.put(store, "text", {"n": "10", "meta": {"by": "bo"}, "and": 7})
    await caller.put(store, "true", {"n": True, "meta": 5, "none": None})
    for wanted, keys in FILTERS:
        assert set(await caller.keys(store, filter=wanted)) == set(keys.split()), wanted
        assert set(await caller.keys(store, filter=wanted, query="ann")) == set(keys.split()), wanted
    paged = [await caller.keys(store, filter={"meta": {"by": "ann"}}, limit=1, offset=n) for n in range(3)]
    assert paged == [["ten"], ["one"], []]
    refused: list[Any] = [{"$in": [1]}, {"$gt": 1, "other": 2}, {"$gt": {}}]
    for operators in refused:
        with pytest.raises(ValueError):
            await caller.search(store, filter={"n": operators})


@on_all
async def test_items_expire_after_minutes_and_a_read_begins_them_anew(caller: Caller) -> None:
    store = caller.open(ttl={"default_ttl": 10})
    await caller.put(store, "read", {"n": 1})
    await caller.put(store, "unread", {"n": 2})
    await caller.put(store, "short", {"n": 3}, ttl=0.4)
    await caller.put(store, "kept", {"n": 4}, ttl=None)
    caller.clock.pass_s(23)
    assert await caller.get(store, "short", refresh_ttl=False) is not None
    caller.clock.pass_s(2)
    assert await caller.get(store, "short") is None
    assert sorted(await caller.keys(store, refresh_ttl=False)) == ["kept", "read", "unread"]
    caller.clock.pass_s(5 * 60)
    assert await caller.keys(store, filter={"n": 1}) == ["read"]
    caller.clock.pass_s(5 * 60)
    assert sorted(await caller.keys(store, refresh_ttl=False)) == ["kept", "read"]
    assert await caller.get(store, "read") is not None
    caller.clock.pass_s(9.9 * 60)
    assert await caller.get(store, "read", refresh_ttl=False) is not None
    caller.clock.pass_s(9)
    for _ in range(2):  # what has expired is not revived
        assert await caller.get(store, "read") is None
    assert await caller.keys(store) == ["kept"]
    await caller.call(store, "delete", ALICE, "kept")
    assert await caller.call(store, "list_namespaces") == []
    await caller.put(store, "read", {"n": 5})
    item = await caller.get(store, "read")
    assert item is not None
    assert item.created_at > at(60)  # another item than the one that has expired


@on_both
async def test_what_expires_while_it_is_read_is_not_revived(caller: Caller) -> None:
    store = caller.open()
    await caller.put(store, "a", {}, ttl=1)
    times = iter([caller.clock.us + 59_000_000])
    store.store._context.clock_us = lambda: next(times, caller.clock.us + 61_000_000)
    assert await caller.get(store, "a") is not None  # read in time, and its refresh comes too late
    assert await caller.get(store, "a") is None


@on_both
async def test_reads_may_leave_the_expiry_as_it_is(caller: Caller) -> None:
    store = caller.open(ttl={"default_ttl": 1, "refresh_on_read": False})
    await caller.put(store, "a", {})
    await caller.put(store, "b", {})
    caller.clock.pass_s(50)
    assert len(await caller.search(store)) == 2
    assert await caller.get(store, "b", refresh_ttl=True) is not None
    caller.clock.pass_s(15)
    assert await caller.keys(store) == ["b"]
    with pytest.raises(UsageError, match="minutes above 0"):
        await caller.put(store, "a", {}, ttl=0)
    store.store.memory(*ALICE).policy(max_age="90s")  # an age that no read may exceed
    assert await caller.get(store, "b", refresh_ttl=True) is not None
    caller.clock.pass_s(30)
    assert await caller.get(store, "b") is None


@on_all
async def test_a_query_finds_by_meaning_and_words(caller: Caller) -> None:
    store = caller.open(index={"dims": 26, "embed": letters, "fields": ["fact"]})
    await caller.put(store, "zoo", {"fact": "zzzz", "note": "aaaa"})
    await caller.put(store, "fig", {"fact": "aaab"})
    await caller.put(store, "hidden", {"fact": "aaaa"}, index=False)
    await caller.put(store, "other", {"fact": "zzzz", "note": ["aaaaaa"]}, index=["note[*]"])
    found = await caller.search(store, query="aaaa", limit=10)
    assert [item.key for item in found] == ["other", "fig", "zoo", "hidden"]
    assert found.pop().score is None  # as in LangGraph's InMemoryStore, what has no vector comes last
    scores = [item.score or 0.0 for item in found]
    assert scores[0] > 0.99
    assert scores == sorted(scores, reverse=True)
    assert await caller.keys(store, query="aaaa", limit=1, offset=1) == ["fig"]
    assert await caller.keys(store, query="aaaa", filter={"fact": "zzzz"}, limit=1, offset=1) == ["zoo"]
    assert len(await caller.search(store, query="")) == 4  # no query


@on_both
async def test_without_an_embedder_words_come_first_and_nothing_is_left_out(caller: Caller) -> None:
    store = caller.open()
    await caller.put(store, "hike", {"fact": "Alice loves hiking"})
    await caller.put(store, "mode", {"fact": "dark mode"})
    await caller.put(store, "tea", {"fact": "green tea"})
    found = await caller.search(store, query="dark modes")
    assert [(item.key, item.score is None) for item in found] == [("mode", False), ("tea", True), ("hike", True)]
    pages = [await caller.keys(store, query="dark", limit=1, offset=place) for place in range(4)]
    assert pages == [["mode"], ["tea"], ["hike"], []]


@on_both
async def test_operations_of_a_batch_are_checked_as_methods_check_them(caller: Caller) -> None:
    store = caller.open()
    condition = MatchCondition("prefix", ("a.b",))
    refused: list[Any] = [
        GetOp(("a.b",), "k"),
        PutOp(("a", ""), "k", {}),
        SearchOp(("a\0",)),
        ListNamespacesOp((condition,)),
        PutOp((), "k", {}),
    ]
    for op in refused:
        with pytest.raises(InvalidNamespaceError):
            await caller.call(store, "batch", [PutOp(("fine",), "k", {}), op])
    others: list[Any] = [
        "get",
        PutOp(("a",), "k", ["no mapping"]),  # type: ignore[arg-type]
        PutOp(("a",), 7, {}),  # type: ignore[arg-type]
        ListNamespacesOp((MatchCondition("infix", ("a",)),)),  # type: ignore[arg-type]
    ]
    for op in others:
        with pytest.raises(UsageError):
            await caller.call(store, "batch", [PutOp(("fine",), "k", {}), op])
    with pytest.raises(InvalidNamespaceError):
        await caller.call(store, "put", ("langgraph", "x"), "k", {})
    assert await caller.call(store, "batch", [GetOp((), "k"), PutOp((), "k", None)]) == [None, None]
    assert await caller.search(store, ()) == []


@pytest.mark.parametrize("caller", BOTH[:1], indirect=True)
async def test_a_text_is_no_namespace(caller: Caller) -> None:
    store = caller.open()
    ops: list[Any] = [PutOp("users", "a", {}), GetOp("users", "a"), SearchOp("users")]  # type: ignore[arg-type]
    for op in ops:
        with pytest.raises(InvalidNamespaceError, match=r"a tuple of labels, \('users',\)"):
            await caller.call(store, "batch", [op])
