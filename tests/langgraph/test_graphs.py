"""Graphs on a PerdureSaver: threads, histories, replays, updates. Each scenario is run on LangGraph's own in-memory
saver too, and what it saw must be equal but for ids and times.
"""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import (
    MODES,
    AnySaver,
    Runner,
    Scenario,
    at,
    counting,
    human,
    id_of,
    on_both,
    talking,
    texts,
)
from langchain_core.messages import RemoveMessage
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Overwrite, StateSnapshot, StateUpdate

from graph_kit import Count  # isort: skip
from perdure.langgraph import PerdureSaver

SOME = {"total": 0, "log": []}


def ids(history: list[StateSnapshot]) -> list[str | None]:
    return [id_of(snapshot.config) for snapshot in history]


async def threads_are_separate(saver: AnySaver, mode: str) -> Any:
    graph = Runner(talking(saver), mode)
    for name in ("alice", "bob", 7):
        await graph.invoke({"messages": [human(f"I am {name}")]}, at(name))
    await graph.invoke({"messages": [human("again")]}, at("alice"))
    alice, bob, seven = [await graph.state(at(name)) for name in ("alice", "bob", "7")]
    assert texts(alice.values) == ["I am alice", "Echo: I am alice", "again", "Echo: again"]
    assert texts(bob.values) == ["I am bob", "Echo: I am bob"]
    assert texts(seven.values) == ["I am 7", "Echo: I am 7"]
    nobody = await graph.state(at("nobody"))
    assert nobody.values == {}
    assert nobody.metadata is None
    assert await graph.history(at("nobody")) == []
    return [alice, bob, seven, nobody]


async def history_is_complete_and_newest_first(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver, "a", "b", "c"), mode)
    await graph.invoke({"total": 10, "log": ["in"]}, at("t"))
    await graph.invoke({"total": 100, "log": ["more"]}, at("t"))
    history = await graph.history(at("t"))
    steps = [(snapshot.metadata or {}).get("step") for snapshot in history]
    assert steps == [8, 7, 6, 5, 4, 3, 2, 1, 0, -1]
    assert [snapshot.next for snapshot in history[:5]] == [(), ("c",), ("b",), ("a",), ("__start__",)]
    assert [snapshot.values.get("total") for snapshot in history[:5]] == [116, 115, 114, 113, 13]
    parents = [
        (snapshot.parent_config or {"configurable": {}})["configurable"].get("checkpoint_id") for snapshot in history
    ]
    assert parents == [*ids(history)[1:], None]
    assert ids(history) == sorted([str(found) for found in ids(history)], reverse=True)
    assert [task.result for task in history[1].tasks] == [{"total": 1, "log": ["c"]}]
    newest = await graph.state(at("t"))
    assert newest == history[0]
    for snapshot in history:
        assert await graph.state(snapshot.config) == snapshot
    return history


async def history_takes_limit_before_and_filter(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver), mode)
    for _ in range(3):
        await graph.invoke({"total": 1, "log": []}, at("t"))
    history = await graph.history(at("t"))
    two = await graph.history(at("t"), limit=2)
    assert two == history[:2]
    older = await graph.history(at("t"), before=history[3].config)
    assert older == history[4:]
    inputs = await graph.history(at("t"), filter={"source": "input"})
    assert [(snapshot.metadata or {})["source"] for snapshot in inputs] == ["input"] * 3
    one = await graph.history(at("t"), filter={"source": "loop", "step": 4}, limit=5)
    assert len(one) == 1
    none = await graph.history(at("t"), filter={"source": "nothing"})
    assert none == []
    return [history, two, older, inputs, one]


async def replay_goes_on_from_an_old_checkpoint(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver, "a", "b", "c"), mode)
    await graph.invoke(SOME, at("t"))
    before = await graph.history(at("t"))
    after_a = next(snapshot for snapshot in before if snapshot.next == ("b",))
    result = await graph.invoke(None, after_a.config)
    assert result == {"total": 3, "log": ["a", "b", "c"]}
    after = await graph.history(at("t"))
    assert ids(after)[-len(before) :] == ids(before)
    assert len(after) > len(before)
    assert ids(await graph.history(at("t"), limit=1)) == [
        (await graph.state(at("t"))).config["configurable"]["checkpoint_id"]
    ]
    return [before, result, after]


