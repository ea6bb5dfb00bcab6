"""diff, fork, rollback, prune and delete on threads of LangGraph's: what changed, and that graphs go on after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_runs_kit import Run
from graph_shapes import at, nested, say, shown, talking
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

import perdure
from perdure.langgraph import PerdureSaver

# --- diff


def test_diff_shows_messages_and_no_bookkeeping(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        graph.invoke(say("hello"), at("t"))
        graph.update_state(at("t"), {"messages": [AIMessage("Echo: HELLO", id="echo hello")]})
    shown = run("diff", "t", "@0", "@2")[1]
    assert shown.startswith(
        '+ messages = [human: hello, ai: Let me see [image] (tool calls: search(query="hello", n=3))'
    )
    changed = '~ messages[3].content: "Echo:\\nhello" -> "Echo: HELLO"\n'
    assert run("diff", "t", "@2", "@3")[1] == changed
    [change] = json.loads(run("diff", "t", "@2", "@3", "--json")[1])["changes"]
    assert (change["path"], change["kind"], change["after"]) == ("messages[3].content", "changed", "Echo: HELLO")


# --- fork, rollback, prune, delete, verify


def test_a_graph_goes_on_with_a_fork(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        nested(saver).invoke({"topic": "x"}, at("t"))
    assert run("thread", "fork", "t", "--name", "t2")[0] == 0
    assert shown(run, "t2")["interrupts"] == shown(run, "t")["interrupts"]
    assert shown(run, "t2")["namespaces"].keys() == shown(run, "t")["namespaces"].keys()
    with PerdureSaver("agent.db") as saver:
        graph = nested(saver)
        assert graph.invoke(Command(resume="yes"), at("t2"))["found"][-1] == "yes"
        assert graph.get_state(at("t")).next == ("sub",)
    assert run("thread", "delete", "t", "--yes")[0] == 0
    assert run("store", "verify")[0] == 0


def test_a_fork_of_the_past_knows_nothing_of_what_a_subgraph_did_later(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = nested(saver, ask=False, keeps=True)
        for topic in ("one", "two"):
            graph.invoke({"topic": topic}, at("t"))
    [then] = [one for one in map(json.loads, run("log", "t", "--json")[1].splitlines()) if one["note"] == "loop 2"]
    assert run("thread", "fork", "t", then["id"], "--name", "t2")[0] == 0
    for name, topic in (("t", "two"), ("t2", "one")):
        assert f'topic: "{topic}"' in run("show", name, shown(run, name)["namespaces"]["sub"])[1]
    with PerdureSaver("agent.db") as saver:
        graph = nested(saver, ask=False, keeps=True)
        assert "read two" not in graph.invoke({"topic": "three"}, at("t2"))["found"]
    assert run("store", "verify")[0] == 0


def test_a_graph_goes_on_from_where_it_was_rolled_back_to(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        for text in ("one", "two"):
            graph.invoke(say(text), at("t"))
    assert run("thread", "rollback", "t", "@2")[0] == 0
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        assert len(graph.get_state(at("t")).values["messages"]) == 4
        assert len(graph.invoke(say("three"), at("t"))["messages"]) == 8
    assert run("store", "verify")[0] == 0
    assert "human: two" not in run("show", "t")[1]


def check_prune(run: Run, url: str) -> None:
    store = ["--store", url]
    with PerdureSaver(url) as saver:
        graph = talking(saver)
        for text in ("one", "two", "three"):
            graph.invoke(say(text), at("t"))
        before = list(graph.get_state_history(at("t")))
    assert run("thread", "prune", "t", "--keep", "4", "--yes", *store)[0] == 0
    assert run("store", "verify", *store)[0] == 0
    with PerdureSaver(url) as saver:
        graph = talking(saver)
        assert [one.config for one in graph.get_state_history(at("t"))] == [one.config for one in before[:4]]
        assert len(graph.invoke(say("four"), at("t"))["messages"]) == 16
    assert run("store", "verify", *store)[0] == 0
    assert run("thread", "fork", "t", "head~3", "--name", "t2", *store)[0] == 0
    assert shown(run, "t2", *store)["checkpoint_id"] == before[0].config["configurable"]["checkpoint_id"]
    assert " = human: four\n" in run("diff", "t", "head~3", *store)[1]
    for name in ("t", "t2"):
        assert run("thread", "delete", name, "--yes", *store)[0] == 0
    assert run("store", "verify", *store)[0] == 0


def test_after_a_prune_the_rest_of_the_history_is_there(run: Run, where: Path) -> None:
    check_prune(run, "agent.db")


def test_the_same_on_postgresql(run: Run, postgres_url: str) -> None:
    check_prune(run, postgres_url)
    with PerdureSaver(postgres_url) as saver:
        nested(saver).invoke({"topic": "x"}, at("t"))
    assert shown(run, "t", "--store", postgres_url)["namespaces"]


# --- questions of effects in nodes


def test_an_approval_is_listed_and_answered_and_then_the_graph_is_invoked_again(run: Run, where: Path) -> None:
    @perdure.effect(name="book", approve=True, timeout_s=60)
    def book(item: str, key: perdure.IdempotencyKey) -> str:
        return f"booked {item}"

    builder: Any = StateGraph(MessagesState)
    builder.add_node("trip", lambda state: {"messages": [AIMessage(book("LH400"))]})
    builder.add_edge(START, "trip")
    with PerdureSaver("agent.db") as saver:
        builder.compile(checkpointer=saver).invoke(say("go"), at("t"))
    assert "May book(item='LH400') run?" in run("runs")[1]
    listed = run("questions")
    assert "May book(item='LH400') run?" in listed[1]
    assert "resumed by `perdure worker app.py:graph`, or when invoked again" in listed[2]
    [task] = map(json.loads, run("runs", "--all", "--json")[1].splitlines())
    assert task["waiting_for"]["text"] == "May book(item='LH400') run?"
    answered = run("answer", task["id"], "true")[1]
    assert answered.startswith('book(item="LH400"): true. Answered. A worker that was given the graph resumes it')
    assert "waiting for its graph to be run again" in run("runs", "--all")[1]
    assert "--all lists them" in run("runs")[2]
    with PerdureSaver("agent.db") as saver:
        result = builder.compile(checkpointer=saver).invoke(None, at("t"))
        assert result["messages"][-1].content == "booked LH400"
