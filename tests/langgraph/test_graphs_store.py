"""A graph's threads are Perdure's: their history, diffs, forks and rollbacks; tenants, retention, lists, one writer;
the ways to open a saver; what another process finds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoints import put
from graph_kit import (
    MODES,
    AnyGraph,
    Count,
    Outer,
    Runner,
    asking,
    at,
    counting,
    human,
    id_of,
    inner,
    long_talking,
    outer,
    talking,
    texts,
)
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import perdure
from perdure.errors import Conflict
from perdure.langgraph import PerdureSaver

SOME = {"total": 0, "log": []}


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name in ("total", "log", "messages")}


# --- a graph's thread is a thread


def test_history_and_states_are_those_of_the_graph(saver: PerdureSaver) -> None:
    graph = counting(saver)
    for _ in range(2):
        graph.invoke({"total": 1, "log": ["in"]}, at("t"))
    thread = saver.store.thread("t")
    assert values_of(thread.load().state) == graph.get_state(at("t")).values
    assert "__line__" in thread.load().state
    # A channel that nobody wrote to yet is not stored; the graph shows its default.
    seen = [{"total": 0, "log": []} | values_of(checkpoint.state) for checkpoint in thread.history()]
    assert seen == [snapshot.values for snapshot in graph.get_state_history(at("t"))]
    assert thread.verify().ok


def test_a_diff_says_what_a_node_did(saver: PerdureSaver) -> None:
    graph = counting(saver, "a", "b")
    graph.invoke({"total": 5, "log": ["in"]}, at("t"))
    newest, before, *_ = saver.store.thread("t").history()
    changes = [change for change in saver.store.thread("t").diff(before, newest) if change.path[0] in ("total", "log")]
    assert sorted((change.path, change.kind, change.after) for change in changes) == [
        (("log", 2), "added", "b"),
        (("total",), "changed", 7),
    ]


@pytest.mark.parametrize("mode", MODES)
async def test_a_fork_is_gone_on_with_by_the_graph(saver: PerdureSaver, mode: str) -> None:
    graph = Runner(talking(saver), mode)
    for text in ("one", "two"):
        await graph.invoke({"messages": [human(text)]}, at("t"))
    original = await graph.history(at("t"))
    saver.store.thread("t").fork(name="t2")
    inherited = await graph.history(at("t2"))
    assert [snapshot.values for snapshot in inherited] == [snapshot.values for snapshot in original]
    assert [id_of(snapshot.config) for snapshot in inherited] == [id_of(snapshot.config) for snapshot in original]
    assert {snapshot.config["configurable"]["thread_id"] for snapshot in inherited} == {"t2"}
    result = await graph.invoke({"messages": [human("in the fork")]}, at("t2"))
    assert texts(result) == ["one", "Echo: one", "two", "Echo: two", "in the fork", "Echo: in the fork"]
    await graph.invoke({"messages": [human("in the original")]}, at("t"))
    assert texts((await graph.state(at("t2"))).values) == texts(result)
    assert texts((await graph.state(at("t"))).values)[-2:] == ["in the original", "Echo: in the original"]
    assert len(await graph.history(at("t2"))) == len(original) + 3
    assert saver.store.ops.verify().ok


def test_a_fork_of_an_old_checkpoint_starts_there(saver: PerdureSaver) -> None:
    graph = talking(saver)
    for text in ("one", "two"):
        graph.invoke({"messages": [human(text)]}, at("t"))
    old = list(saver.store.thread("t").history())[3]
    saver.store.thread("t").fork(old, name="t2")
    assert texts(graph.get_state(at("t2")).values) == ["one", "Echo: one"]
    assert texts(graph.invoke({"messages": [human("other")]}, at("t2"))) == ["one", "Echo: one", "other", "Echo: other"]
    assert texts(graph.get_state(at("t")).values) == ["one", "Echo: one", "two", "Echo: two"]
    assert saver.store.ops.verify().ok


def test_a_fork_takes_what_was_pending_with_it(saver: PerdureSaver) -> None:
    asked: list[str] = []
    graph = asking(saver, asked)
    graph.invoke({"found": []}, at("t"))
    saver.store.thread("t").fork(name="t2")
    assert [item.value for item in graph.get_state(at("t2")).interrupts] == [{"question": "name?"}]
    graph.invoke(Command(resume="Ada"), at("t2"))
    assert graph.invoke(Command(resume="red"), at("t2"))["answer"] == "Ada likes red"
    assert graph.get_state(at("t")).next == ("ask",)


def test_after_a_rollback_the_graph_goes_on_from_the_old_state(saver: PerdureSaver) -> None:
    graph = talking(saver)
    for text in ("one", "two"):
        graph.invoke({"messages": [human(text)]}, at("t"))
    thread = saver.store.thread("t")
    thread.rollback(list(thread.history())[3])
    assert texts(graph.get_state(at("t")).values) == ["one", "Echo: one"]
    assert texts(graph.invoke({"messages": [human("three")]}, at("t"))) == ["one", "Echo: one", "three", "Echo: three"]
    assert texts(graph.get_state(at("t")).values) == ["one", "Echo: one", "three", "Echo: three"]
    assert saver.store.ops.verify().ok


def test_a_fork_takes_the_memory_of_subgraphs_with_it(saver: PerdureSaver) -> None:
    graph = outer(saver, inner(checkpointer=True))
    for topic in ("tea", "rum"):
        graph.invoke({"topic": topic}, at("t"))
    saver.store.thread("t").fork(name="t2")
    assert graph.invoke({"topic": "ale"}, at("t2"))["results"][-1] == "ale: 5 notes, yes"
    assert graph.invoke({"topic": "gin"}, at("t"))["results"][-1] == "gin: 5 notes, yes"
    assert saver.store.ops.verify().ok


def test_a_thread_that_the_store_prunes_goes_on(saver: PerdureSaver) -> None:
    graph = talking(saver)
    for number in range(4):
        graph.invoke({"messages": [human(f"m{number}")]}, at("t"))
    newest = list(graph.get_state_history(at("t")))[:2]
    saver.store.thread("t").prune(keep=2)
    assert [snapshot.values for snapshot in graph.get_state_history(at("t"))] == [found.values for found in newest]
    assert len(graph.invoke({"messages": [human("more")]}, at("t"))["messages"]) == 10
    assert saver.store.ops.verify().ok


def test_a_state_changed_through_the_store_is_what_the_graph_goes_on_from(saver: PerdureSaver) -> None:
    graph = counting(saver)
    graph.invoke(SOME, at("t"))
    saver.store.thread("t").update({"total": 100})
    assert graph.get_state(at("t")).values == {"total": 100, "log": ["a", "b"]}
    assert graph.invoke({"total": 1, "log": []}, at("t")) == {"total": 103, "log": ["a", "b", "a", "b"]}
    assert saver.store.ops.verify().ok


def test_deleting_a_thread_of_the_store_deletes_the_graphs(saver: PerdureSaver) -> None:
    graph = outer(saver, inner())
    for name in ("t", "other"):
        graph.invoke({"topic": "tea"}, at(name))
    saver.store.delete_thread("t")
    assert graph.get_state(at("t")).values == {}
    assert list(graph.get_state_history(at("t"))) == []
    assert list(saver.list(at("t"))) == []
    assert {found.config["configurable"]["thread_id"] for found in saver.list(None)} == {"other"}
    assert graph.invoke({"topic": "rum"}, at("t"))["results"] == ["planned", "rum: 1 notes, yes"]
    assert saver.store.ops.verify().ok


# --- tenants


@pytest.mark.parametrize("mode", MODES)
async def test_tenants_see_only_their_own_threads(saver_url: str, mode: str) -> None:
    with perdure.open(saver_url) as store:
        savers = {name: PerdureSaver(store, tenant=name) for name in ("red", "blue")}
        for name, saver in savers.items():
            graph = Runner(talking(saver), mode)
            await graph.invoke({"messages": [human(f"I am {name}")]}, at("t"))
        await Runner(talking(savers["red"]), mode).invoke({"messages": [human("more")]}, at("only red"))
        for name, saver in savers.items():
            state = await Runner(talking(saver), mode).state(at("t"))
            assert texts(state.values) == [f"I am {name}", f"Echo: I am {name}"]
            assert saver.store.ops.verify().ok
        assert {info.name for info in savers["blue"].store.threads()} == {"t"}
        assert len(list(savers["blue"].list(None))) == 3
        savers["blue"].delete_thread("t")
        savers["blue"].delete_thread("only red")
        assert {info.name for info in savers["red"].store.threads()} == {"t", "only red"}
        assert store.threads() == []


# --- retention


class Clock:
    """A clock that tests set."""

    def __init__(self, saver: PerdureSaver) -> None:
        self.now = saver.store._context.clock_us()
        saver.store._context.clock_us = lambda: self.now

    def forward(self, seconds: float) -> None:
        self.now += int(seconds * 1_000_000)


@pytest.mark.parametrize("age", ["60s", timedelta(minutes=1)])
@pytest.mark.parametrize("mode", MODES)
async def test_threads_that_nobody_wrote_for_the_ttl_are_deleted(saver_url: str, age: Any, mode: str) -> None:
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(threads=age)
        clock = Clock(saver)
        graph = Runner(outer(saver, inner()), mode)
        for name in ("old", "kept alive"):
            await graph.invoke({"topic": "tea"}, at(name))
        clock.forward(40)
        await graph.invoke({"topic": "rum"}, at("kept alive"))
        saver.store.ops.compact()
        assert {info.name for info in saver.store.threads()} == {"old", "kept alive"}
        clock.forward(40)
        saver.store.ops.compact()
        assert {info.name for info in saver.store.threads()} == {"kept alive"}
        assert (await graph.state(at("old"))).values == {}
        assert (await graph.state(at("kept alive"))).values["topic"] == "rum"
        assert {found.config["configurable"]["thread_id"] for found in saver.list(None)} == {"kept alive"}
        assert saver.store.ops.verify().ok


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [talking, long_talking])
async def test_the_last_checkpoints_are_kept(saver_url: str, mode: str, make: Callable[[Any], AnyGraph]) -> None:
    """Also with a DeltaChannel, whose value is spread over the checkpoints that go."""
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(checkpoints=4)
        graph = Runner(make(saver), mode)
        for number in range(8):
            await graph.invoke({"messages": [human(f"m{number}")]}, at("t"))
        before = await graph.history(at("t"), limit=4)
        saver.store.ops.compact()
        kept = await graph.history(at("t"))
        assert [snapshot.values for snapshot in kept[:4]] == [snapshot.values for snapshot in before]
        assert len(kept) == 4 or make is long_talking
        assert len(kept) < 24
        assert len((await graph.invoke({"messages": [human("more")]}, at("t")))["messages"]) == 18
        assert saver.store.ops.verify().ok


def test_checkpoints_counts_each_namespace_by_itself(saver_url: str) -> None:
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(checkpoints=2)
        graph = outer(saver, inner(checkpointer=True))
        for topic in ("tea", "rum", "ale"):
            graph.invoke({"topic": topic}, at("t"))
        saver.store.ops.compact(vacuum=True)
        for namespace in ("", "sub0"):
            assert len(list(saver.list(at("t", checkpoint_ns=namespace)))) == 2
        assert graph.invoke({"topic": "gin"}, at("t"))["results"][-1] == "gin: 7 notes, yes"
        assert saver.store.ops.verify().ok


# --- lists


@pytest.mark.parametrize("mode", MODES)
async def test_threads_are_found_by_what_the_config_said(saver: PerdureSaver, mode: str) -> None:
    graph = Runner(counting(saver), mode)
    for number, (user, kind) in enumerate([("ada", "chat"), ("bob", "chat"), ("ada", "mail")]):
        await graph.invoke(SOME, {**at(f"t{number}", user_id=user), "metadata": {"kind": kind, "size": number}})

    async def found(**where: Any) -> list[str]:
        infos = await saver.store.athreads(where=where) if mode == "async" else saver.store.threads(where=where)
        return [info.name for info in infos]

    assert await found(user_id="ada") == ["t2", "t0"]
    assert await found(user_id="ada", kind="chat") == ["t0"]
    assert await found(size=1) == ["t1"]
    assert await found(user_id="nobody") == []
    assert await found() == ["t2", "t1", "t0"]
    await graph.invoke(SOME, at("t0", user_id="ada"))
    assert [info.name for info in saver.store.threads(limit=2)] == ["t0", "t2"]


# --- one writer


def meddling(saver: PerdureSaver, meddle: list[str]) -> AnyGraph:
    """A graph whose node, if told to, lets somebody else write to the same thread meanwhile."""

    def node(state: Count) -> dict[str, Any]:
        if meddle:
            other = counting(PerdureSaver(saver.store), "a")
            other.invoke({"total": 100, "log": [meddle.pop()]}, at("t"), durability="sync")
        return {"total": 1, "log": ["mine"]}

    builder = StateGraph(Count)
    builder.add_node("a", node)
    builder.add_edge(START, "a")
    return builder.compile(checkpointer=saver)


def test_a_second_writer_makes_a_branch_unless_one_is_asked_for(saver: PerdureSaver) -> None:
    graph = meddling(saver, ["theirs"])
    assert graph.invoke(SOME, at("t"))["log"] == ["mine"]
    ends = [snapshot.values["log"] for snapshot in graph.get_state_history(at("t")) if snapshot.next == ()]
    assert sorted(ends) == [["mine"], ["theirs", "a"]]
    assert saver.store.ops.verify().ok


@pytest.mark.parametrize("mode", MODES)
async def test_one_writer_refuses_to_go_on_from_what_is_no_longer_newest(saver_url: str, mode: str) -> None:
    with PerdureSaver(saver_url, single_writer=True) as saver:
        graph = Runner(meddling(saver, ["theirs"]), mode)
        with pytest.raises(Conflict):
            await graph.invoke(SOME, at("t"))
        state = await graph.state(at("t"))
        assert state.values == {"total": 101, "log": ["theirs", "a"]}
        assert await graph.invoke({"total": 0, "log": ["again"]}, at("t")) == {
            "total": 102,
            "log": ["theirs", "a", "again", "mine"],
        }
        assert saver.store.ops.verify().ok


@pytest.mark.parametrize("durability", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
async def test_an_overtaken_subgraph_that_stops_for_an_answer_is_refused_too(
    tmp_path: Path, mode: str, durability: str
) -> None:
    """LangGraph itself drops what a graph could not store if that graph is interrupted."""

    def read(state: Outer) -> dict[str, Any]:
        if state["topic"] == "rum":
            put(PerdureSaver(saver.store), "t", {"topic": "theirs"}, ns="sub0")
        return {"results": [f"read {state['topic']}"]}

    builder = StateGraph(Outer)
    builder.add_node("read", read)
    builder.add_node("ask", lambda state: {"results": [interrupt(state["topic"])]})
    builder.add_edge(START, "read")
    builder.add_edge("read", "ask")
    with PerdureSaver(str(tmp_path / "a.db"), single_writer=True) as saver:
        graph = Runner(outer(saver, builder.compile(checkpointer=True)), mode)
        await graph.invoke({"topic": "tea"}, at("t"), durability=durability)
        await graph.invoke(Command(resume="yes"), at("t"), durability=durability)
        with pytest.raises(Conflict, match="sub0"):
            await graph.invoke({"topic": "rum"}, at("t"), durability=durability)
        assert (await graph.state(at("t"))).interrupts == ()


@pytest.mark.parametrize("mode", MODES)
async def test_one_writer_may_travel_in_time(saver_url: str, mode: str) -> None:
    with PerdureSaver(saver_url, single_writer=True) as saver:
        graph = Runner(counting(saver, "a", "b"), mode)
        await graph.invoke(SOME, at("t"))
        history = await graph.history(at("t"))
        after_a = next(snapshot for snapshot in history if snapshot.next == ("b",))
        assert (await graph.invoke(None, after_a.config))["log"] == ["a", "b"]
        assert (await graph.invoke({"total": 0, "log": ["new"]}, after_a.config))["log"] == ["a", "new", "a", "b"]
        config = await graph.update(after_a.config, {"total": 9, "log": ["by hand"]}, "a")
        assert (await graph.invoke(None, config))["log"] == ["a", "by hand", "b"]
        deep = Runner(outer(saver, inner(ask=True), inner(checkpointer=True)), mode)
        for topic in ("tea", "rum"):
            await deep.invoke({"topic": topic}, at("deep"))
            await deep.invoke(Command(resume="yes"), at("deep"))
        assert (await deep.state(at("deep"))).values["results"][-1] == "rum: 3 notes, yes"
        assert saver.store.ops.verify().ok


def test_a_look_by_id_does_not_let_a_later_run_pass_for_time_travel(saver_url: str) -> None:
    with PerdureSaver(saver_url, single_writer=True) as saver:
        counting(saver).invoke(SOME, at("t"))
        newest = saver.get_tuple(at("t"))
        assert newest is not None
        saver.get_tuple(newest.config)  # by its id, as a page that shows a history does
        assert saver.get_tuple(at("t")) == newest  # now a run begins, without asking for an id
        counting(PerdureSaver(saver.store)).invoke({"total": 5, "log": ["theirs"]}, at("t"))
        with pytest.raises(Conflict):
            saver.put(newest.config, empty_checkpoint(), {"source": "input", "step": 3, "parents": {}}, {})
        assert counting(saver).get_state(at("t")).values["log"] == ["a", "b", "theirs", "a", "b"]
