"""A restored thread looks to LangGraph exactly as it did: checkpoints, pending writes, interrupts; and it continues."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from graph_kit import AnyGraph, at
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from snapshot_kit import moment_between

import perdure
from perdure.forensics import sandbox
from perdure.langgraph import PerdureSaver

booked: list[str] = []


class Trip(TypedDict):
    log: Annotated[list[str], operator.add]


@perdure.effect(name="restoring_graphs.book")
def book(seat: str, key: perdure.IdempotencyKey) -> str:
    booked.append(str(key))
    return seat


def agent(saver: PerdureSaver) -> AnyGraph:
    def plan(state: Trip) -> dict[str, Any]:
        return {"log": ["plan"]}

    def seat(state: Trip) -> dict[str, Any]:
        booking = book("aisle")
        return {"log": [booking, interrupt("Window?")]}

    def beside(state: Trip) -> dict[str, Any]:
        return {"log": ["beside"]}

    builder = StateGraph(Trip)
    for name, node in (("plan", plan), ("seat", seat), ("beside", beside)):
        builder.add_node(name, node)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "seat")
    builder.add_edge("plan", "beside")
    builder.add_edge("seat", END)
    builder.add_edge("beside", END)
    return builder.compile(checkpointer=saver)


def shown(graph: AnyGraph, thread: str) -> Any:
    """What LangGraph sees of a thread."""
    config = at(thread)
    assert isinstance(graph.checkpointer, PerdureSaver)
    tuples = [(found.checkpoint, found.metadata, found.pending_writes) for found in graph.checkpointer.list(config)]
    return [*graph.get_state_history(config)], tuples


def test_a_graph_goes_back_and_continues(saver_url: str) -> None:
    booked.clear()
    with PerdureSaver(saver_url) as saver, PerdureSaver(saver_url) as other:
        graph = agent(saver)
        for thread in ("answered", "deleted", "same"):
            graph.invoke({"log": [thread]}, at(thread))
        store = saver.store
        snapshot = store.snapshot("s")
        then = {thread: shown(graph, thread) for thread in ("answered", "deleted", "same")}
        agent(other).invoke(Command(resume="yes"), at("answered"))
        agent(other).invoke({"log": ["again"]}, at("answered"))
        saver.delete_thread("deleted")
        graph.invoke({"log": ["new"]}, at("new"))
        late = {thread: shown(graph, thread) for thread in ("answered", "new")}
        with pytest.raises(perdure.UsageError, match=r"had effects since the snapshot 's'.*\(answered\).*keys=\"new\""):
            store.restore(snapshot)
        done = store.restore(snapshot, keys="new")
        assert sorted(map(str, done.changes)) == [
            "bring back thread deleted",
            "delete thread new",
            "set back thread answered",
        ]
        assert {thread: shown(graph, thread) for thread in then} == then
        assert {thread: shown(agent(other), thread) for thread in then} == then
        assert shown(graph, "new") == ([], [])
        assert store.restore(snapshot).changes == ()
        before = len(booked)
        for one, thread in ((graph, "answered"), (agent(other), "deleted"), (graph, "same")):
            result = one.invoke(Command(resume="no"), at(thread))
            assert sorted(result["log"]) == sorted([thread, "plan", "beside", "aisle", "no"])
        assert len(booked) == before, "what a task has done is answered from its record"
        store.restore(done.undo)
        assert {thread: shown(agent(other), thread) for thread in late} == late
        assert store.ops.verify().ok


def test_a_graph_goes_back_to_an_instant(saver_url: str) -> None:
    booked.clear()
    with PerdureSaver(saver_url) as saver:
        graph, store = agent(saver), saver.store
        graph.invoke({"log": ["t"]}, at("t"))
        then, instant = shown(graph, "t"), moment_between(store)
        graph.invoke(Command(resume="yes"), at("t"))
        assert [str(change) for change in store.restore(at=instant).changes] == ["set back thread t"]
        [states, checkpoints], [old_states, old_checkpoints] = shown(graph, "t"), then
        assert [one[0] for one in checkpoints] == [one[0] for one in old_checkpoints]
        assert [one.values for one in states] == [one.values for one in old_states]
        graph.invoke(None, at("t"))
        assert sorted(graph.invoke(Command(resume="no"), at("t"))["log"]) == ["aisle", "beside", "no", "plan", "t"]
        assert len(booked) == 1, "what a task has done is answered from its record"
        instant = moment_between(store)
        graph.invoke({"log": ["again"]}, at("t"))
        with pytest.raises(perdure.UsageError, match=r"had effects since 20.*\(t\).*keys=\"new\""):
            store.restore(at=instant)
        store.ops.retention(runs="0s")
        graph.invoke(Command(resume="yes"), at("t"))
        store.ops.sweep_runs()
        with pytest.raises(perdure.UsageError, match=r"or may have had \(t\).*keys=\"new\""):
            store.restore(at=instant)
        store.restore(at=instant, keys="new")
        assert store.ops.verify().ok


def test_what_came_beside_the_newest_checkpoint_goes_too(saver_url: str) -> None:
    """An interrupt that was answered, and a subgraph that went on, leave the graph at its checkpoint. One that has only
    asked before the instant stays as it is."""
    with PerdureSaver(saver_url) as saver:
        store = saver.store

        def ask(state: Trip) -> dict[str, Any]:
            return {"log": [interrupt("Where?"), interrupt("When?")]}

        inner = StateGraph(Trip)
        for before, name in ((START, "Where?"), ("Where?", "When?")):
            inner.add_node(name, lambda state, name=name: {"log": [interrupt(name)]})
            inner.add_edge(before, name)
        for thread, node in (("node", ask), ("subgraph", inner.compile())):
            builder = StateGraph(Trip)
            builder.add_node("ask", node)
            builder.add_edge(START, "ask")
            graph = builder.compile(checkpointer=saver)
            graph.invoke({"log": []}, at(thread))
            graph.invoke({"log": []}, at(f"{thread} that waits"))
            instant, waits = moment_between(store), shown(graph, f"{thread} that waits")
            graph.invoke(Command(resume="Rome"), at(thread))
            assert [one.value for one in graph.get_state(at(thread)).interrupts] == ["When?"]
            assert [str(change) for change in store.restore(at=instant).changes] == [f"set back thread {thread}"]
            assert store.restore(at=instant).changes == ()
            assert thread not in [question.run for question in store.questions()]
            graph.invoke(None, at(thread))
            for answer in ("Oslo", "May"):
                result = graph.invoke(Command(resume=answer), at(thread))
            assert result["log"] == ["Oslo", "May"]
            assert shown(graph, f"{thread} that waits") == waits
        assert store.ops.verify().ok


def _archived(saver: PerdureSaver, folder: Path) -> None:
    saver.store.ops.archive("t", folder / "archive.db")


REMOVALS: dict[str, Callable[[PerdureSaver, Path], object]] = {
    "swept": lambda saver, _: saver.store.ops.sweep_runs(),
    "compacted": lambda saver, _: saver.store.ops.compact(),
    "deleted": lambda saver, _: saver.delete_thread("t"),
    "archived": _archived,
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_effects_of_tasks_that_are_gone_are_not_repeated_unawares(saver_url: str, tmp_path: Path, removal: str) -> None:
    booked.clear()
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(runs="0s")
        graph = agent(saver)
        graph.invoke({"log": []}, at("t"), interrupt_before=["plan"])
        snapshot = saver.store.snapshot("s")
        graph.invoke(None, at("t"))
        graph.invoke(Command(resume="yes"), at("t"))
        REMOVALS[removal](saver, tmp_path)
        assert len(booked) == 1
        with pytest.raises(perdure.UsageError, match=r"had effects since the snapshot 's'.*\(t\).*keys=\"new\""):
            saver.store.restore(snapshot)
        saver.store.snapshot("later").release()  # removes what no snapshot needs: not what tells of the effect
        with pytest.raises(perdure.UsageError, match="had effects since"):
            saver.store.restore(snapshot)
        saver.store.restore(snapshot, keys="new")


def test_pending_writes_alone(saver_url: str) -> None:
    with PerdureSaver(saver_url) as saver:
        graph = agent(saver)
        graph.invoke({"log": []}, at("t"))
        snapshot = saver.store.snapshot("s")
        then = shown(graph, "t")
        saver.put_writes(graph.get_state(at("t")).config, [("log", ["more"])], "another task")
        assert shown(graph, "t") != then
        assert [str(change) for change in saver.store.restore(snapshot).changes] == ["set back thread t"]
        assert shown(graph, "t") == then


def test_a_graph_in_a_sandbox_has_the_effects_of_its_tasks(saver_url: str) -> None:
    booked.clear()
    with perdure.open(saver_url) as store:
        graph = agent(PerdureSaver(store))
        graph.invoke({"log": []}, at("t"))
        assert len(booked) == 1
        with sandbox(store.snapshot("s")) as box:
            box.thread("t")
            saver = PerdureSaver(box.store)
            done = agent(saver).invoke(Command(resume="yes"), at("t"))
            assert sorted(done["log"]) == ["aisle", "beside", "plan", "yes"]
        assert len(booked) == 1
        assert graph.get_state(at("t")).next == ("seat",)
