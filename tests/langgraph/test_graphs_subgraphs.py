"""Graphs inside graphs: own state, shared messages, memory of their own, interrupts inside, two levels deep. What each
scenario saw must equal what it sees on LangGraph's own in-memory saver.
"""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import (
    MODES,
    AnyGraph,
    AnySaver,
    Inner,
    Outer,
    Results,
    Runner,
    Scenario,
    Topic,
    at,
    echo,
    human,
    inner,
    on_both,
    outer,
    reply,
    talking,
    texts,
)
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send

from perdure.langgraph import PerdureSaver


def nested(saver: AnySaver) -> AnyGraph:
    """A graph in a graph in a graph; the innermost asks."""
    builder = StateGraph(Inner, input_schema=Topic, output_schema=Results)
    builder.add_node("deep", inner(ask=True))
    builder.add_edge(START, "deep")
    return outer(saver, builder.compile())


async def a_subgraph_has_a_state_of_its_own(saver: AnySaver, mode: str) -> Any:
    graph = Runner(outer(saver, inner()), mode)
    result = await graph.invoke({"topic": "tea"}, at("t"))
    assert result == {"topic": "tea", "results": ["planned", "tea: 1 notes, yes"]}
    again = await graph.invoke({"topic": "rum"}, at("t"))
    assert again["results"][-1] == "rum: 1 notes, yes"  # its notes are new in each run
    history = await graph.history(at("t"))
    before = next(snapshot for snapshot in history if snapshot.next == ("sub0",))
    inside_config: Any = before.tasks[0].state
    namespace = inside_config["configurable"]["checkpoint_ns"]
    assert namespace.startswith("sub0:")
    inside = await graph.history(at("t", checkpoint_ns=namespace))
    assert [snapshot.values.get("notes") for snapshot in inside][:2] == [["read rum", "yes"], ["read rum"]]
    return [history, inside]


async def an_interrupt_inside_shows_the_whole_stack(saver: AnySaver, mode: str) -> Any:
    graph = Runner(outer(saver, inner(ask=True)), mode)
    await graph.invoke({"topic": "tea"}, at("t"))
    plain = await graph.state(at("t"))
    assert plain.next == ("sub0",)
    deep = await graph.state(at("t"), subgraphs=True)
    inside: Any = deep.tasks[0].state
    assert inside.values["notes"] == ["read tea"]
    assert inside.next == ("write",)
    assert [item.value for item in inside.interrupts] == ["write about tea?"]
    result = await graph.invoke(Command(resume="sure"), at("t"))
    assert result["results"] == ["planned", "tea: 1 notes, sure"]
    return [plain, deep, result, await graph.history(at("t"))]


async def the_state_inside_can_be_updated_while_it_waits(saver: AnySaver, mode: str) -> Any:
    graph = Runner(outer(saver, inner(ask=True)), mode)
    await graph.invoke({"topic": "tea"}, at("t"))
    inside: Any = (await graph.state(at("t"), subgraphs=True)).tasks[0].state
    await graph.update(inside.config, {"notes": ["by hand"]}, "read")
    result = await graph.invoke(Command(resume="now"), at("t"))
    assert result["results"][-1] == "tea: 2 notes, now"
    return [inside, result, await graph.history(at("t"))]


async def two_levels_deep(saver: AnySaver, mode: str) -> Any:
    graph = Runner(nested(saver), mode)
    await graph.invoke({"topic": "tea"}, at("t"))
    top = await graph.state(at("t"), subgraphs=True)
    middle: Any = top.tasks[0].state
    deepest: Any = middle.tasks[0].state
    assert deepest.config["configurable"]["checkpoint_ns"].count("|") == 1
    assert deepest.values["notes"] == ["read tea"]
    result = await graph.invoke(Command(resume="deep"), at("t"))
    assert result["results"] == ["planned", "tea: 1 notes, deep"]
    done = await graph.state(at("t"), subgraphs=True)
    assert done.next == ()
    return [top, result, done, await graph.history(at("t"))]


async def a_subgraph_with_a_memory_of_its_own(saver: AnySaver, mode: str) -> Any:
    """`checkpointer=True`: its namespace has no run in it, and it remembers between the parent's runs."""
    graph = Runner(outer(saver, inner(checkpointer=True)), mode)
    for topic in ("tea", "rum", "ale"):
        result = await graph.invoke({"topic": topic}, at("t"))
    assert result["results"][-1] == "ale: 5 notes, yes"
    inside = await graph.history(at("t", checkpoint_ns="sub0"))
    assert inside[0].values["notes"] == ["read tea", "yes", "read rum", "yes", "read ale", "yes"]
    other = await graph.invoke({"topic": "gin"}, at("other"))
    assert other["results"][-1] == "gin: 1 notes, yes"
    return [result, inside, await graph.history(at("t")), other]