async def replay_with_new_input_makes_a_branch(saver: AnySaver, mode: str) -> Any:
    graph = Runner(talking(saver), mode)
    for text in ("one", "two", "three"):
        await graph.invoke({"messages": [human(text)]}, at("t"))
    history = await graph.history(at("t"))
    after_one = [snapshot for snapshot in history if snapshot.next == ()][-1]
    result = await graph.invoke({"messages": [human("other")]}, after_one.config)
    assert texts(result) == ["one", "Echo: one", "other", "Echo: other"]
    newest = await graph.state(at("t"))
    assert texts(newest.values) == texts(result)
    old_end = await graph.state(history[0].config)
    assert texts(old_end.values) == ["one", "Echo: one", "two", "Echo: two", "three", "Echo: three"]
    return [newest, old_end, await graph.history(at("t"))]


async def replay_from_the_very_first_checkpoint(saver: AnySaver, mode: str) -> Any:
    graph = Runner(talking(saver), mode)
    await graph.invoke({"messages": [human("hi")]}, at("t"))
    await graph.invoke({"messages": [human("bye")]}, at("t"))
    first = (await graph.history(at("t")))[-1]
    assert first.parent_config is None
    assert first.next == ("__start__",)
    result = await graph.invoke(None, first.config)
    assert texts(result) == ["hi", "Echo: hi"]
    return [result, await graph.history(at("t"))]


async def update_state_as_a_node(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver, "a", "b", "c", interrupt_before=["b"]), mode)
    await graph.invoke(SOME, at("t"))
    assert (await graph.state(at("t"))).next == ("b",)
    config = await graph.update(at("t"), {"total": 50, "log": ["human"]}, "b")
    updated = await graph.state(at("t"))
    assert id_of(updated.config) == id_of(config)
    assert updated.next == ("c",)
    assert (updated.metadata or {})["source"] == "update"
    result = await graph.invoke(None, at("t"))
    assert result == {"total": 52, "log": ["a", "human", "c"]}
    return [updated, result, await graph.history(at("t"))]


async def update_state_at_an_old_checkpoint_forks(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver, "a", "b"), mode)
    await graph.invoke(SOME, at("t"))
    before = await graph.history(at("t"))
    after_a = next(snapshot for snapshot in before if snapshot.next == ("b",))
    config = await graph.update(after_a.config, {"total": 1000, "log": ["fork"]}, "a")
    forked = await graph.state(config)
    assert forked.values == {"total": 1001, "log": ["a", "fork"]}
    assert (forked.parent_config or {})["configurable"]["checkpoint_id"] == after_a.config["configurable"][
        "checkpoint_id"
    ]
    result = await graph.invoke(None, config)
    assert result == {"total": 1002, "log": ["a", "fork", "b"]}
    old_end = await graph.state(before[0].config)
    assert old_end.values == {"total": 2, "log": ["a", "b"]}
    return [forked, old_end, await graph.history(at("t"))]


async def update_state_starts_copies_and_ends_threads(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver, "a", "b"), mode)
    await graph.update(at("new"), {"total": 5, "log": ["seed"]}, START)
    assert (await graph.state(at("new"))).next == ("a",)
    result = await graph.invoke(None, at("new"))
    assert result == {"total": 7, "log": ["seed", "a", "b"]}
    history = await graph.history(at("new"))
    copied = await graph.update(next(s for s in history if s.next == ("b",)).config, None, "__copy__")
    assert (await graph.state(copied)).next == ("b",)
    await graph.update(at("new"), None, END)
    ended = await graph.state(at("new"))
    assert ended.next == ()
    return [result, ended, await graph.history(at("new"))]


async def bulk_update_state_imports_a_run(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver, "a", "b", "c"), mode)
    await graph.bulk_update(
        at("t"),
        [
            [StateUpdate({"total": 1, "log": ["in"]}, START)],
            [StateUpdate({"total": 2, "log": ["was a"]}, "a")],
            [StateUpdate({"total": 3, "log": ["was b"]}, "b"), StateUpdate({"total": 4, "log": ["too"]}, "b")],
        ],
    )
    state = await graph.state(at("t"))
    assert state.values == {"total": 10, "log": ["in", "was a", "was b", "too"]}
    assert state.next == ("c",)
    result = await graph.invoke(None, at("t"))
    assert result["log"][-1] == "c"
    return [state, result, await graph.history(at("t"))]


