"""What memory promises of items: versions, history, deletion, expiry, expectations; on both databases."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from harness import call
from memory_fixtures import BOTH, MODES, MemoryHarness

import perdure
from perdure import Conflict, UsageError
from perdure.memory.handle import Memory
from perdure.threads.models import moment


@perdure.register
@dataclass
class Fact:
    text: str
    sure: float


@pytest.fixture
def alice(memory: MemoryHarness) -> Memory:
    return memory.store.memory("users", "alice")


@pytest.mark.parametrize("memory", MODES, indirect=True)
class TestItems:
    async def test_what_was_put_is_there_after_the_store_was_opened_anew(self, memory: MemoryHarness) -> None:
        put = await memory.put(memory.store.memory("a"), "k", {"fact": "x", "n": [1, 2.5, None]}, source="chat 1")
        await memory.reopen()
        found = await memory.do(memory.store.memory("a"), "get", "k")
        assert found == put
        assert (found.value, found.version, found.source) == ({"fact": "x", "n": [1, 2.5, None]}, 1, "chat 1")

    async def test_a_put_overwrites_and_history_keeps_what_was_there(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        first = await memory.put(alice, "theme", "dark", kind="semantic")
        second = await memory.put(alice, "theme", "light", pinned=True)
        assert await memory.value(alice, "theme") == "light"
        history = await memory.do(alice, "history", "theme")
        assert [(item.value, item.version, item.pinned) for item in history] == [("dark", 1, False), ("light", 2, True)]
        assert history[0].ended_at == second.at
        assert second.created_at == first.created_at < second.at

    async def test_a_deleted_item_is_gone_and_its_history_stays(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.put(alice, "theme", "dark")
        assert await memory.do(alice, "delete", "theme")
        assert not await memory.do(alice, "delete", "theme")
        assert await memory.value(alice, "theme") is None
        assert await memory.keys(alice) == []
        assert [(item.value, item.gone) for item in await memory.do(alice, "history", "theme")] == [
            ("dark", None),
            (None, "deleted"),
        ]
        again = await memory.put(alice, "theme", "light")
        assert (again.version, again.created_at) == (3, again.at)

    async def test_each_of_many_follows_its_own_version(self, memory: MemoryHarness, alice: Memory) -> None:
        keys = ['"', "\\", "a\0b", "\x01", "[1]", "é", "e\u0301", "\U0010ffff", "null", " "]
        other = memory.store.memory("users", "bob")
        for number, key in enumerate(keys):
            for _ in range(number % 3):
                await memory.put(alice, key, "old")
            await memory.put(other, key, "of bob")
        items = await memory.do(alice, "put_many", {key: number for number, key in enumerate(keys)})
        assert [(item.key, item.version) for item in items] == [
            (key, number % 3 + 1) for number, key in enumerate(keys)
        ]
        for number, key in enumerate(keys):
            *_, newest = history = await memory.do(alice, "history", key)
            assert (len(history), newest.value, newest.ended_at) == (number % 3 + 1, number, None)
            assert all(one.ended_at is not None for one in history[:-1])

    async def test_expected_versions(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.put(alice, "n", 1, expect=0)
        with pytest.raises(Conflict) as raised:
            await memory.put(alice, "n", 2, expect=0)
        assert (raised.value.expected, raised.value.actual) == (None, "1")
        await memory.put(alice, "n", 2, expect=1)
        with pytest.raises(Conflict):
            await memory.do(alice, "delete", "n", expect=1)
        assert await memory.do(alice, "delete", "n", expect=2)
        with pytest.raises(Conflict):
            await memory.put(alice, "n", 3, expect=3)
        assert (await memory.put(alice, "n", 3, expect=0)).version == 4

    async def test_many_at_once_lose_no_version(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.together([call(alice, "put", f"k{n % 3}", n) for n in range(12)])
        histories = [await memory.do(alice, "history", f"k{n}") for n in range(3)]
        assert [[item.version for item in history] for history in histories] == [[1, 2, 3, 4]] * 3
        assert sorted(item.value for history in histories for item in history) == list(range(12))

    async def test_of_many_that_expect_the_same_one_wins(self, memory: MemoryHarness, alice: Memory) -> None:
        done = await memory.together([call(alice, "put", "k", n, expect=0) for n in range(6)], errors=True)
        assert sorted(type(one).__name__ for one in done) == ["Conflict"] * 5 + ["Item"]


@pytest.mark.parametrize("memory", BOTH, indirect=True)
class TestMore:
    async def test_several_are_put_together_or_not_at_all(self, memory: MemoryHarness, alice: Memory) -> None:
        put = await memory.do(alice, "put_many", {"a": 1, "b": {"deep": "er"}})
        assert [item.key for item in put] == ["a", "b"]
        found = await memory.do(alice, "get_many", ["b", "none", "a"])
        assert [item and item.value for item in found] == [{"deep": "er"}, None, 1]
        with pytest.raises(perdure.Unstorable):
            await memory.do(alice, "put_many", {"c": 1, "d": object()})
        with pytest.raises(perdure.UsageError, match="wants values by key"):
            await memory.do(alice, "put_many", [{"fact": "hiking"}])
        assert sorted(await memory.keys(alice)) == ["a", "b"]

    async def test_an_expired_item_is_never_returned_from_the_instant_it_expires(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        await memory.put(alice, "door", "opens", pinned=True)
        item = await memory.put(alice, "code", "opens 1234", ttl_s=60)
        assert len(await memory.do(alice, "search", "opens")) == 2  # the index is in memory from here on
        memory.clock.us -= 1000
        assert item.expires_at == item.at + timedelta(seconds=60)
        memory.clock.us = memory.clock.us + 60_000_000 - 1001  # each call lets a millisecond pass
        assert await memory.value(alice, "code") == "opens 1234"
        memory.clock.us += 1
        for read in (("get", "code"), ("search", "1234")):
            memory.clock.us -= 1000  # at the very instant
            assert not await memory.do(alice, *read), read
        assert await memory.keys(alice) == ["door"]
        assert [one.items for one in await memory.do(alice, "namespaces")] == [1]
        assert not await memory.do(alice, "delete", "code")
        assert (await memory.put(alice, "code", 5678, expect=0)).version == 2

    async def test_a_pin_keeps_value_words_and_vector_and_no_cap_or_age_removes_the_item(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        embedding = memory.open(embedder=lambda texts: [[1.0, float(len(text))] for text in texts])
        await memory.do(alice, "policy", max_items=1, max_age="1d")
        first = await memory.put(embedding.memory("users", "alice"), "home", Fact("Oslo", 0.5), kind="semantic")
        pinned = await memory.do(memory.store.memory("users", "alice", raw=True), "pin", "home")
        assert (pinned.version, pinned.pinned, pinned.expires_at) == (2, True, None)
        assert (pinned.created_at, pinned.kind) == (first.created_at, "semantic")
        assert pinned.value == {"<type>": "test_items.Fact", "text": "Oslo", "sure": 0.5}
        await memory.put(alice, "n", 1)
        assert sorted(await memory.keys(alice)) == ["home", "n"]
        [found] = await memory.do(embedding.memory("users", "alice"), "search", "Oslo", limit=1, explain=True)
        assert (found.value, "cosine" in found.explain) == (Fact("Oslo", 0.5), True)
        unpinned = await memory.do(alice, "unpin", "home", who="ann")
        await memory.do(alice, "delete", "n", who="bo")
        noted = memory.store.ops.actions()
        assert [(one.who, one.action, one.subject, one.details) for one in noted] == [
            ("bo", "forget", "memory users/alice", {"key": "n"}),
            ("ann", "unpin", "memory users/alice", {"key": "home"}),
        ]
        assert (unpinned.version, unpinned.pinned) == (3, False)
        assert unpinned.expires_at == unpinned.at + timedelta(days=1)
        assert await memory.keys(alice) == ["home"]
        with pytest.raises(perdure.NotFound):
            await memory.do(alice, "pin", "nothing", who="ann")
        await memory.do(alice, "erase", "home")
        assert memory.store.ops.actions() == []

    async def test_as_of_shows_what_was_known_then(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.put(alice, "theme", "dark")
        then = moment(memory.clock.us)
        await memory.put(alice, "theme", "light")
        hobby = await memory.put(alice, "hobby", "hiking")
        await memory.do(alice, "delete", "hobby")
        past = alice.as_of(then)
        assert await memory.value(past, "theme") == "dark"
        assert [(item.key, item.value) for item in await memory.do(past, "list")] == [("theme", "dark")]
        assert len(await memory.do(past, "history", "theme")) == 1
        assert await memory.value(alice.as_of(hobby.at), "hobby") == "hiking"
        assert await memory.value(alice.as_of(then - timedelta(days=1)), "theme") is None
        with pytest.raises(UsageError):
            await memory.put(past, "theme", "blue")

    async def test_a_clock_that_steps_back_makes_no_version_older_than_the_one_before(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        first = await memory.put(alice, "k", 1)
        memory.clock.pass_s(-3600)
        second = await memory.put(alice, "k", 2)
        assert second.at > first.at
        assert await memory.value(alice.as_of(second.at), "k") == 2
        assert [space.items for space in await memory.do(alice, "namespaces")] == [1]

    async def test_lists_page_without_loss_the_newest_first(self, memory: MemoryHarness, alice: Memory) -> None:
        for n in range(25):
            await memory.put(alice, f"k{n}", n, kind="even" if n % 2 == 0 else "odd")
        paged = [key for start in range(0, 30, 7) for key in await memory.keys(alice, limit=7, offset=start)]
        assert paged == [f"k{n}" for n in reversed(range(25))]
        assert await memory.keys(alice, kind="even", limit=3) == ["k24", "k22", "k20"]
        assert len(await memory.keys(memory.store.memory("users"), limit=None)) == 25

    async def test_a_fact_holds_when_it_is_valid(self, memory: MemoryHarness, alice: Memory) -> None:
        now = moment(memory.clock.us)
        await memory.put(alice, "home", "Rome", valid_to=now - timedelta(days=1))
        await memory.put(alice, "job", "baker", valid_from=now + timedelta(days=1))
        await memory.put(alice, "name", "Alice")
        assert await memory.keys(alice, valid_at=now) == ["name"]
        assert await memory.keys(alice, valid_at=now - timedelta(days=2)) == ["name", "home"]
        assert await memory.keys(alice, valid_at=now + timedelta(days=1)) == ["name", "job"]
        assert len(await memory.keys(alice)) == 3

    async def test_registered_classes_come_back(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.put(alice, "f", Fact("likes tea", 0.9))
        assert await memory.value(alice, "f") == Fact("likes tea", 0.9)

    @pytest.mark.parametrize(
        "options",
        [
            *({"ttl_s": wrong} for wrong in (0, True, "5", float("nan"), float("inf"), 1e300)),
            *({"expect": -1}, {"expect": True}, {"kind": ""}, {"text": 3}, {"text": "\ud800"}, {"source": "\ud800"}),
            *({"valid_from": 12}, {"valid_from": datetime.min}, {"pinned": "yes"}, {"schema": "\ud800:1"}),
        ],
    )
    async def test_wrong_options_write_nothing(
        self, memory: MemoryHarness, alice: Memory, options: dict[str, object]
    ) -> None:
        with pytest.raises(UsageError):
            await memory.put(alice, "k", 1, **options)
        assert await memory.do(alice, "history", "k") == []

    async def test_the_root_holds_no_items(self, memory: MemoryHarness) -> None:
        with pytest.raises(UsageError):
            await memory.put(memory.store.memory(), "k", 1)


def test_encrypted_memory_reads_the_same_and_stores_no_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path, keys=b"k" * 32) as store:
        store.memory("users", "alice").put("theme", {"fact": "prefers darkmode"})
        assert store.memory("users").list()[0].value == {"fact": "prefers darkmode"}
        assert store.ops.verify().ok
    assert b"darkmode" not in b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
