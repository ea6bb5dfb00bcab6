"""Caps with a `summarize` hook: it gets what goes, before it goes; its summary commits with the removal, or nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_fixtures import BOTH, MemoryHarness

import perdure
from perdure import UsageError
from perdure.memory import AgentMemory, Item
from perdure.memory.handle import Memory

DAY_S = 86_400


class Fold:
    """A hook that keeps all values in a list. `meanwhile` is what another writer does while it is asked first."""

    def __init__(self, meanwhile: Any = None) -> None:
        self.asked: list[list[str]] = []
        self.meanwhile = meanwhile

    def __call__(self, items: list[Item], before: Any) -> Any:
        self.asked.append([item.key for item in items])
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return [*(before or []), *(item.value for item in items)]


@pytest.fixture
def alice(memory: MemoryHarness) -> Memory:
    return memory.store.memory("users", "alice")


@pytest.mark.parametrize("memory", BOTH, indirect=True)
class TestSummaries:
    async def test_what_goes_is_in_the_summary_and_history_says_cap(self, memory: MemoryHarness, alice: Memory) -> None:
        fold = Fold()
        await memory.do(memory.store.memory("users"), "policy", max_items=3, summarize=fold)
        for n in range(6):
            assert (await memory.put(alice, f"k{n}", f"fact {n}")).key == f"k{n}"
        await memory.do(alice, "update", "k5", lambda value: f"{value}!")
        assert fold.asked == [["k0"], ["k1"], ["k2"]]
        assert await memory.keys(alice) == ["k5", "summary", "k4", "k3"]
        assert [item.gone for item in await memory.do(alice, "history", "k0")] == [None, "cap"]
        summary = await memory.do(alice, "get", "summary")
        assert (summary.value, summary.kind, summary.pinned) == (["fact 0", "fact 1", "fact 2"], "summary", True)
        assert (await memory.do(alice, "search", "fact 1"))[0].key == "summary"
        await memory.do(memory.store.memory("users"), "policy", max_items=1)
        assert fold.asked[3:] == [["k3", "k4"]], "a new cap acts at once"
        await memory.do(alice, "policy", summarize=None)
        await memory.put(alice, "k6", "fact 6")
        assert len(fold.asked) == 4

    async def test_what_gets_too_old_is_summarized_but_not_what_was_to_expire(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        fold = Fold()
        await memory.do(alice, "policy", max_age="90d", summarize=fold)
        await memory.put(alice, "old", "fact")
        await memory.put(alice, "code", "1234", ttl_s=60)
        memory.clock.pass_s(90 * DAY_S)
        assert await memory.keys(alice) == []
        memory.store.ops.compact()
        assert fold.asked == [["old"]]
        assert await memory.value(alice, "summary") == ["fact"]
        assert [item.gone for item in await memory.do(alice, "history", "old")] == [None, "expired"]

    async def test_another_writer_meanwhile_is_never_overwritten_nor_brought_back(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        other = memory.open().memory("users", "alice")
        await memory.do(alice, "put_many", {"a": "secret", "b": "fact b", "c": "fact c"})
        fold = Fold(
            lambda: (other.delete("a"), other.put("d", "fact d"), other.put("summary", ["theirs"], pinned=True))
        )
        await memory.do(alice, "policy", max_items=3, summarize=fold)
        await memory.put(alice, "e", "fact e")
        assert fold.asked == [["a"], ["b"]]
        assert await memory.value(alice, "summary") == ["theirs", "fact b"]

    async def test_an_error_of_the_hook_and_a_summary_that_is_too_long_change_nothing(
        self, memory: MemoryHarness, alice: Memory
    ) -> None:
        def fails(items: list[Item], before: Any) -> Any:
            raise ConnectionError("no model")

        await memory.do(alice, "policy", max_bytes=300, summarize=fails)
        await memory.put(alice, "a", "x" * 200)
        with pytest.raises(ConnectionError):
            await memory.put(alice, "b", "x" * 200)
        await memory.do(alice, "policy", summarize=lambda items, before: "x" * 500)
        with pytest.raises(UsageError, match="summary"):
            await memory.put(alice, "b", "x" * 200)
        assert await memory.keys(alice) == ["a"]
        await memory.do(alice, "policy", summarize=lambda items, before: None)
        await memory.put(alice, "b", "x" * 200)
        assert await memory.keys(alice) == ["b"]


async def test_a_hook_may_be_async(tmp_path: Path) -> None:
    async def summarize(items: list[Item], before: Any) -> Any:
        return len(items)

    async with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        await alice.apolicy(max_items=1, summarize=summarize)
        await alice.aput_many({"a": 1, "b": 2})
        summary = await alice.aget("summary")
        assert summary is not None
        assert summary.value == 1
        alice.put("c", 3)
        assert [item.key for item in alice.list()] == ["c", "summary"]


def test_in_a_run_through_langgraph_and_with_a_turn(tmp_path: Path) -> None:
    from perdure.langgraph import PerdureStore

    with perdure.open(tmp_path / "a.db") as store:
        alice = store.memory("users", "alice")
        fold = Fold(partial(alice.get, "summary"))  # what a hook does is no call of the run

        alice.policy(max_items=2, summarize=fold)

        @perdure.durable(name="caps.run")
        def agent() -> Any:
            for n in range(4):
                assert alice.put(f"k{n}", n).version == 1
            perdure.ask("Well?")
            found = alice.get("summary")
            return found and found.value

        run = store.run(agent, id="one")
        store.answer(run, "well")
        assert run.result() == [0, 1]
        assert fold.asked == [["k0"], ["k1"]], "a replay asks for nothing"
        PerdureStore(store).put(("users", "alice"), "k4", {"n": 4})
        assert fold.asked[2:] == [["k2"]]
        AgentMemory(store, "alice").facts.policy(max_items=1, summarize=fold)
        AgentMemory(store, "alice").record("Hello", "Hi", facts={"a": "one", "b": "two"})
        assert fold.asked[3:] == [["a"]]
        assert store.ops.verify().ok
