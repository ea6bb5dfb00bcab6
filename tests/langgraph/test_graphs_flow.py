"""Graphs that stop and go on: interrupts, parallel branches, failures, durabilities. As in `test_graphs`, what each
scenario saw must equal what it sees on LangGraph's own in-memory saver.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, Literal

import pytest
from graph_kit import MODES, AnyGraph, AnySaver, Runner, Scenario, Work, asking, at, counting, on_both
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from perdure.langgraph import PerdureSaver

DURABILITIES = ("sync", "async", "exit")


async def an_interrupt_waits_for_its_answers(saver: AnySaver, mode: str) -> Any:
    asked: list[str] = []
    graph = Runner(asking(saver, asked), mode)
    first = await graph.invoke({"found": ["begin"]}, at("t"))
    assert [item.value for item in first["__interrupt__"]] == [{"question": "name?"}]
    waiting = await graph.state(at("t"))
    assert waiting.next == ("ask",)
    assert [item.value for item in waiting.interrupts] == [{"question": "name?"}]
    second = await graph.invoke(Command(resume="Ada"), at("t"))
    assert [item.value for item in second["__interrupt__"]] == [{"question": "colour?", "for": "Ada"}]
    between = await graph.state(at("t"))
    result = await graph.invoke(Command(resume="green"), at("t"))
    assert result == {"answer": "Ada likes green", "found": ["begin", "Ada", "done: Ada likes green"]}
    assert asked == ["begin"] * 3
    return [first, waiting, second, between, result, await graph.history(at("t"))]


async def an_interrupt_can_be_answered_again_in_the_past(saver: AnySaver, mode: str) -> Any:
    graph = Runner(asking(saver), mode)
    await graph.invoke({"found": []}, at("t"))
    await graph.invoke(Command(resume="Ada"), at("t"))
    await graph.invoke(Command(resume="green"), at("t"))
    history = await graph.history(at("t"))
    before = next(snapshot for snapshot in history if snapshot.next == ("ask",))
    replayed = await graph.invoke(None, before.config)
    assert [item.value for item in replayed["__interrupt__"]] == [{"question": "name?"}]
    await graph.invoke(Command(resume="Bob"), at("t"))
    result = await graph.invoke(Command(resume="red"), at("t"))
    assert result["answer"] == "Bob likes red"
    old_end = await graph.state(history[0].config)
    assert old_end.values["answer"] == "Ada likes green"
    return [replayed, result, await graph.history(at("t"))]


def stopping(saver: AnySaver, **where: Any) -> AnyGraph:
    builder = StateGraph(Work)
    for name in ("a", "b", "c"):
        builder.add_node(name, lambda state, name=name: {"found": [name]})
    builder.add_edge(START, "a")
    builder.add_edge("a", "b")
    builder.add_edge("b", "c")
    return builder.compile(checkpointer=saver, **where)


async def a_graph_stops_before_and_after_nodes(saver: AnySaver, mode: str) -> Any:
    seen: list[Any] = []
    graph = Runner(stopping(saver, interrupt_before=["b"], interrupt_after=["b"]), mode)
    await graph.invoke({"found": []}, at("t"))
    for expected in (("b",), ("c",), ()):
        state = await graph.state(at("t"))
        assert state.next == expected
        seen.append(state)
        if expected:
            await graph.invoke(None, at("t"))
    assert seen[-1].values["found"] == ["a", "b", "c"]
    every = Runner(stopping(saver), mode)
    await every.invoke({"found": []}, at("all"), interrupt_before="*")
    assert (await every.state(at("all"))).next == ("a",)
    return [seen, await graph.history(at("t")), await every.history(at("all"))]


def parallel_asking(saver: AnySaver) -> AnyGraph:
    def ask(state: Work) -> dict[str, Any]:
        return {"found": [f"{state['item']}={interrupt({'item': state['item']})}"]}

    builder = StateGraph(Work)
    builder.add_node("ask", ask)
    builder.add_node("plain", lambda state: {"found": ["plain"]})
    builder.add_node("end", lambda state: {"answer": ",".join(state["found"])})
    builder.add_conditional_edges(
        START, lambda state: [*(Send("ask", {"item": n}) for n in state["items"]), "plain"], ["ask", "plain"]
    )
    builder.add_edge("ask", "end")
    builder.add_edge("plain", "end")
    return builder.compile(checkpointer=saver)


async def interrupts_in_parallel_are_answered_by_id(saver: AnySaver, mode: str) -> Any:
    graph = Runner(parallel_asking(saver), mode)
    await graph.invoke({"items": [1, 2, 3]}, at("t"))
    waiting = await graph.state(at("t"))
    assert sorted(item.value["item"] for item in waiting.interrupts) == [1, 2, 3]
    answers = {item.id: f"answer {item.value['item']}" for item in waiting.interrupts}
    some = dict(list(answers.items())[:2])
    await graph.invoke(Command(resume=some), at("t"))
    left = await graph.state(at("t"))
    assert [item.id for item in left.interrupts] == list(answers)[2:]
    result = await graph.invoke(Command(resume={key: answers[key] for key in answers if key not in some}), at("t"))
    assert sorted(result["found"]) == ["1=answer 1", "2=answer 2", "3=answer 3", "plain"]
    return [waiting, left, result, await graph.history(at("t"))]


def map_reduce(saver: AnySaver, ran: list[int], failing: set[int]) -> AnyGraph:
    """One branch for each item. A branch whose item is in `failing` fails."""

    def work(state: Work) -> dict[str, Any]:
        ran.append(state["item"])
        if state["item"] in failing:
            raise RuntimeError(f"item {state['item']} failed")
        return {"found": [f"item {state['item']}"]}

    builder = StateGraph(Work)
    builder.add_node("work", work)
    builder.add_node("sum", lambda state: {"answer": ", ".join(state["found"])})
    builder.add_conditional_edges(START, lambda state: [Send("work", {"item": n}) for n in state["items"]], ["work"])
    builder.add_edge("work", "sum")
    return builder.compile(checkpointer=saver)


async def send_maps_and_the_next_step_reduces(saver: AnySaver, mode: str) -> Any:
    ran: list[int] = []
    graph = Runner(map_reduce(saver, ran, set()), mode)
    result = await graph.invoke({"items": list(range(12))}, at("t"))
    assert result["answer"] == ", ".join(f"item {n}" for n in range(12))
    history = await graph.history(at("t"))
    mapped = next(snapshot for snapshot in history if "work" in snapshot.next)
    assert mapped.next == ("work",) * 12
    assert [task.result for task in mapped.tasks] == [{"found": [f"item {n}"]} for n in range(12)]
    return history


async def only_the_branch_that_failed_runs_again(saver: AnySaver, mode: str) -> Any:
    ran: list[int] = []
    failing = {2}
    graph = Runner(map_reduce(saver, ran, failing), mode)
    # One at a time, and the failing one last: then the others are done whatever the threads do.
    with pytest.raises(RuntimeError, match="item 2 failed"):
        await graph.invoke({"items": [0, 1, 3, 2]}, {**at("t"), "max_concurrency": 1})
    assert ran == [0, 1, 3, 2]
    stopped = await graph.state(at("t"))
    assert [bool(task.error) for task in stopped.tasks] == [False, False, False, True]
    assert [task.result for task in stopped.tasks][:3] == [{"found": [f"item {n}"]} for n in (0, 1, 3)]
    failing.clear()
    result = await graph.invoke(None, at("t"))
    assert ran == [0, 1, 3, 2, 2]
    assert result["answer"] == "item 0, item 1, item 3, item 2"
    return [stopped, result, await graph.history(at("t"))]


async def a_failed_node_runs_again_and_a_retried_one_leaves_no_trace(saver: AnySaver, mode: str) -> Any:
    fails = iter([True, True, True, False])

    def flaky(state: Work) -> dict[str, Any]:
        if next(fails):
            raise ConnectionError("not yet")
        return {"found": ["flaky"]}

    builder = StateGraph(Work)
    policy = RetryPolicy(initial_interval=0.001, max_attempts=2, jitter=False)
    builder.add_node("flaky", flaky, retry_policy=policy)
    builder.add_edge(START, "flaky")
    graph = Runner(builder.compile(checkpointer=saver), mode)
    with pytest.raises(ConnectionError):
        await graph.invoke({"found": []}, at("t"))
    stopped = await graph.state(at("t"))
    assert "not yet" in str(stopped.tasks[0].error)
    assert (await graph.invoke(None, at("t")))["found"] == ["flaky"]
    return [stopped, await graph.history(at("t"))]


async def a_node_that_waits_for_two_branches(saver: AnySaver, mode: str) -> Any:
    """The barrier is half full when the graph stops: the channel holds a set."""
    builder = StateGraph(Work)
    for name in ("short", "long1", "long2", "join", "last"):
        builder.add_node(name, lambda state, name=name: {"found": [name]}, defer=name == "last")
    builder.add_edge(START, "short")
    builder.add_edge(START, "long1")
    builder.add_edge("long1", "long2")
    builder.add_edge(["short", "long2"], "join")
    builder.add_edge("short", "last")
    graph = Runner(builder.compile(checkpointer=saver, interrupt_before=["long2"]), mode)
    await graph.invoke({"found": []}, at("t"))
    half = await graph.state(at("t"))
    assert half.next == ("long2",)
    result = await graph.invoke(None, at("t"))
    assert result["found"] == ["long1", "short", "long2", "join", "last"]
    return [half, result, await graph.history(at("t"))]


async def commands_route_and_update(saver: AnySaver, mode: str) -> Any:
    def route(state: Work) -> Command[Literal["left", "right"]]:
        return Command(update={"answer": "routed"}, goto=[Send("left", {"item": 1}), Send("right", {"item": 2})])

    builder = StateGraph(Work)
    builder.add_node("route", route)
    builder.add_node("left", lambda state: {"found": [f"left {state['item']}"]})
    builder.add_node("right", lambda state: {"found": [f"right {state['item']}"]})
    builder.add_edge(START, "route")
    builder.add_edge("left", END)
    graph = Runner(builder.compile(checkpointer=saver, interrupt_before=["left"]), mode)
    await graph.invoke({"found": []}, at("t"))
    stopped = await graph.state(at("t"))
    assert sorted(stopped.next) == ["left", "right"]
    result = await graph.invoke(Command(update={"found": ["extra"]}), at("t"))
    assert sorted(result["found"]) == ["extra", "left 1", "right 2"]
    return [stopped, result, await graph.history(at("t"))]


SCENARIOS: list[Scenario] = [
    an_interrupt_waits_for_its_answers,
    an_interrupt_can_be_answered_again_in_the_past,
    a_graph_stops_before_and_after_nodes,
    interrupts_in_parallel_are_answered_by_id,
    send_maps_and_the_next_step_reduces,
    only_the_branch_that_failed_runs_again,
    a_failed_node_runs_again_and_a_retried_one_leaves_no_trace,
    a_node_that_waits_for_two_branches,
    commands_route_and_update,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_a_graph_stops_and_goes_on_as_in_memory(scenario: Scenario, saver: PerdureSaver, mode: str) -> None:
    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("durability", DURABILITIES)
async def test_every_durability_keeps_what_it_promises(saver: PerdureSaver, mode: str, durability: str) -> None:
    async def scenario(saver: AnySaver, mode: str) -> Any:
        graph = Runner(counting(saver, "a", "b", "c"), mode)
        for _ in range(2):
            await graph.invoke({"total": 0, "log": []}, at("t"), durability=durability)
        history = await graph.history(at("t"))
        assert history[0].values == {"total": 6, "log": ["a", "b", "c"] * 2}
        assert len(history) == (2 if durability == "exit" else 10)
        asked = Runner(asking(saver), mode)
        await asked.invoke({"found": []}, at("ask"), durability=durability)
        await asked.invoke(Command(resume="Ada"), at("ask"), durability=durability)
        result = await asked.invoke(Command(resume="red"), at("ask"), durability=durability)
        assert result["answer"] == "Ada likes red"
        return [history, await asked.history(at("ask"))]

    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("durability", DURABILITIES)
async def test_a_failure_is_resumed_in_every_durability(saver: PerdureSaver, mode: str, durability: str) -> None:
    async def scenario(saver: AnySaver, mode: str) -> Any:
        ran: list[int] = []
        failing = {1}
        graph = Runner(map_reduce(saver, ran, failing), mode)
        with pytest.raises(RuntimeError, match="item 1 failed"):
            await graph.invoke({"items": [0, 1]}, {**at("t"), "max_concurrency": 1}, durability=durability)
        stopped = await graph.state(at("t"))
        failing.clear()
        result = await graph.invoke(None, at("t"), durability=durability)
        assert ran == [0, 1, 1]
        assert result["answer"] == "item 0, item 1"
        return [stopped, await graph.history(at("t"))]

    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs


async def test_a_run_that_was_cancelled_goes_on(saver: PerdureSaver) -> None:
    """A node waits for ever and its run is cancelled, as when a client hangs up."""
    entered = asyncio.Event()
    waits = [True]

    async def wait(state: Work) -> dict[str, Any]:
        if waits.pop() if waits else False:
            entered.set()
            await asyncio.Event().wait()
        return {"found": ["waited"]}

    builder = StateGraph(Work)
    builder.add_node("first", lambda state: {"found": ["first"]})
    builder.add_node("wait", wait)
    builder.add_edge(START, "first")
    builder.add_edge("first", "wait")
    graph = builder.compile(checkpointer=saver)
    run = asyncio.create_task(graph.ainvoke({"found": []}, at("t")))
    await entered.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    stopped = await graph.aget_state(at("t"))
    assert (stopped.next, stopped.values["found"]) == (("wait",), ["first"])
    assert (await graph.ainvoke(None, at("t")))["found"] == ["first", "waited"]
    assert (await asyncio.to_thread(saver.store.ops.verify)).ok


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_that_nobody_reads_to_its_end_can_be_taken_up(saver: PerdureSaver, mode: str) -> None:
    graph = counting(saver, "a", "b", "c")
    if mode == "sync":
        for part in graph.stream({"total": 0, "log": []}, at("t"), stream_mode="updates", durability="sync"):
            if "b" in part:
                break
    else:
        parts = graph.astream({"total": 0, "log": []}, at("t"), stream_mode="updates", durability="sync")
        async with aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                if "b" in part:
                    break
    result = await Runner(graph, mode).invoke(None, at("t"))
    assert result == {"total": 3, "log": ["a", "b", "c"]}
    assert saver.store.ops.verify().ok
