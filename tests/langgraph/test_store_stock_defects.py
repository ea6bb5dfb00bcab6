"""What LangGraph's own stores get wrong, each with a test that `PerdureStore` does not."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langgraph.store.base import PutOp
from store_kit import ALICE, BOTH, Caller, letters

import perdure
from perdure.errors import UsageError
from perdure.langgraph import PerdureStore

on_both = pytest.mark.parametrize("caller", BOTH, indirect=True)
INDEX: Any = {"dims": 26, "embed": letters, "fields": ["fact"]}


def test_an_index_needs_no_extension_of_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """SqliteStore: AttributeError on Pythons whose sqlite3 loads none."""
    monkeypatch.delattr(sqlite3.Connection, "enable_load_extension", raising=False)
    with PerdureStore(":memory:", index=INDEX) as store:
        store.put(ALICE, "a", {"fact": "aaa"})
        assert [item.key for item in store.search(ALICE, query="aa")] == ["a"]


@on_both
async def test_the_configured_fields_are_indexed_and_no_others(caller: Caller) -> None:
    """SqliteStore embeds the whole value, whatever `fields` says."""
    store = caller.open(index=INDEX)
    await caller.put(store, "right", {"fact": "aaab", "note": "zzzz"})
    await caller.put(store, "wrong", {"fact": "zzzz", "note": "aaaa"})
    assert await caller.keys(store, query="aaaa", limit=1) == ["right"]
    assert store.store.memory(*ALICE).search("zzzz", limit=1)[0].key == "wrong"


@on_both
async def test_the_nearest_comes_first_and_every_page_is_full(caller: Caller) -> None:
    """SqliteStore: with "l2" the farthest come first; 50 items in pages of 10 are 10, 10, 0, 0, 0."""
    store = caller.open(index=INDEX)
    texts = [f"{'a' * (number + 1)}b" for number in range(50)]
    await caller.call(store, "batch", [PutOp(ALICE, text, {"fact": text}) for text in texts])
    pages = [await caller.search(store, query="aaaa", offset=start, limit=10) for start in range(0, 60, 10)]
    assert [len(page) for page in pages] == [10, 10, 10, 10, 10, 0]
    found = [item for page in pages for item in page]
    assert len({item.key for item in found}) == 50
    scores = [item.score for item in found]
    assert scores == sorted(scores, key=lambda score: -(score or 0))


@on_both
async def test_an_item_is_not_found_by_what_it_said_before(caller: Caller) -> None:
    """SqliteStore: a deletion leaves the vectors, and an item put again without an index is found by them."""
    store = caller.open(index=INDEX)
    await caller.put(store, "a", {"fact": "aaaa"})
    await caller.call(store, "delete", ALICE, "a")
    await caller.put(store, "a", {"fact": "bbbb"}, index=False)
    [unranked] = await caller.search(store, query="aaaa")
    assert (unranked.key, unranked.score) == ("a", None)
    await caller.put(store, "b", {"fact": "aaaa"})
    await caller.put(store, "b", {"fact": "zzzz"})
    found, _ = await caller.search(store, query="aaaa")
    assert (found.key, found.score is not None and found.score < 0.1) == ("b", True)


@on_both
async def test_an_update_keeps_the_time_of_creation_and_times_have_a_zone(caller: Caller) -> None:
    """SqliteStore and InMemoryStore reset `created_at`; SqliteStore's times are naive."""
    store = caller.open()
    await caller.put(store, "a", {"n": 1})
    before = await caller.get(store, "a")
    await caller.put(store, "a", {"n": 2})
    after = await caller.get(store, "a")
    assert before is not None
    assert after is not None
    assert after.created_at == before.created_at < after.updated_at
    assert after.created_at.tzinfo is after.updated_at.tzinfo is UTC


@on_both
async def test_what_has_expired_is_not_returned_by_anything(caller: Caller) -> None:
    """Stock stores return it until a sweep, SqliteStore also with `omit_expired`. PostgresStore rounds minutes."""
    store = caller.open(index=INDEX)
    await caller.put(store, "a", {"fact": "aaaa"}, ttl=0.4)
    assert await caller.keys(store, refresh_ttl=False) == ["a"]
    caller.clock.pass_s(24.1)
    assert await caller.get(store, "a") is None
    assert await caller.keys(store) == await caller.keys(store, query="aaaa") == []
    assert await caller.call(store, "list_namespaces") == []


@on_both
async def test_a_batch_that_fails_leaves_nothing(caller: Caller) -> None:
    """SqliteStore commits in `finally`: what came before the error stays."""
    store = caller.open()
    puts = [PutOp(("one",), "a", {"n": 1}), PutOp(("two",), "b", {"n": object()})]
    with pytest.raises(perdure.Unstorable):
        await caller.call(store, "batch", puts)
    store.store.memory("two").policy(max_bytes=50)
    puts[1] = PutOp(("two",), "b", {"n": "x" * 100})  # refused by the second namespace, in the transaction
    with pytest.raises(UsageError, match="capped"):
        await caller.call(store, "batch", puts)
    assert await caller.search(store, ()) == []


