"""LangGraph's store: a vector for each field, distances, batches that wait together, and the sweep of expired items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from langgraph.store.base import GetOp, PutOp
from langgraph.store.memory import InMemoryStore
from store_kit import ALICE, BOTH, Caller, letters

from perdure.errors import UsageError
from perdure.langgraph import PerdureStore

on_both = pytest.mark.parametrize("caller", BOTH, indirect=True)
LONG = {"title": "vacation", "body": "quarterly revenue by region, product and channel " * 8}
SHORT = {"title": "holiday", "body": "party food list"}


@on_both
async def test_each_field_has_a_vector_and_the_nearest_counts_as_in_langgraph(caller: Caller) -> None:
    index: Any = {"dims": 26, "embed": letters, "fields": ["title", "body"]}
    store, stock = caller.open(index=index), InMemoryStore(index=index)
    for key, value in (("long", LONG), ("short", SHORT), ("bare", {"body": "vvv"})):
        await caller.put(store, key, value)
        stock.put(ALICE, key, value)
    for query in ("vacation", "party list", "revenue", "v"):
        found, expected = await caller.search(store, query=query), stock.search(ALICE, query=query)
        assert [item.key for item in found] == [item.key for item in expected]
        assert [item.score for item in found] == pytest.approx([item.score for item in expected], abs=1e-3)
        scores = [item.score or 0.0 for item in found]
        assert scores == sorted(scores, reverse=True)
    await caller.put(store, "long", {"title": "zzz"})  # the vectors of both fields are replaced
    assert (await caller.keys(store, query="vacation"))[0] != "long"
    for number in range(40):  # merges segments of the index
        await caller.put(store, f"filler{number}", {"title": "qqq", "body": f"xx{number}"})
        await caller.keys(store, query="q")
    assert (await caller.keys(store, query="party food list"))[0] == "short"
    assert store.store.memory(*ALICE).reembed() == 0


async def test_the_distance_is_as_configured() -> None:
    scores = {}
    for distance in ("cosine", "inner_product", "l2"):
        index: Any = {"dims": 26, "embed": letters, "distance_type": distance}
        with PerdureStore(index=index) as store:
            assert store.embeddings.embed_documents(["ab"]) == letters(["ab"])
            store.put(ALICE, "same", {"fact": "aabb"})
            store.put(ALICE, "near", {"fact": "aabbc"})
            scores[distance] = [item.score for item in store.search(ALICE, query="aabb")]
    assert scores["cosine"] == scores["inner_product"] == pytest.approx([1, (8 / 9) ** 0.5], abs=2e-3)
    assert scores["l2"] == pytest.approx([0, -((2 - 2 * (8 / 9) ** 0.5) ** 0.5)], abs=5e-3)
    index["distance_type"] = "hamming"
    with pytest.raises(UsageError, match="cosine, inner_product, l2"):
        PerdureStore(index=index)


@pytest.mark.parametrize("caller", ["sqlite-async", "postgres-async"], indirect=True)
async def test_calls_that_wait_together_are_one_batch_and_fail_alone(caller: Caller) -> None:
    store = caller.open()
    batches: list[int] = []
    run = store._merged._run

    async def counted(ops: Sequence[Any]) -> Any:
        batches.append(len(ops))
        return await run(ops)

    store._merged._run = counted
    await asyncio.gather(*(store.aput(ALICE, f"k{n}", {"n": n}) for n in range(50)))
    assert batches == [50]
    got = await asyncio.gather(*(store.aget(ALICE, f"k{n % 5}") for n in range(50)), store.asearch(ALICE, limit=3))
    assert [item.value["n"] for item in got[:50]] == [n % 5 for n in range(50)]  # type: ignore[union-attr]
    assert batches == [50, 6]  # equal reads are one
    results: Any = await asyncio.gather(
        store.aput(ALICE, "good", {"n": 1}),
        store.aput(ALICE, "bad", {"n": object()}),
        store.abatch([PutOp(ALICE, "also", {"n": 2}), GetOp(ALICE, "k1")]),
        return_exceptions=True,
    )
    assert results[0] is None
    assert isinstance(results[1], Exception)
    assert results[2][1].value == {"n": 1}
    cancelled = asyncio.create_task(store.aput(ALICE, "cancelled", {}))
    kept = asyncio.create_task(store.aput(ALICE, "kept", {}))
    await asyncio.sleep(0)
    cancelled.cancel()
    await kept
    assert [await caller.get(store, key) is not None for key in ("good", "also", "bad", "cancelled", "kept")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_one_store_serves_several_event_loops() -> None:
    with PerdureStore() as store:
        for number in range(2):
            asyncio.run(store.aput(ALICE, f"k{number}", {}))
        assert len(store.search(ALICE)) == 2


@on_both
async def test_expired_items_are_swept_by_call_and_by_a_thread(caller: Caller) -> None:
    store = caller.open(ttl={"default_ttl": 1, "sweep_interval_minutes": 1e-5})
    await caller.put(store, "a", {})
    await caller.put(store, "b", {})
    await caller.put(store, "kept", {}, ttl=None)
    assert store.sweep_ttl() == 0
    caller.clock.pass_s(61)
    assert await store.sweep_ttl() == 2  # as with LangGraph's async stores
    assert [one.gone for one in store.store.memory(*ALICE).history("a")] == [None, "expired"]
    await caller.put(store, "c", {})
    caller.clock.pass_s(61)
    assert await store.asweep_ttl() == 1
    swept, sweep = threading.Event(), store.sweep_ttl
    store.sweep_ttl = lambda: (sweep(), swept.set())[0]  # type: ignore[method-assign, func-returns-value]
    await caller.put(store, "d", {})
    caller.clock.pass_s(61)
    sweeping = await store.start_ttl_sweeper()
    assert store.start_ttl_sweeper() is sweeping
    assert await asyncio.to_thread(swept.wait, 30)
    assert await store.stop_ttl_sweeper()
    assert sweeping.done()
    assert store.store.memory(*ALICE).history("d")[-1].gone == "expired"
    store.start_ttl_sweeper().cancel()
    assert store.stop_ttl_sweeper(30)
    assert caller.open().start_ttl_sweeper().done()  # without `ttl` nothing expires by default
