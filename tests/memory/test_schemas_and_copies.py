"""Items of older schemas are read as the newest or not at all; and copies of a store hold its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_fixtures import BOTH, MemoryHarness

import perdure
from perdure import UsageError
from perdure.errors import UnknownType
from perdure.memory import AgentMemory, schemas
from perdure.memory.models import Item


@pytest.fixture(autouse=True)
def _no_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "_steps", {})


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_an_item_is_read_as_the_newest_version_or_not_at_all(memory: MemoryHarness) -> None:
    alice = memory.store.memory("users", "alice")
    await memory.put(alice, "p", {"name": "Alice"}, schema="profile:1", pinned=True, text="hiker")
    assert await memory.value(alice, "p") == {"name": "Alice"}
    perdure.memory.migration("profile", 2, 3)(lambda value: {**value, "third": True})
    with pytest.raises(UnknownType, match="migration"):
        await memory.do(alice, "get", "p")
    with pytest.raises(UnknownType):
        await memory.do(alice, "migrate")
    perdure.memory.migration("profile", 1, 2)(lambda value: {"first": value["name"]})
    found = await memory.do(alice, "get", "p")
    assert (found.value, found.schema, found.version) == ({"first": "Alice", "third": True}, "profile:3", 1)
    assert await memory.keys(alice, where={"third": True}) == ["p"]
    assert await memory.do(alice, "migrate") == 1
    assert await memory.do(alice, "migrate") == 0
    schemas._steps.clear()
    found = await memory.do(alice, "get", "p")
    assert (found.value, found.schema, found.pinned) == ({"first": "Alice", "third": True}, "profile:3", True)
    assert [item.key for item in await memory.do(alice, "search", "hikers")] == ["p"]
    perdure.memory.migration("profile", 1, 2)(lambda value: value)
    with pytest.raises(UnknownType, match="newer code"):
        await memory.do(alice, "get", "p")
    with pytest.raises(UnknownType, match="cannot be read"):
        await memory.put(alice, "q", 1, schema="profile:3")
    assert await memory.do(alice, "get", "q") is None
    perdure.memory.migration("profile", 3, 4)(lambda value: value["no such field"])
    with pytest.raises(KeyError) as raised:
        await memory.do(alice, "list")
    assert "the item 'p' of memory users/alice" in raised.value.__notes__[0]
    for wrong_step in ((1, 1), (2, 1), ("1", 2), (True, 2)):
        with pytest.raises(UsageError):
            perdure.memory.migration("profile", *wrong_step)
    for wrong in ("profile", "profile:0", "profile:x", 3):
        with pytest.raises(UsageError):
            await memory.put(alice, "q", 1, schema=wrong)


def test_the_next_write_of_a_migrated_item_refreshes_the_words_that_find_it(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        alice.put_many({"other": {"text": "sailing"}})
        for key in ("written", "migrated"):
            alice.put(key, {"text": "hiking"}, schema="profile:1")
        perdure.memory.migration("profile", 1, 2)(lambda value: {"text": value["text"] + " upgraded"})
        assert {item.value["text"] for item in alice.search("hiking")} == {"hiking upgraded"}
        assert alice.search("upgraded") == []  # what is stored has not changed
        alice.update("written", lambda value: value)
        assert [item.key for item in alice.search("upgraded")] == ["written"]
        assert alice.migrate() == 1
        assert {item.key for item in alice.search("upgraded")} == {"written", "migrated"}
        assert store.ops.verify().ok


@pytest.mark.parametrize("memory", BOTH, indirect=True)
async def test_items_that_newer_code_wrote_are_left_out_and_reported(
    memory: MemoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    users, alice = memory.store.memory("users"), memory.store.memory("users", "alice")
    for n in range(3):
        await memory.put(alice, f"fact {n}", {"text": f"hiking {n}", "n": n})
        await memory.put(alice, f"profile {n}", {"text": "hiking"}, schema="profile:3")
    perdure.memory.migration("profile", 1, 2)(lambda value: value)  # this code knows no version 3
    assert await memory.keys(users) == ["fact 2", "fact 1", "fact 0"]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "3 items of memory were left out, because this code cannot read them (profile"
    ]
    assert "memory.unreadable() lists them" in caplog.text
    assert await memory.keys(users, limit=2) == ["fact 2", "fact 1"]
    facts = {f"fact {n}" for n in range(3)}
    assert {item.key for item in await memory.do(users, "search", "hiking", limit=3)} == facts
    assert await memory.keys(users, where={"n": {"gte": 0}}) == ["fact 2", "fact 1", "fact 0"]
    found = memory.store.memory("users").tools()[0]("hiking")
    assert [f"fact {n}" in found for n in range(3)] == [True] * 3
    assert (
        len((await memory.run((AgentMemory(memory.store, "alice"), "recall", ("hiking",), {}))).manifest["memories"])
        == 3
    )
    assert await memory.do(users, "migrate") == 0
    with pytest.raises(UnknownType, match="newer code"):
        await memory.do(alice, "get", "profile 0")
    unreadable = await memory.do(users, "unreadable")
    assert [(item.key, item.schema, item.value) for item in unreadable] == [
        (f"profile {n}", "profile:3", {"text": "hiking"}) for n in (2, 1, 0)
    ]
    assert await memory.do(users, "forget", {"text": "hiking"}) == 0
    assert await memory.do(users, "forget", {"n": 1}) == 1
    assert await memory.do(users, "forget", {}) == 5
    assert await memory.do(users, "unreadable") == []


def test_caps_remove_what_newer_code_wrote_without_showing_it_to_the_hook(tmp_path: Path) -> None:
    seen: list[str] = []
    with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        alice.put("profile", "x", schema="profile:3")
        perdure.memory.migration("profile", 1, 2)(lambda value: value)
        alice.policy(max_items=1, summarize=lambda items, _: seen.extend(item.key for item in items))
        alice.put("a", 1)
        alice.put("b", 2)
        assert seen == ["a"]


def fill(store: perdure.Store) -> list[Any]:
    alice = store.memory("users", "alice")
    alice.put("theme", {"fact": "dark hiking"})
    alice.put("theme", {"fact": "light hiking"})
    alice.put("hobby", {"fact": "sailing"}, pinned=True)
    alice.delete("hobby")
    store.memory("users").policy(max_items=10)
    return shown(store)


def shown(store: perdure.Store) -> list[Any]:
    alice = store.memory("users", "alice")
    found: list[list[Item]] = [alice.history("theme"), alice.history("hobby"), alice.list(), alice.search("hiking")]
    return [found, store.memory("users", "bob").policy(), store.memory().stats()]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_backup_and_a_transferred_tenant_hold_the_same_memory(url: str, tmp_path: Path) -> None:
    with perdure.open(url, embedder="local", tenant="acme") as store:
        was = fill(store)
        store.tenant("globex").memory("users", "alice").put("theme", "theirs")
        store.ops.backup(tmp_path / "backup.db")
        other = str(tmp_path / "other.db")
        for versions in (4, 0):  # again: it is there already
            assert store.ops.transfer(other, tenant="acme", keys=b"k" * 32, embedder="local").versions == versions
        store.memory("users", "alice").put("theme", "changed since")
        with pytest.raises(UsageError, match="differs"):
            store.ops.transfer(other, tenant="acme", keys=b"k" * 32)
    perdure.ops.restore_backup(tmp_path / "backup.db", tmp_path / "restored.db")
    for place, options in ((tmp_path / "restored.db", {}), (other, {"keys": b"k" * 32})):
        given: Any = options
        with perdure.open(place, embedder="local", tenant="acme", **given) as store:
            assert shown(store) == was
            assert store.ops.verify().ok
            assert store.memory("users", "alice").put("theme", "next").version == 3
    with perdure.open(other, tenant="globex", keys=b"k" * 32) as store:
        assert store.memory().list() == []


def test_a_transfer_is_refused_if_the_target_holds_other_items_though_as_many_of_the_same_size(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store, perdure.open(tmp_path / "b.db") as other:
        store.memory("users", "alice").put("theme", "light")
        other.memory("users", "alice").put("theme", "night")
        with pytest.raises(UsageError, match="differs"):
            store.ops.transfer(tmp_path / "b.db", tenant="default")
