"""Search finds what was written, by every process at once; live index, fresh index and encrypted store agree."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from memory_fixtures import BOTH, MemoryHarness
from tcp_proxy import WireProxy

import perdure
from perdure import UsageError
from perdure.langgraph import PerdureStore
from perdure.memory.handle import Memory
from perdure.memory.models import Item
from perdure.testing.postgres_server import PostgresServer
from perdure.threads.models import moment

TEXTS = [
    "hiking in the mountains", "sailing on the lake", "dark mode in the editor", "light mode on the phone",
    "a hike along the lake", "chess in the evening", "mountain railways", "the editor crashed",
]  # fmt: skip


@pytest.fixture
def alice(memory: MemoryHarness) -> Memory:
    return memory.store.memory("users", "alice")


def shown(found: list[Item]) -> list[tuple[str, int, float | None]]:
    return [(item.key, item.version, item.score) for item in found]


@pytest.mark.parametrize("memory", BOTH, indirect=True)
class TestSearch:
    async def test_it_finds_stems_in_the_namespace_and_below(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.do(alice, "put_many", {f"k{n}": {"fact": text, "n": n} for n, text in enumerate(TEXTS)})
        await memory.put(memory.store.memory("users", "bob"), "b", {"fact": "hiking"})
        await memory.put(memory.store.memory("users", "alice", "work"), "w", {"fact": "hiked to work"})
        assert {item.key for item in await memory.do(alice, "search", "hikes")} == {"k0", "k4", "w"}
        everyone = await memory.do(memory.store.memory("users"), "search", "hikes")
        assert {item.key for item in everyone} == {"k0", "k4", "w", "b"}
        assert await memory.do(alice, "search", "unheard") == []

    async def test_a_search_sees_every_write_before_it(self, memory: MemoryHarness, alice: Memory) -> None:
        other = memory.open().memory("users", "alice")
        await memory.put(alice, "a", "hiking")
        assert [item.key for item in await memory.do(other, "search", "hiking")] == ["a"]
        await memory.put(alice, "b", "hiking again")
        await memory.put(alice, "a", "sailing")
        assert [item.key for item in await memory.do(other, "search", "hiking")] == ["b"]
        for _ in range(3):  # then what is kept is asked first
            assert [item.key for item in await memory.do(other, "search", "hiking")] == ["b"]
        await memory.put(alice, "c", "hiking")
        assert [item.key for item in await memory.do(other, "search", "hiking")] == ["c", "b"]
        await memory.do(alice, "delete", "b")
        await memory.do(alice, "delete", "c")
        assert await memory.do(other, "search", "hiking") == []

    async def test_a_filter_loses_no_row_and_no_page(self, memory: MemoryHarness, alice: Memory) -> None:
        many = {f"k{n}": {"fact": "hiking " * (1 + n % 3), "n": n, "even": n % 2 == 0} for n in range(90)}
        await memory.do(alice, "put_many", many)
        where = {"even": True, "n": {"gte": 10}}
        pages = [
            item.value["n"]
            for start in range(0, 50, 7)
            for item in await memory.do(alice, "search", "hiking", where=where, limit=7, offset=start)
        ]
        assert sorted(pages) == list(range(10, 90, 2))
        assert sorted(item.value["n"] for item in await memory.do(alice, "list", where=where, limit=None)) == sorted(
            pages
        )
        with pytest.raises(UsageError):
            await memory.do(alice, "search", "hiking", where={"n": {"almost": 3}})

    async def test_what_does_not_hold_is_not_found(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.put(alice, "home", "lives in Rome", kind="place")
        before = moment(memory.clock.us)
        memory.clock.pass_s(60)
        new = await memory.put(alice, "home 2026", "lives in Oslo", supersedes="home", kind="place")
        assert [item.key for item in await memory.do(alice, "search", "lives")] == ["home 2026"]
        assert (await memory.do(alice, "get", "home")).valid_to == new.at
        then = await memory.do(alice, "search", "lives", valid_at=before)
        assert {item.key for item in then} == {"home", "home 2026"}
        assert [item.key for item in await memory.do(alice.as_of(before), "search", "lives")] == ["home"]
        await memory.put(alice, "code", "lives for a minute", ttl_s=60, kind="other")
        assert len(await memory.do(alice, "search", "lives")) == 2
        assert len(await memory.do(alice, "search", "lives", kind="place")) == 1
        memory.clock.pass_s(60)
        assert len(await memory.do(alice, "search", "lives")) == 1
        with pytest.raises(perdure.NotFound):
            await memory.put(alice, "x", "y", supersedes="nothing")
        assert await memory.do(alice, "history", "x") == []

    async def test_an_index_that_was_refreshed_ranks_as_one_that_is_read_anew(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        chance = random.Random(7)
        earlier = []
        for round_ in range(6):
            for _ in range(8):
                place = memory.store.memory("users", "alice", *chance.choice([(), ("a",), ("b", "c")]))
                if chance.random() < 0.25:
                    await memory.do(place, "delete", f"k{chance.randrange(6)}")
                else:
                    await memory.put(place, f"k{chance.randrange(6)}", " ".join(chance.choices(TEXTS, k=2)))
            live = shown(await memory.do(alice, "search", "hiking in the mountains", limit=50))
            fresh = memory.open().memory("users", "alice")
            assert shown(await memory.do(fresh, "search", "hiking in the mountains", limit=50)) == live, round_
            as_of = alice.as_of(moment(memory.clock.us))
            assert shown(await memory.do(as_of, "search", "hiking in the mountains", limit=50)) == live
            earlier.append((as_of, live))
            for then, known in earlier:
                assert shown(await memory.do(then, "search", "hiking in the mountains", limit=50)) == known
            memory.clock.pass_s(60)

    async def test_update_loses_nothing_and_forget_deletes_what_matches(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        await memory.put(alice, "n", {"n": 0}, kind="counter", pinned=True, ttl_s=3600)
        changes: list[Any] = [(alice, "update", ("n", lambda value: {"n": value["n"] + 1}), {}) for _ in range(8)]
        await memory.together(changes)
        found = await memory.do(alice, "get", "n")
        assert (found.value, found.kind, found.pinned, found.version) == ({"n": 8}, "counter", True, 9)
        assert found.expires_at is not None
        made = await memory.do(alice, "update", "new", lambda value: {"n": value})
        assert made.value == {"n": None}
        await memory.put(memory.store.memory("users", "alice", "deep"), "d", {"n": 8})
        assert await memory.do(alice, "forget", {"n": 8}) == 2
        assert await memory.keys(alice) == ["new"]
        assert (await memory.do(alice, "history", "n"))[-1].gone == "forgotten"


class Letters:
    """An embedder that counts letters: enough to tell meanings apart in a test."""

    id, dimension, floor = "letters", 26, 0.5

    def __call__(self, texts: list[str]) -> list[list[float]]:
        if any("refuse" in text for text in texts):
            raise RuntimeError("no")
        return [[float(text.count(chr(97 + n))) for n in range(26)] for text in texts]


def test_meaning_is_found_and_what_cannot_be_embedded_is_found_by_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("perdure.memory.embed.RETRY_DELAYS_S", ())
    found: dict[bool, list[Any]] = {}
    for encrypted in (False, True):
        keys: Any = {"keys": b"k" * 32} if encrypted else {}
        with perdure.open(tmp_path / f"{encrypted}.db", embedder=Letters(), **keys) as store:
            memory = store.memory("m")
            memory.put("abc", "abcabc")
            memory.put("xyz", "xyzxyz")
            memory.put("words", "refuse abc")
            assert "no" in caplog.text
            [first, *_] = memory.search("cab", explain=True)
            assert (first.key, first.explain) == (
                "abc",
                {
                    "matched": [],
                    "words": 0,
                    "meaning": pytest.approx(0.69, abs=0.01),
                    "cosine": pytest.approx(1, abs=0.01),
                    "evidence": 0,
                },
            )
            assert [item.key for item in memory.search("cab", relevant=True)] == ["abc"]
            assert "words" in [item.key for item in memory.search("refuse")]
            memory.put("new", "newer abc", supersedes="abc")
            assert memory.get("abc").valid_to is not None  # type: ignore[union-attr]
            found[encrypted] = shown(memory.search("abc newer"))
            assert store.ops.verify().ok
        with perdure.open(tmp_path / f"{encrypted}.db", **keys) as store:  # words only
            assert [item.key for item in store.memory("m").search("newer")] == ["new"]
    assert found[False] == found[True]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_reembed_gives_a_vector_to_what_has_none_of_this_model(url: str) -> None:
    with perdure.open(url) as store:
        with pytest.raises(UsageError):
            store.memory("m").reembed()
        store.memory("m", "n").put("abc", "abcabc")
        store.memory("m").put_many({"xyz": "xyzxyz", "empty": 1})
    with perdure.open(url, embedder=Letters()) as store, perdure.open(url, embedder=Letters()) as other:
        assert other.memory("m").search("cab") == []
        assert store.memory("m").reembed() == 2
        assert store.memory("m").reembed() == 0
        assert [item.key for item in other.memory("m").search("cab", relevant=True)] == ["abc"]
        assert store.memory().stats().embedded == 2
        assert store.ops.verify().ok
        with pytest.raises(UsageError, match="as of a time"):
            store.memory("m").as_of(moment(1)).reembed()


def test_reembed_keeps_the_vector_of_a_version_that_ends_meanwhile(tmp_path: Path) -> None:
    class Replacing(Letters):
        """Another model. While it embeds, another process replaces the item."""

        id = "other letters"

        def __call__(self, texts: list[str]) -> list[list[float]]:
            if not other.memory("m").list(where={"fact": "xyz"}):
                other.memory("m").put("a", {"fact": "xyz"})
            return super().__call__(texts)

    with perdure.open(tmp_path / "a.db", embedder=Letters()) as store:
        version = store.memory("m").put("a", {"fact": "abc"})
    with perdure.open(tmp_path / "a.db") as other, perdure.open(tmp_path / "a.db", embedder=Replacing()) as store:
        store.memory("m").reembed()
    with perdure.open(tmp_path / "a.db", embedder=Letters()) as store:
        assert [item.version for item in store.memory("m").as_of(version.at).search("cab", relevant=True)] == [1]


def test_the_local_model_finds_what_shares_no_word(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        alice = store.memory("users", "alice")
        alice.put("hobby", {"fact": "Alice loves hiking in the mountains"})
        alice.put("theme", {"fact": "Alice prefers dark mode"})
        assert alice.search("outdoor activities", limit=1)[0].key == "hobby"
        at = alice.get("hobby")
        assert at is not None
        assert alice.as_of(at.at + timedelta(microseconds=1)).search("outdoor activities")[0].key == "hobby"


def test_a_search_is_one_round_trip_where_nothing_was_written(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    with WireProxy(postgres_server.port) as proxy, perdure.open(proxy.url(postgres_url.rsplit("/", 1)[1])) as store:
        alice = store.memory("users", "alice")
        alice.put_many({f"k{n}": text for n, text in enumerate(TEXTS)})
        found = [alice.search("mode on the lake") for _ in range(2)]
        proxy.reset()
        found.append(alice.search("mode on the lake"))
        assert (proxy.turns, proxy.syncs) == (1, 1)
        assert shown(found[2]) == shown(found[1]) == shown(found[0])


def test_an_item_without_a_text_has_the_meaning_of_its_fields(tmp_path: Path) -> None:
    items: dict[str, dict[str, Any]] = {
        "a": {"vegetarian": True},
        "b": {"room": 4711},
        "c": {"shoeSize": 44},
        "d": {"note": "The printer jams"},
    }
    asked = {"is she vegetarian": "a", "which room does she have": "b", "size of her shoes": "c", "printers": "d"}
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        store.memory("m").put_many(items)
        store.memory("m").put("e", 7)
        assert store.memory("m").stats().embedded == len(items), "a number alone means nothing"
        assert {query: store.memory("m").search(query)[0].key for query in asked} == asked
    with PerdureStore(index={"dims": 256, "embed": "local"}) as adapter:  # ranks by vectors alone
        for key, value in items.items():
            adapter.put(("m",), key, value)
        assert {query: adapter.search(("m",), query=query)[0].key for query in asked} == asked


def test_keys_fields_numbers_and_names_are_found(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        memory = store.memory("m")
        memory.put("favorite_color", "blue")
        memory.put("hotel", {"room": 4711, "paid": 12.5})
        memory.put("diet", {"vegetarian": True})
        memory.put("band", {"fact": "She heard The Who"})
        memory.put("other", {"fact": "fish"}, text="bird")
        asked = ("favorite color", "room", "4711", "12.5", "vegetarian", "The Who", "other", "bird")
        found = [[item.key for item in memory.search(query)] for query in asked]
        assert found == [["favorite_color"], ["hotel"], ["hotel"], ["hotel"], ["diet"], ["band"], [], ["other"]]
        assert not store.ops.verify().problems
