"""`perdure show` on threads of LangGraph's: real graphs, whose own `get_state` says what must be shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
from cli_runs_kit import Run
from graph_shapes import (
    Shape,
    asking,
    asking_again,
    at,
    functional,
    nested,
    say,
    sending,
    shown,
    talking,
)
from langchain_core.messages import HumanMessage
from langgraph.types import StateSnapshot

import perdure
from perdure.langgraph import PerdureSaver


@pytest.mark.parametrize("shape", [asking, asking_again, sending, functional], ids=lambda shape: shape.__name__)
def test_open_interrupts_and_parents_are_what_the_graph_has(run: Run, where: Path, shape: Shape) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = shape(saver)
        now = graph.get_state(at("t"))
        history = {
            snapshot.config["configurable"]["checkpoint_id"]: snapshot for snapshot in graph.get_state_history(at("t"))
        }
    newest = shown(run, "t")
    assert newest["checkpoint_id"] == now.config["configurable"]["checkpoint_id"]
    assert now.metadata is not None
    assert tuple(newest["next"]) == now.next or shape is functional  # no checkpoint names an entrypoint
    assert newest["metadata"].items() >= {name: now.metadata[name] for name in ("step", "source")}.items()
    assert [(one["id"], one["value"]) for one in newest["interrupts"]] == [
        (one.id, one.value) for one in now.interrupts
    ]
    records = [json.loads(text)["id"] for text in run("log", "t", "--json")[1].splitlines()]
    assert len(records) == len(history)
    for record in records[1:]:
        found = shown(run, "t", record)
        snapshot = history[found["checkpoint_id"]]
        parent = (snapshot.parent_config or {}).get("configurable", {}).get("checkpoint_id")
        assert found["parent_id"] == parent
        assert found["interrupts"] == []


def test_show_prints_messages_as_messages_and_cuts_what_is_long(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        graph.invoke(say("hello"), at("t"))
        for number in range(8):
            graph.invoke(say(f"turn {number}"), at("long"))
    code, out, err = run("show", "t")
    head, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head.endswith("head  loop 1")
    assert lines[:-1] == [
        "messages:",
        "  human: hello",
        '  ai: Let me see [image] (tool calls: search(query="hello", n=3))',
        "  tool(search): " + "x" * 145 + "…",
        "  ai: Echo:\\nhello",
    ]
    assert "next: talk\npending write messages of talk:\n  ai: Let me see" in run("show", "t", "@1")[1]
    assert "  … 12 earlier messages: --json shows them\n  human: turn 3\n" in run("show", "long")[1]


def test_show_lists_pending_writes_and_open_interrupts(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        sending(saver)
    out, found = run("show", "t")[1], shown(run, "t")
    assert {"channel": "found", "value": ["1"]}.items() <= found["pending_writes"][0].items()
    assert {write["channel"] for write in found["pending_writes"]} == {"found", "branch:to:end"}
    [raised] = found["interrupts"]
    assert f'open interrupt {raised["id"]}: "two?"\npending write found of work: ["1"]\n' in out


def test_show_names_the_newest_checkpoint_of_each_namespace(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = nested(saver)
        graph.invoke({"topic": "x"}, at("t"))
        inner = graph.get_state(at("t"), subgraphs=True).tasks[0].state
        assert isinstance(inner, StateSnapshot)
    [(name, newest)] = shown(run, "t")["namespaces"].items()
    assert name.startswith("sub:")
    assert f"namespace {name}: newest checkpoint {newest}\n" in run("show", "t")[1]
    found = shown(run, "t", newest)
    assert (found["namespace"], found["checkpoint_id"]) == (name, inner.config["configurable"]["checkpoint_id"])


def test_a_damaged_write_is_left_out_and_said(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        asking(saver)
    connection = apsw.Connection("agent.db")
    connection.execute("UPDATE write SET key = 'forged' WHERE key = '__interrupt__'")
    connection.close()
    code, out, err = run("show", "t")
    assert code == 0
    assert "items: [1, 2, 3]" in out
    assert "pending writes are left out" in err


def test_a_state_that_only_looks_like_a_checkpoint_is_shown_all_the_same(run: Run, where: Path) -> None:
    books: list[dict[str, Any]] = [
        {},
        {"id": 5, "channel_versions": {1: 2}, "versions_seen": [1], "metadata": "?"},
        {"channel_versions": {"join:a+b:c": 1, "branch:x": "2"}, "versions_seen": {"x": 1, "c": {"join:a+b:c": "1"}}},
    ]
    with perdure.open("agent.db") as store:
        for book in books:
            state = {"__line__": book, 5: "x", "__pregel_tasks": [1], "join:a+b:c": {1, 2}, "branch:x": "\x1b[2J"}
            store.thread("t").save(state)
            code, out, _ = run("show", "t")
            assert code == 0
            assert '5: "x"\n' in out
            assert "\x1b" not in out
            assert run("show", "t", "--json")[0] == 0
    assert run("diff", "t", "@0")[0] == 0


def test_show_needs_no_langgraph(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        talking(saver).invoke(say("hello"), at("talk"))
        sending(saver)
    without = "import sys; sys.modules['langgraph'] = sys.modules['langchain_core'] = None; "
    code = without + "from perdure.cli import main; sys.exit(sum(main(line.split()) for line in sys.argv[1:]))"
    lines = ("show talk", "show t --json", "diff talk @0", "log t")
    done = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(run(*line.split())[1] for line in lines)


def test_langgraphs_own_id_names_a_checkpoint(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        graph.invoke({"messages": [HumanMessage("hello")]}, at("t"))
        ids = [one.config["configurable"]["checkpoint_id"] for one in graph.get_state_history(at("t"))]
    for id_ in ids:
        code, out, _ = run("show", "t", id_, "--store", "agent.db")
        assert (code, id_ in out) == (0, True)
    code, _, err = run("show", "t", "1f1e1546-0222-6663-8006-088b6041b473", "--store", "agent.db")
    assert code != 0
    assert "checkpoint_id" in err


def test_an_interrupt_is_answered_and_resumed_from_the_command_line(run: Run, where: Path) -> None:
    (where / "asks.py").write_text(_ASKS)
    subprocess.run([sys.executable, "-c", "import asks; asks.begin()"], check=True, timeout=60)
    questions = run("questions")
    assert questions[1].splitlines()[1].split()[0] == "trip-1"
    assert '{"question": "Which flight?", "price": 90}' in questions[1]
    assert "`perdure worker app.py:graph`" in questions[2]
    shown_ = run("show", "trip-1")[1]
    assert "\nnext: book\nopen interrupt " in shown_
    assert run("answer", "trip-1", "LH400", "--who", "maria")[1].startswith("Answered. A worker that was given")
    assert "interrupt answered by maria" in run("show", "trip-1")[1]
    refused = run("answer", "trip-1", "LH500")
    assert (refused[0], "thread 'trip-1' has no open question" in refused[2]) == (2, True)
    assert run("answer", "trip-2", "LH500")[2] == "perdure: there is no run 'trip-2'; `perdure runs` lists them\n"
    worker = subprocess.run(
        [sys.executable, "-m", "perdure", "worker", "asks.py:graph", "--once", "--where", "user=ann"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (worker.returncode, worker.stdout) == (0, "1 resumed\n"), worker.stderr
    assert "serving graph LangGraph" in worker.stderr
    assert run("show", "trip-1")[1].splitlines()[1] == 'said: ["LH400"]'
    assert "leave out --store" in run("worker", "asks.py:graph", "--store", "agent.db")[2]


_ASKS = """
import operator
from typing import Annotated, TypedDict
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from perdure.langgraph import PerdureSaver

class Said(TypedDict):
    said: Annotated[list, operator.add]

builder = StateGraph(Said)
builder.add_node("book", lambda state: {"said": [interrupt({"question": "Which flight?", "price": 90})]})
builder.add_edge(START, "book")
graph = builder.compile(checkpointer=PerdureSaver("agent.db"))

def begin():
    graph.invoke({"said": []}, {"configurable": {"thread_id": "trip-1", "user": "ann"}})
"""
