"""Rolling back a thread of LangGraph's with Perdure's own command: the graph goes on from there, as from a fork."""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import asking, at, counting
from langgraph.types import Command, StateSnapshot

from perdure import Checkpoint, Thread
from perdure.errors import NotFound
from perdure.langgraph import PerdureSaver

SOME = {"total": 0, "log": []}


def named(thread: Thread, snapshot: StateSnapshot) -> Checkpoint:
    """Perdure's checkpoint of a snapshot of LangGraph's."""
    id_ = snapshot.config["configurable"]["checkpoint_id"]
    return next(one for one in thread.history() if one.state["__line__"]["id"] == id_)


def test_a_graph_goes_on_from_where_it_was_rolled_back_to(saver: PerdureSaver) -> None:
    graph = counting(saver)
    graph.invoke(SOME, at("t"))
    before = graph.get_state(at("t"))
    graph.invoke({"total": 5, "log": ["more"]}, at("t"))
    thread = saver.store.thread("t")
    thread.rollback(named(thread, before))
    now = graph.get_state(at("t"))
    assert now.values == before.values
    assert now.next == before.next == ()
    assert now.parent_config == before.config
    assert now.metadata is not None
    assert now.metadata["source"] == "fork"
    assert next(iter(graph.get_state_history(at("t")))).config == now.config
    assert graph.invoke({"total": 1, "log": ["again"]}, at("t"))["log"] == [*before.values["log"], "again", "a", "b"]
    assert saver.store.ops.verify().ok


def test_what_tasks_had_written_is_not_taken_for_done(saver: PerdureSaver) -> None:
    graph = asking(saver)
    graph.invoke({"asked": "?"}, at("t"))
    waiting = graph.get_state(at("t"))
    for answer in ("Bob", "blue"):
        graph.invoke(Command(resume=answer), at("t"))
    thread = saver.store.thread("t")
    thread.rollback(named(thread, waiting))
    now: Any = graph.get_state(at("t"))
    assert now.next == waiting.next != ()
    graph.invoke(None, at("t"))
    assert [one.value for one in graph.get_state(at("t")).interrupts] == [one.value for one in waiting.interrupts]
    for answer in ("Ann", "red"):
        result = graph.invoke(Command(resume=answer), at("t"))
    assert result["answer"] == "Ann likes red"
    assert graph.get_state(at("t")).next == ()


async def test_rolling_back_in_async_code_and_to_nowhere(saver: PerdureSaver) -> None:
    graph = counting(saver)
    await graph.ainvoke(SOME, at("t"))
    thread = saver.store.thread("t")
    first = [one async for one in thread.ahistory()][-1]
    await thread.arollback(first)
    assert (await graph.aget_state(at("t"))).next == ("__start__",)
    with pytest.raises(NotFound):
        await thread.arollback("0000000000001")