async def messages_are_replaced_and_removed(saver: AnySaver, mode: str) -> Any:
    graph = Runner(talking(saver), mode)
    for number in range(4):
        await graph.invoke({"messages": [human(f"m{number}", f"id{number}")]}, at("t"))
    await graph.update(at("t"), {"messages": [RemoveMessage(id="id0"), human("changed", "id2")]})
    some = await graph.state(at("t"))
    assert texts(some.values)[:4] == ["Echo: m0", "m1", "Echo: m1", "changed"]
    await graph.update(at("t"), {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), human("fresh")]})
    fresh = await graph.state(at("t"))
    assert texts(fresh.values) == ["fresh"]
    return await graph.history(at("t"))


def looping(saver: AnySaver, turns: int = 6) -> Any:
    def turn(state: Count) -> Command[Any]:
        if state["total"] >= turns:
            return Command(update={"log": Overwrite(["over"])}, goto=END)
        return Command(update={"total": 1, "log": [f"turn {state['total']}"]}, goto="turn")

    builder = StateGraph(Count)
    builder.add_node("turn", turn, destinations=("turn", END))
    builder.add_edge(START, "turn")
    return builder.compile(checkpointer=saver)


async def a_loop_stopped_by_the_limit_goes_on(saver: AnySaver, mode: str) -> Any:
    graph = Runner(looping(saver), mode)
    with pytest.raises(GraphRecursionError):
        await graph.invoke(SOME, {**at("t"), "recursion_limit": 4})
    stopped = await graph.state(at("t"))
    assert stopped.next == ("turn",)
    assert stopped.values["total"] == 4
    result = await graph.invoke(None, at("t"))
    assert result == {"total": 6, "log": ["over"]}
    return [stopped, await graph.history(at("t"))]


async def streamed_checkpoints_are_those_stored(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver), mode)
    streamed = await graph.stream(SOME, at("t"), stream_mode="checkpoints")
    history = await graph.history(at("t"))
    assert [part["values"] for part in streamed] == [snapshot.values for snapshot in reversed(history)]
    return [streamed, history]


async def a_long_history_is_read_in_pages(saver: AnySaver, mode: str) -> Any:
    """More checkpoints than a page holds, and a second thread in between."""
    graph = Runner(looping(saver, turns=160), mode)
    for name in ("other", "t"):
        await graph.invoke(SOME, {**at(name), "recursion_limit": 500})
    history = await graph.history(at("t"))
    assert [snapshot.values["total"] for snapshot in history] == [160, *range(160, -1, -1), 0]
    assert await graph.history(at("t"), limit=130) == history[:130]
    assert await graph.history(at("t"), before=history[99].config) == history[100:]
    assert await graph.history(at("t"), before=history[9].config, limit=120) == history[10:130]
    assert await graph.history(at("t"), filter={"step": 3}) == [history[-5]]
    return [[snapshot.config, snapshot.parent_config, snapshot.metadata] for snapshot in history]


SCENARIOS: list[Scenario] = [
    threads_are_separate,
    history_is_complete_and_newest_first,
    history_takes_limit_before_and_filter,
    replay_goes_on_from_an_old_checkpoint,
    replay_with_new_input_makes_a_branch,
    replay_from_the_very_first_checkpoint,
    update_state_as_a_node,
    update_state_at_an_old_checkpoint_forks,
    update_state_starts_copies_and_ends_threads,
    bulk_update_state_imports_a_run,
    messages_are_replaced_and_removed,
    a_loop_stopped_by_the_limit_goes_on,
    streamed_checkpoints_are_those_stored,
    a_long_history_is_read_in_pages,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_a_graph_runs_as_on_the_saver_in_memory(scenario: Scenario, saver: PerdureSaver, mode: str) -> None:
    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs


async def test_blocking_and_awaited_calls_mix_on_one_thread(saver: PerdureSaver) -> None:
    graph = counting(saver)
    blocking, awaited = Runner(graph, "sync"), Runner(graph, "async")
    await blocking.invoke(SOME, at("t"))
    await awaited.invoke({"total": 10, "log": []}, at("t"))
    await blocking.update(at("t"), {"total": 100, "log": ["by hand"]}, "b")
    assert (await awaited.state(at("t"))).values == {"total": 114, "log": ["a", "b", "a", "b", "by hand"]}
    assert await awaited.history(at("t")) == await blocking.history(at("t"))
