"""Large writes that are pending survive whatever happens to the checkpoints around them: prunes, copies, forks whose
origin is deleted, damage to none of them.

A subgraph returns the whole list of messages; beside it a node asks. So the list is pending while the graph waits, and
a saver that stores what changed keeps it as a difference from something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graph_kit import MODES, AnyGraph, Runner, at, echo, human, talking, texts
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import perdure
from perdure.langgraph import PerdureSaver


def waiting(saver: PerdureSaver) -> AnyGraph:
    """A subgraph that is done and has returned everything, beside a node that asks."""

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(interrupt("and?"), id=f"asked {len(state['messages'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("sub", talking(None))
    builder.add_node("ask", ask)
    builder.add_node("after", echo)
    builder.add_edge(START, "sub")
    builder.add_edge(START, "ask")
    builder.add_edge(["sub", "ask"], "after")
    return builder.compile(checkpointer=saver)


TEXT = "some text of this message " * 40
MANY = [human(f"{number}: " + TEXT, f"m{number}") for number in range(50)]

EXPECTED = [
    *("first", f"Echo: 49: {TEXT}", f"Echo: Echo: 49: {TEXT}"),
    *("next", "second", "Echo: next", "Echo: Echo: next"),
]


def prune_by_store(saver: PerdureSaver) -> str:
    saver.store.thread("t").prune(keep=1)
    return "t"


def prune_by_saver(saver: PerdureSaver) -> str:
    saver.prune(["t"])
    return "t"


def copy_and_delete(saver: PerdureSaver) -> str:
    saver.copy_thread("t", "t2")
    saver.delete_thread("t")
    return "t2"


def fork_and_delete(saver: PerdureSaver) -> str:
    saver.store.thread("t").fork(name="t2")
    saver.store.delete_thread("t")
    return "t2"


def fork_prune_and_delete(saver: PerdureSaver) -> str:
    fork = saver.store.thread("t").fork(name="t2")
    fork.prune(keep=1)
    saver.store.thread("t").prune(keep=1)
    saver.store.delete_thread("t")
    return "t2"


def nothing(saver: PerdureSaver) -> str:
    return "t"


EVENTS: list[Callable[[PerdureSaver], str]] = [
    nothing,
    prune_by_store,
    prune_by_saver,
    copy_and_delete,
    fork_and_delete,
    fork_prune_and_delete,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
async def test_large_pending_writes_survive(saver_url: str, event: Callable[[PerdureSaver], str], mode: str) -> None:
    with PerdureSaver(saver_url) as saver:
        graph = Runner(waiting(saver), mode)
        await graph.invoke({"messages": MANY}, at("t"), durability="sync")
        await graph.invoke(Command(resume="first"), at("t"), durability="sync")
        await graph.invoke({"messages": [human("next")]}, at("t"), durability="sync")
        before = await graph.state(at("t"))
        assert [item.value for item in before.interrupts] == ["and?"]
        name = event(saver)
        assert saver.store.ops.verify().ok
        assert (await graph.state(at(name))).values == before.values
    with PerdureSaver(saver_url) as saver:
        graph = Runner(waiting(saver), mode)
        after = await graph.state(at(name))
        assert after.values == before.values
        assert [task.result for task in after.tasks] == [task.result for task in before.tasks]
        result = await graph.invoke(Command(resume="second"), at(name))
        assert texts(result)[50:] == EXPECTED
        report = saver.store.ops.verify()
        assert report.ok, report.problems


@pytest.mark.parametrize("mode", MODES)
async def test_large_pending_writes_survive_a_compaction(saver_url: str, mode: str) -> None:
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(checkpoints=1)
        graph = Runner(waiting(saver), mode)
        await graph.invoke({"messages": MANY}, at("t"))
        await graph.invoke(Command(resume="first"), at("t"))
        await graph.invoke({"messages": [human("next")]}, at("t"))
        saver.store.ops.compact(vacuum=True)
        assert len(await graph.history(at("t"))) == 1
    with PerdureSaver(saver_url) as saver:
        result = await Runner(waiting(saver), mode).invoke(Command(resume="second"), at("t"))
        assert texts(result)[50:] == EXPECTED
    with perdure.open(saver_url) as store:
        assert store.ops.verify().ok


@pytest.mark.parametrize("mode", MODES)
async def test_the_writes_of_old_checkpoints_stay_readable(saver_url: str, mode: str) -> None:
    """Each step's task shows its result in the history, also from a store opened anew and in another order."""
    with PerdureSaver(saver_url) as saver:
        graph = Runner(waiting(saver), mode)
        await graph.invoke({"messages": MANY}, at("t"), durability="sync")
        for turn in range(3):
            await graph.invoke(Command(resume=f"answer {turn}"), at("t"), durability="sync")
            await graph.invoke({"messages": [human(f"turn {turn}")]}, at("t"), durability="sync")
        warm = await graph.history(at("t"))
    for _ in range(2):
        with PerdureSaver(saver_url) as saver:
            graph = Runner(waiting(saver), mode)
            for snapshot in reversed(warm):
                cold = await graph.state(snapshot.config)
                assert [task.result for task in cold.tasks] == [task.result for task in snapshot.tasks]
            assert await graph.history(at("t")) == warm
