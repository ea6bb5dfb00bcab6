"""The store's retention over LangGraph's threads: what a graph needs stays; the saver's own settings live beside it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from keeping_kit import PLACES, Clock, opened, place, sound
from langchain_core.messages import HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import _messages_delta_reducer
from langgraph.types import Command, interrupt

import perdure
from perdure.langgraph import PerdureSaver


class Total(TypedDict):
    total: Annotated[int, operator.add]


class Deltas(TypedDict):
    messages: Annotated[list[Any], DeltaChannel(_messages_delta_reducer)]


def at(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest) -> str:
    return place(request, request.param)


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[perdure.Store]:
    with opened(url, clock) as made:
        yield made


@pytest.fixture
def saver(url: str, clock: Clock) -> Iterator[PerdureSaver]:
    with PerdureSaver(url) as made:
        made.store._context.clock_us = clock
        yield made


def asks(state: Total) -> Total:
    return {"total": int(interrupt("how many?"))}


def adds(state: Total) -> Total:
    return {"total": 1}


def graph_of(saver: PerdureSaver, node: Any, shape: Any = Total) -> Any:
    builder = StateGraph(shape)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder.compile(checkpointer=saver)


def test_a_graph_that_waits_for_a_person_does_not_expire(
    store: perdure.Store, saver: PerdureSaver, clock: Clock
) -> None:
    waits, done = graph_of(saver, asks), graph_of(saver, adds)
    waits.invoke({"total": 1}, at("waits"))
    done.invoke({"total": 1}, at("done"))
    store.ops.retention(threads=timedelta(days=1), checkpoints=1)
    clock.days(3)
    foreseen = store.ops.compact(dry_run=True)
    found = store.ops.compact()
    assert (found.threads, found.held, found.expired) == (1, 1, ("done",))
    assert (foreseen.threads, foreseen.held, foreseen.checkpoints) == (1, 1, found.checkpoints)
    assert waits.invoke(Command(resume=4), at("waits"))["total"] == 5
    sound(store)
    clock.days(3)
    assert store.ops.compact().threads == 1


def test_old_checkpoints_of_a_graph_that_is_in_use_go_by_their_age(
    store: perdure.Store, saver: PerdureSaver, clock: Clock
) -> None:
    graph = graph_of(saver, adds)
    graph.invoke({"total": 1}, at("used"))
    clock.days(40)
    graph.invoke({"total": 1}, at("used"))
    store.ops.retention(checkpoint_age="30d")
    assert store.ops.compact().checkpoints == 3
    assert [one.metadata["step"] for one in graph.get_state_history(at("used"))] == [4, 3, 2]
    assert graph.invoke({"total": 1}, at("used"))["total"] == 6
    sound(store)


@perdure.effect(name="retention.graph.book")
def book(what: str) -> str:
    raise TimeoutError("nobody knows")


def books(state: Total) -> Total:
    book("a seat")
    return {"total": 1}


def test_a_task_in_doubt_holds_its_thread_as_it_is(store: perdure.Store, saver: PerdureSaver, clock: Clock) -> None:
    graph = graph_of(saver, books)
    with pytest.raises(perdure.InDoubt):
        graph.invoke({"total": 1}, at("doubt"))
    count = len(list(graph.get_state_history(at("doubt"))))
    store.ops.retention(threads=timedelta(days=1), checkpoints=1)
    clock.days(3)
    found = store.ops.compact()
    assert (found.threads, found.held, found.checkpoints) == (0, 1, 0)
    assert len(list(graph.get_state_history(at("doubt")))) == count
    assert len(store.questions()) == 1
    sound(store)


def test_a_thread_takes_the_tasks_of_its_graph_with_it(store: perdure.Store, saver: PerdureSaver, clock: Clock) -> None:
    graph = graph_of(saver, counts)
    graph.invoke({"total": 1}, at("t"))
    assert len(store.runs(tasks=True)) == 1
    store.ops.retention(threads=timedelta(days=1))
    clock.days(3)
    foreseen = store.ops.compact(dry_run=True)
    found = store.ops.compact()
    assert (found.threads, found.runs) == (foreseen.threads, foreseen.runs) == (1, 0)
    assert store.runs(tasks=True) == []
    sound(store)


@perdure.step(name="retention.graph.count")
def count_one() -> int:
    return 1


def counts(state: Total) -> Total:
    return {"total": count_one()}


def test_delta_channels_are_still_rebuilt(store: perdure.Store, saver: PerdureSaver) -> None:
    def node(state: Deltas) -> Any:
        return {"messages": [HumanMessage(f"answer {len(state['messages'])}")]}

    graph = graph_of(saver, node, Deltas)
    for number in range(6):
        graph.invoke({"messages": [HumanMessage(f"question {number}")]}, at("t"))
    before = [message.content for message in graph.get_state(at("t")).values["messages"]]
    store.ops.retention(checkpoints=1)
    store.ops.compact()
    sound(store)
    assert [message.content for message in graph.get_state(at("t")).values["messages"]] == before
    graph.invoke({"messages": [HumanMessage("one more")]}, at("t"))
    assert len(graph.get_state(at("t")).values["messages"]) == len(before) + 2


def test_checkpoints_counts_the_threads_own_line(store: perdure.Store, saver: PerdureSaver) -> None:
    def node(state: MessagesState) -> Any:
        return {"messages": [HumanMessage("answer")]}

    graph = graph_of(saver, node, MessagesState)
    for number in range(5):
        graph.invoke({"messages": [HumanMessage(f"question {number}")]}, at("t"))
    store.ops.retention(checkpoints=2)
    assert store.ops.compact().checkpoints > 0
    assert len(list(graph.get_state_history(at("t")))) == 2
    assert len(list(store.thread("t").history())) == 2
    assert len(graph.invoke({"messages": []}, at("t"))["messages"]) == 11
    sound(store)


def test_pins_hold_against_the_savers_own_retention(url: str, clock: Clock, store: perdure.Store) -> None:
    with PerdureSaver(url) as saver:
        saver.store.ops.retention(threads=timedelta(days=1), checkpoints=2)
        saver.store._context.clock_us = clock
        graph = graph_of(saver, adds)
        for _ in range(4):
            graph.invoke({"total": 1}, at("t"))
        thread = store.thread("t")
        oldest = list(thread.history())[-1]
        thread.pin(oldest, name="first")
        first = list(graph.get_state_history(at("t")))[-1].config
        saver.store.ops.compact(vacuum=True)
        assert thread.load(oldest).state == oldest.state
        assert graph.get_state(first).config == first
        clock.days(3)
        saver.store.ops.compact(vacuum=True)
        assert graph.get_state(at("t")).values["total"] == 8
        with pytest.raises(perdure.errors.Pinned):
            saver.delete_thread("t")
        thread.unpin("first")
        saver.store.ops.compact(vacuum=True)
        assert store.threads() == []
    sound(store)


def test_an_erased_checkpoint_is_unknown_to_the_graph(store: perdure.Store, saver: PerdureSaver) -> None:
    graph = graph_of(saver, adds)
    for _ in range(3):
        graph.invoke({"total": 1}, at("t"))
    history = list(graph.get_state_history(at("t")))
    gone = history[3]
    thread = store.thread("t")
    checkpoint = list(thread.history())[3]
    thread.erase(checkpoint)
    sound(store)
    left = [found.config for found in graph.get_state_history(at("t"))]
    assert left == [found.config for found in history if found is not gone]
    assert graph.get_state(gone.config).values == {}
    assert graph.invoke({"total": 1}, at("t"))["total"] == 8
    newest = thread.load()
    thread.erase(newest)
    assert graph.get_state(at("t")).config != newest
    sound(store)
    store.ops.erase("t")
    assert graph.get_state(at("t")).values == {}


def test_a_checkpoint_that_others_are_rebuilt_from_is_not_erased(store: perdure.Store, saver: PerdureSaver) -> None:
    def node(state: Deltas) -> Any:
        return {"messages": [HumanMessage("answer")]}

    graph = graph_of(saver, node, Deltas)
    for number in range(3):
        graph.invoke({"messages": [HumanMessage(f"question {number}")]}, at("t"))
    thread = store.thread("t")
    line = list(thread.history())
    with pytest.raises(perdure.UsageError, match="rebuilt"):
        thread.erase(line[1])
    sound(store)
    thread.erase(line[0])
    thread.erase(line[1])
    sound(store)


def test_tables_that_no_graph_uses_cost_nothing(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        assert store.ops.compact() == perdure.ops.Compacted(0, 0, 0, 0, 0, 0)