@on_both
async def test_a_filter_compares_numbers_as_numbers_and_mappings_by_field(caller: Caller) -> None:
    """PostgresStore compares as text, InMemoryStore fails at a missing field, SqliteStore at a nested mapping. To
    SqliteStore "a.b" is a path, to PostgresStore a name: here it is the name, or else the path."""
    store = caller.open()
    numbers = [1, 2, 9, 10, 100]
    await caller.call(store, "batch", [PutOp(ALICE, str(n), {"x": n, "m": {"a": n, "b": 0}}) for n in numbers])
    await caller.put(store, "none", {"y": {"z": 5}, "y.w": 6})
    assert sorted(await caller.keys(store, filter={"x": {"$gt": 9}})) == ["10", "100"]
    assert sorted(await caller.keys(store, filter={"x": {"$lt": 9}})) == ["1", "2"]
    assert await caller.keys(store, filter={"m": {"b": 0, "a": 9}}) == ["9"]
    assert await caller.keys(store, filter={"y.z": 5}) == await caller.keys(store, filter={"y.w": 6}) == ["none"]


@on_both
async def test_a_value_may_hold_nul_and_any_text(caller: Caller) -> None:
    """PostgresStore fails at NUL."""
    store = caller.open(index=INDEX)
    value = {
        "fact": "a\0b",
        "k\0": ["\u202e", "\U0001d56c", "'; DROP TABLE memory_item; --"],
        "deep": {"x": (1, b"\0")},
    }
    await caller.put(store, "k\0ey", value)
    item = await caller.get(store, "k\0ey")
    assert item is not None
    assert item.value == value
    assert await caller.keys(store, filter={"k\0": ["\u202e", "\U0001d56c", "'; DROP TABLE memory_item; --"]}) == [
        "k\0ey"
    ]


@on_both
async def test_two_items_of_a_batch_may_say_the_same(caller: Caller) -> None:
    """InMemoryStore: ValueError, the numbers of texts and of embeddings differ."""
    store = caller.open(index=INDEX)
    await caller.call(store, "batch", [PutOp(ALICE, key, {"fact": "same"}) for key in "ab"])
    assert sorted(await caller.keys(store, query="same")) == ["a", "b"]


@on_both
async def test_what_is_put_and_what_is_read_are_copies(caller: Caller) -> None:
    """InMemoryStore hands out what it holds."""
    store = caller.open()
    given: dict[str, Any] = {"list": [1]}
    await caller.put(store, "a", given)
    given["list"].append(2)
    for _ in range(2):
        item = await caller.get(store, "a")
        [found] = await caller.search(store)
        assert item is not None
        assert item.value == found.value == {"list": [1]}
        item.value["list"].append(3)
        found.value["more"] = 4


def test_async_calls_work_on_every_loop_and_leave_no_task() -> None:
    """AsyncBatchedBaseStore runs a task in the background, and is bound to the loop it was made on."""
    with PerdureStore(":memory:", index=INDEX) as store:

        async def use(key: str) -> int:
            await asyncio.gather(*(store.aput(ALICE, f"{key}{n}", {"fact": "aaa"}) for n in range(5)))
            store.put(ALICE, key, {"fact": "zzz"})  # blocking, on the loop
            found = await store.asearch(ALICE, query="aaa", limit=100)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return len(found)

        assert [asyncio.run(use(key)) for key in "abc"] == [6, 12, 18]


class TwoWays(Embeddings):
    """As many models: a query is embedded in another way than what it is to find."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return letters([text.replace("answer", "") for text in texts])

    def embed_query(self, text: str) -> list[float]:
        self.asked.append(text)
        return letters([text.replace("question", "")])[0]


async def async_letters(texts: list[str]) -> list[list[float]]:
    await asyncio.sleep(0)
    return letters(texts)


class AsyncObject:
    """An async function that is an object."""

    async def __call__(self, texts: list[str]) -> list[list[float]]:
        return letters(texts)


@pytest.mark.parametrize(
    "embed",
    [letters, async_letters, AsyncObject(), TwoWays(), "local"],
    ids=["function", "async-function", "async-object", "embeddings", "local"],
)
@on_both
async def test_every_form_of_an_embedder_serves_blocking_and_async_callers(caller: Caller, embed: Any) -> None:
    """An async function fails in blocking methods of the stock stores."""
    dims = 256 if embed == "local" else 26
    store = caller.open(index={"dims": dims, "embed": embed})
    await caller.put(store, "a", {"fact": "answer dark kart"})
    await caller.put(store, "b", {"fact": "answer moon moon"})
    for waits in (True, False):
        caller.waits = waits
        found = await caller.search(store, query="question dark kart", limit=1)
        assert [item.key for item in found] == ["a"]
        assert found[0].score is not None
        assert found[0].score > 0.5
    if isinstance(embed, TwoWays):
        assert set(embed.asked) == {"question dark kart"}
        assert found[0].score is not None
        assert found[0].score > 0.99


def test_a_provider_and_a_model_are_loaded_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def init_embeddings(name: str) -> Embeddings:
        made.append(name)
        return TwoWays()

    monkeypatch.setattr("langgraph.store.base.embed._get_init_embeddings", lambda: init_embeddings)
    with PerdureStore(":memory:", index={"dims": 26, "embed": "acme:small"}) as store:
        store.put(ALICE, "a", {"fact": "abc"})
        assert store.search(ALICE, query="abc")[0].score is not None
    assert made == ["acme:small"]


def test_a_store_has_one_embedder() -> None:
    with perdure.open(":memory:", embedder="local") as store:
        PerdureStore(store, index={"fields": ["fact"]}).put(ALICE, "a", {"fact": "hiking in the mountains", "n": "ink"})
        found = PerdureStore(store, index={"embed": "local"}).search(ALICE, query="outdoor activities")
        assert found[0].score is not None
        with pytest.raises(UsageError, match="cannot have"):
            PerdureStore(store, index=INDEX)
        with pytest.raises(UsageError, match="256 numbers, not of 26"):
            PerdureStore(store, index={"embed": "local", "dims": 26})