async def replay_runs_the_subgraph_again(saver: AnySaver, mode: str) -> Any:
    graph = Runner(outer(saver, inner(), inner()), mode)
    await graph.invoke({"topic": "tea"}, at("t"))
    history = await graph.history(at("t"))
    before = next(snapshot for snapshot in history if snapshot.next == ("sub0",))
    result = await graph.invoke(None, before.config)
    assert result["results"] == ["planned", "tea: 1 notes, yes", "tea: 1 notes, yes"]
    old_end = await graph.state(history[0].config)
    assert old_end.values == result
    return [result, await graph.history(at("t"))]


async def many_subgraphs_at_once_each_with_an_interrupt(saver: AnySaver, mode: str) -> Any:
    builder = StateGraph(Outer)
    builder.add_node("sub", inner(ask=True))
    builder.add_conditional_edges(START, lambda state: [Send("sub", {"topic": topic}) for topic in "xyz"], ["sub"])
    graph = Runner(builder.compile(checkpointer=saver), mode)
    await graph.invoke({"topic": "all"}, at("t"))
    waiting = await graph.state(at("t"), subgraphs=True)
    assert sorted(item.value for item in waiting.interrupts) == [f"write about {topic}?" for topic in "xyz"]
    answers = {item.id: item.value[-2] for item in waiting.interrupts}
    result = await graph.invoke(Command(resume=answers), at("t"))
    assert result["results"] == [f"{topic}: 1 notes, {topic}" for topic in "xyz"]
    return [waiting, result, await graph.history(at("t"))]


async def a_subgraph_called_in_a_node_and_a_handover_to_the_parent(saver: AnySaver, mode: str) -> Any:
    def leave(state: Inner) -> Command[Any]:
        return Command(graph=Command.PARENT, goto="after", update={"results": ["left the subgraph"]})

    inside = StateGraph(Inner)
    inside.add_node("leave", leave)
    inside.add_edge(START, "leave")
    called = inner()
    builder = StateGraph(Outer)
    builder.add_node("call", lambda state: {"results": called.invoke({"topic": state["topic"]})["results"]})
    builder.add_node("sub", inside.compile(), destinations=("after",))
    builder.add_node("after", lambda state: {"results": ["after"]})
    builder.add_edge(START, "call")
    builder.add_edge("call", "sub")
    graph = Runner(builder.compile(checkpointer=saver), mode)
    result = await graph.invoke({"topic": "tea"}, at("t"))
    assert result["results"] == ["tea: 1 notes, yes", "left the subgraph", "after"]
    return [result, await graph.history(at("t"))]


def sharing(saver: AnySaver) -> AnyGraph:
    """A parent and a subgraph with one list of messages between them."""
    builder = StateGraph(MessagesState)
    builder.add_node("before", lambda state: reply(state, "thinking"))
    builder.add_node("sub", talking(None))
    builder.add_node("after", echo)
    builder.add_edge(START, "before")
    builder.add_edge("before", "sub")
    builder.add_edge("sub", "after")
    return builder.compile(checkpointer=saver)


async def messages_are_shared_with_the_subgraph(saver: AnySaver, mode: str) -> Any:
    graph = Runner(sharing(saver), mode)
    for text in ("one", "two"):
        result = await graph.invoke({"messages": [human(text)]}, at("t"))
    turn = ["thinking", "Echo: thinking", "Echo: Echo: thinking"]
    assert texts(result) == ["one", *turn, "two", *turn]
    history = await graph.history(at("t"))
    before = next(snapshot for snapshot in history if snapshot.next == ("sub",))
    config: Any = before.tasks[0].state
    return [result, history, await graph.history(config)]


SCENARIOS: list[Scenario] = [
    a_subgraph_has_a_state_of_its_own,
    an_interrupt_inside_shows_the_whole_stack,
    the_state_inside_can_be_updated_while_it_waits,
    two_levels_deep,
    a_subgraph_with_a_memory_of_its_own,
    replay_runs_the_subgraph_again,
    many_subgraphs_at_once_each_with_an_interrupt,
    a_subgraph_called_in_a_node_and_a_handover_to_the_parent,
    messages_are_shared_with_the_subgraph,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_graphs_in_graphs_run_as_in_memory(scenario: Scenario, saver: PerdureSaver, mode: str) -> None:
    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs
