"""A graph is a member of a team: it goes on after a crash, and goes back with its team."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt

import perdure
from perdure.errors import UsageError
from perdure.langgraph import PerdureSaver, advance

sent: list[str] = []
broken: list[bool] = []


@perdure.effect(name="graphs_in_teams.post")
def post(text: str) -> str:
    sent.append(text)
    return f"posted {text}"


def write(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(post(str(state["messages"][-1].content)))]}


def check(state: MessagesState) -> dict[str, Any]:
    if broken:
        broken.pop()
        raise RuntimeError("no connection")
    return {"messages": [AIMessage(f"{len(state['messages'])} messages")]}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path / "a.db")) as opened:
        yield opened


@pytest.fixture
def team(store: perdure.Store) -> Any:
    sent.clear()
    builder = StateGraph(MessagesState)
    builder.add_node("write", write)
    builder.add_node("check", check)
    builder.add_edge(START, "write")
    builder.add_edge("write", "check")
    builder.add_edge("check", END)
    graph = builder.compile(checkpointer=PerdureSaver(store))
    team = store.team("press")
    team.agent(graph, name="writer", attempts=2)

    @team.agent
    def editor(state: Any, message: Any) -> None:
        values = perdure.call("writer", {"messages": [HumanMessage(message)]})
        state["last"] = values["messages"][-1].content

    with pytest.raises(UsageError, match="checkpointer=PerdureSaver"):
        team.agent(builder.compile(), name="other")
    with pytest.raises(UsageError, match="needs a name"):
        team.agent(graph)
    with pytest.raises(UsageError, match="cannot be an agent"):
        team.agent(5)
    return team


def last(team: Any) -> Any:
    return team._whole.thread("run:press/editor").load().state.get("last")


def test_a_graph_answers_and_remembers(team: Any) -> None:
    for text in ("one", "two"):
        team.send("editor", text)
    team.work(until_idle=True)
    assert (last(team), sent) == ("5 messages", ["one", "two"])


def test_a_graph_that_interrupts_is_refused_and_its_handler_asks_instead(store: perdure.Store) -> None:
    def review(state: MessagesState) -> dict[str, Any]:
        asked = state["messages"][-1].content == "unasked"
        return {"messages": [AIMessage(interrupt("publish?") if asked else "reviewed")]}

    builder = StateGraph(MessagesState)
    builder.add_node("review", review)
    builder.add_edge(START, "review")
    graph = builder.compile(checkpointer=PerdureSaver(store))
    team = store.team("press")

    @team.agent(policy="dead_letter")
    def reviewer(state: Any, message: Any) -> None:
        answer = message if message == "unasked" else perdure.ask(f"{message}: publish?")
        values = advance(graph, state, {"messages": [HumanMessage(f"{answer}")]})
        state["last"] = values["messages"][-1].content

    for text in ("unasked", "one"):
        team.send("reviewer", text)
    team.work(until_idle=True)
    assert "ask with perdure.ask() in a handler of your own" in team.dead()[0].error
    store.answer("press/reviewer", "yes")
    team.work(until_idle=True)
    assert store.thread("run:press/reviewer").load().state["last"] == "reviewed"


def test_a_graph_that_failed_goes_on_where_it_stopped(team: Any) -> None:
    broken.append(True)
    team.send("editor", "one")
    team.work(until_idle=True)
    assert last(team) is None
    from team_kit import due_now

    due_now(team._whole)
    team.work(until_idle=True)
    assert (last(team), sent) == ("2 messages", ["one"])


def test_a_graph_goes_back_with_its_team(team: Any) -> None:
    team.send("editor", "one")
    team.work(until_idle=True)
    snap = team.snapshot("cut")
    team.send("editor", "two")
    team.work(until_idle=True)
    team.restore(snap, keys="same")
    team.send("editor", "three")
    team.work(until_idle=True)
    assert last(team) == "5 messages"  # of one and three
    assert sent == ["one", "two", "three"]
