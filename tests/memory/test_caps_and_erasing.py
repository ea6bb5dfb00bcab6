"""What ends: caps of a namespace, age, the history that is swept, and erasing, which leaves no byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_fixtures import BOTH, MemoryHarness

import perdure
from perdure import UsageError
from perdure.memory.handle import Memory

DAY_S = 86_400


@pytest.fixture
def alice(memory: MemoryHarness) -> Memory:
    return memory.store.memory("users", "alice")


@pytest.mark.parametrize("memory", BOTH, indirect=True)
class TestCaps:
    async def test_the_oldest_items_that_are_not_pinned_go_and_history_says_why(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        await memory.do(memory.store.memory("users"), "policy", max_items=3)
        await memory.put(alice, "pinned", 0, pinned=True)
        for n in range(5):
            await memory.put(alice, f"k{n}", n)
        assert await memory.keys(alice) == ["k4", "k3", "k2", "pinned"]
        assert [(item.value, item.gone) for item in await memory.do(alice, "history", "k1")] == [
            (1, None),
            (None, "cap"),
        ]
        await memory.put(alice, "k0", "sailing")
        assert await memory.keys(alice) == ["k0", "k4", "k3", "pinned"]
        assert [item.key for item in await memory.do(alice, "search", "sailing")] == ["k0"]
        bob = memory.store.memory("users", "bob")  # each namespace has its own count
        await memory.do(bob, "put_many", {f"b{n}": n for n in range(3)})
        assert len(await memory.keys(bob)) == 3

    async def test_what_has_expired_goes_before_what_is_there(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.do(alice, "policy", max_items=2)
        await memory.put(alice, "old", 0)
        await memory.put(alice, "code", 1, ttl_s=1)
        memory.clock.pass_s(2)
        await memory.put(alice, "new", 2)
        assert await memory.keys(alice) == ["new", "old"]
        assert (await memory.do(alice, "history", "code"))[-1].gone == "expired"

    async def test_a_fact_that_was_superseded_goes_before_its_successor(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        await memory.do(alice, "policy", max_items=2)
        await memory.put(alice, "home", "Rome")
        await memory.put(alice, "home 2026", "Oslo", supersedes="home")
        await memory.put(alice, "hobby", "hiking")
        assert sorted(await memory.keys(alice)) == ["hobby", "home 2026"]

    async def test_bytes_are_capped_and_what_cannot_fit_is_refused(self, memory: MemoryHarness, alice: Memory) -> None:
        for n in range(4):
            await memory.put(alice, f"k{n}", "x" * 80)
        set_ = await memory.do(alice, "policy", max_bytes=200)
        assert set_ == await memory.do(alice, "policy")
        assert await memory.keys(alice) == ["k3", "k2"]  # at once
        with pytest.raises(UsageError, match="capped"):
            await memory.put(alice, "large", "x" * 300)
        assert await memory.keys(alice) == ["k3", "k2"]
        await memory.put(alice, "large", "x" * 300, pinned=True)
        assert await memory.keys(alice) == ["large", "k3", "k2"]
        await memory.do(memory.store.memory("users"), "policy", max_items=1)
        assert await memory.keys(alice) == ["large", "k3", "k2"]  # it has a policy of its own

    async def test_age_and_expiry_come_from_the_policy_but_not_for_what_is_pinned(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        await memory.put(alice, "old", 1)
        await memory.put(alice, "pinned", 1, pinned=True)
        await memory.do(alice, "policy", max_age="90d")
        await memory.put(alice, "new", 1)
        memory.clock.pass_s(90 * DAY_S)
        assert await memory.keys(alice) == ["pinned"]
        await memory.do(alice, "policy", ttl="60s", max_age=None)
        await memory.put(alice, "short", 1)
        await memory.put(alice, "long", 1, ttl_s=600)
        memory.clock.pass_s(61)
        assert await memory.keys(alice) == ["long", "pinned"]
        nan, huge = float("nan"), 1e300
        for wrong in (0, "8 KB", -1, True, nan, huge, 2**80):
            for name in ("max_items", "max_bytes", "ttl", "max_age", "history"):
                with pytest.raises(UsageError):
                    await memory.do(alice, "policy", **{name: wrong})
        await memory.put(alice, "after", 1)

    async def test_the_sweep_removes_what_ended_before_the_history_that_is_kept(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        await memory.put(alice, "k", 1)
        await memory.put(alice, "k", "two hiking")
        await memory.put(alice, "gone", 1)
        await memory.put(alice, "expires", 1, ttl_s=60)
        await memory.do(alice, "delete", "gone")
        memory.clock.pass_s(10 * DAY_S)
        assert memory.store.ops.compact().memory == 0
        assert [item.gone for item in await memory.do(alice, "history", "expires")] == [None, "expired"]
        memory.clock.pass_s(21 * DAY_S)
        assert memory.store.ops.compact(dry_run=True).memory == 3
        assert memory.store.ops.compact().memory == 3
        assert [item.version for item in await memory.do(alice, "history", "k")] == [2]
        assert await memory.do(alice, "history", "gone") == []
        assert [item.key for item in await memory.do(alice, "search", "hiking")] == ["k"]
        await memory.do(alice, "policy", history=None)
        await memory.put(alice, "k", 3)
        memory.clock.pass_s(1000 * DAY_S)
        memory.store.ops.compact()
        assert [item.version for item in await memory.do(alice, "history", "k")] == [2, 3]

    async def test_an_erased_item_is_gone_with_its_history_and_is_found_nowhere(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        other = memory.open().memory("users")
        await memory.do(alice, "put_many", {"theme": "dark hiking", "hobby": "hiking"})
        await memory.put(alice, "theme", "light hiking")
        assert len(await memory.do(other, "search", "hiking")) == 2
        erased = await memory.do(alice, "erase", "theme")
        assert erased.versions == 2
        assert await memory.do(alice, "history", "theme") == []
        assert [item.key for item in await memory.do(other, "search", "hiking")] == ["hobby"]
        assert (await memory.do(alice, "erase", "theme")).versions == 0
        assert (await memory.put(alice, "theme", "new")).version == 1


@pytest.mark.parametrize("memory", BOTH, indirect=True)
class TestErasingNamespaces:
    @pytest.mark.parametrize("has_snapshot", [False, True])
    async def test_a_namespace_goes_with_all_below_it_its_history_and_its_policy(
        self, memory: MemoryHarness, alice: Memory, has_snapshot: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("perdure.memory.erasing.PAGE", 2)
        store, other = memory.store, memory.open()
        facts, bob = store.memory("users", "alice", "facts"), store.memory("users", "bob")
        for n in range(3):
            await memory.put(alice, "theme", f"hiking {n}")
            await memory.put(facts, f"k{n}", "hiking")
        await memory.do(facts, "policy", max_items=10)
        await memory.do(alice, "forget", {})
        await memory.put(facts, "k0", "hiking again")
        await memory.put(bob, "theme", "hiking")
        snapshot = store.snapshot("before") if has_snapshot else None
        await memory.put(facts, "k1", "hiking later")
        assert len(await memory.do(other.memory("users"), "search", "hiking")) == 3
        erased = await memory.do(alice, "erase_all")
        assert erased.versions == 4 + 8
        assert [item.key for item in await memory.do(other.memory("users"), "search", "hiking")] == ["theme"]
        assert await memory.do(facts, "history", "k0") == await memory.do(alice, "history", "theme") == []
        assert (await memory.do(facts, "policy")).max_items is None
        if snapshot is not None:
            assert [item.namespace for item in snapshot.memory().list()] == [("users", "bob")]
            assert snapshot.verify().ok
            store.restore(snapshot)
            assert [item.namespace for item in store.memory().list()] == [("users", "bob")]
        assert (await memory.do(alice, "erase_all")).versions == 0
        assert (await memory.put(facts, "k0", "new")).version == 1

    async def test_a_user_goes_from_every_namespace_and_look_alikes_stay(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        store = memory.store
        for labels in (("users", "alice", "facts"), ("orgs", "acme", "alice"), ("alice",), ("users", "alice-2")):
            await memory.put(store.memory(*labels), "k", 1)
        assert (await memory.do(store.memory("orgs"), "erase_label", "alice")).versions == 1
        assert (await memory.do(store.memory(), "erase_label", "alice")).versions == 2
        assert [item.namespace for item in await memory.do(store.memory(), "list")] == [("users", "alice-2")]

    async def test_nothing_is_erased_by_a_mistake(self, memory: MemoryHarness, alice: Memory) -> None:
        await memory.put(alice, "k", 1)
        missing: Any = None
        for wrong in (missing, ""):
            with pytest.raises(UsageError):
                await memory.do(alice, "erase", wrong)
            with pytest.raises(UsageError):
                await memory.do(alice, "erase_label", wrong)
        with pytest.raises(UsageError, match="needs a namespace"):
            await memory.do(memory.store.memory(), "erase_all")
        assert await memory.keys(alice) == ["k"]


@pytest.mark.parametrize("by", ["namespace", "label"])
def test_an_erased_user_leaves_no_byte_in_the_files_nor_in_snapshots(by: str, tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        user = store.memory("users", "Kanarienlabel")
        for n in range(60):  # over many pages of the file
            store.memory("users", "Kanarienlabel", "facts").put(
                f"Kanarienkey {n}", {"fact": f"Kanarienvogel {n} " * 40}, source="Kanarienquelle", kind="Kanarienart"
            )
            store.memory("users", "bob").put(f"stays {n}", "x" * 500)
        user.policy(max_items=1000)
        store.snapshot("before")
        store.memory("users", "Kanarienlabel", "facts").put("Kanarienkey 1", "Kanarienvogel changed")
        user.forget({})
        erased = user.erase_all() if by == "namespace" else store.memory().erase_label("Kanarienlabel")
        assert erased.versions == 60 + 1 + 60
        data = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
        assert b"stays 59" in data
        assert b"Kanarien" not in data
        assert store.ops.verify().ok


def test_an_erased_item_leaves_no_byte_in_the_files(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        alice = store.memory("users", "alice")
        alice.put("theme", {"fact": "Kanarienvogel one"})
        alice.put("theme", {"fact": "Kanarienvogel two"})
        alice.put("hobby", {"fact": "stays"})
        alice.erase("theme")
        files = [file for file in tmp_path.iterdir() if file.is_file()]
        assert b"Kanarienvogel" not in b"".join(file.read_bytes() for file in files)
        assert store.ops.verify().ok
