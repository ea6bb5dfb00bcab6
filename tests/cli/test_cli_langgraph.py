"""`perdure show` on threads of LangGraph's: real graphs, whose own `get_state` says what must be shown."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

import apsw
import pytest
from cli_runs_kit import Run
from graph_shapes import (
    SHAPES,
    AnyGraph,
    Shape,
    asking,
    asks,
    at,
    built,
    functional,
    nested,
    ran,
    say,
    sending,
    shown,
    talk,
    talking,
)
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import _messages_delta_reducer
from langgraph.types import StateSnapshot, interrupt

import perdure
from perdure.langgraph import PerdureSaver

NO_TASK = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_what_comes_next_is_what_the_graph_says_at_every_checkpoint(run: Run, where: Path, shape: Shape) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = shape(saver)
        now = graph.get_state(at("t"))
        history = {
            snapshot.config["configurable"]["checkpoint_id"]: snapshot for snapshot in graph.get_state_history(at("t"))
        }
    newest = shown(run, "t")
    assert sorted(newest["next"]) == sorted(now.next)
    assert newest["checkpoint_id"] == now.config["configurable"]["checkpoint_id"]
    assert now.metadata is not None
    assert (newest["step"], newest["source"]) == (now.metadata["step"], now.metadata["source"])
    waiting = [one for one in newest["interrupts"] if one["open"]]
    assert [(one["id"], one["value"]) for one in waiting] == [(one.id, one.value) for one in now.interrupts]
    failed = {one["node"]: one["error"] for one in newest["tasks"] if one["status"] == "failed"}
    assert failed == {one.name: str(one.error) for one in now.tasks if one.error}
    records = [json.loads(text)["id"] for text in run("log", "t", "--json")[1].splitlines()]
    assert len(records) == len(history)
    for record in records[1:]:
        found = shown(run, "t", record)
        snapshot = history[found["checkpoint_id"]]
        assert sorted(found["next"]) == sorted(snapshot.next)
        parent = (snapshot.parent_config or {}).get("configurable", {}).get("checkpoint_id")
        assert found["parent_id"] == parent
        assert [one for one in found["interrupts"] if one["open"]] == []
        ids = {one.id for one in snapshot.tasks}
        assert {one["id"] for one in found["tasks"] if "call" not in one["name"]} - {None} - {NO_TASK} <= ids


def test_show_prints_messages_as_messages_and_where_the_run_stands(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        talking(saver).invoke(say("hello"), at("t"))
    code, out, err = run("show", "t")
    head, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head.endswith("head  loop 1")
    assert lines[:4] == [
        "messages:",
        "  human: hello",
        '  ai: Let me see [image] (tool calls: search(query="hello", n=3))',
        "  tool(search): " + "x" * 145 + "…",
    ]
    assert lines[4] == "  ai: Echo:\\nhello"
    assert lines[5:8] == ["", "next: (nothing: the run has ended)", "pending writes: 0"]
    assert lines[8].endswith("(step 1, loop)")
    assert lines[9].startswith("parent: ")
    assert "__line__" not in out
    assert '"__line__"' in run("show", "t", "--all")[1]
    assert run("show", "t", "--path", "messages[0].content")[1].endswith('"hello"\n')
    assert run("show", "t", "@0")[1].splitlines()[1:4] == ["__start__:", "  messages:", "    human: hello"]
    assert "  talk: done\n    messages:\n      ai: Let me see" in run("show", "t", "@1")[1]


def test_show_cuts_a_long_conversation_and_a_long_value(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        for number in range(8):
            graph.invoke(say(f"turn {number}"), at("t"))
    out = run("show", "t")[1]
    assert "  … 12 earlier messages: --all shows them\n  human: turn 3\n" in out
    assert '"turn 0"' in run("show", "t", "--all")[1]


def test_show_lists_tasks_and_what_they_wrote(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        sending(saver)
    out = run("show", "t")[1]
    assert "next: work\n" in out
    assert '  work (send 0): done\n    found: ["1"]\n    -> end\n  work (send 1): interrupted\n' in out
    found = shown(run, "t")
    assert [one["status"] for one in found["tasks"]] == ["done", "interrupted", "done"]
    assert found["tasks"][0]["writes"] == [
        {"channel": "found", "value": ["1"]},
        {"channel": "branch:to:end", "value": None},
    ]
    assert {write["channel"] for write in found["pending_writes"]} == {"found", "branch:to:end", "__interrupt__"}
    [raised] = found["interrupts"]
    assert f'open interrupts:\n  {raised["id"]}  work (send 1): "two?"\n' in out


def test_show_tells_calls_of_tasks_from_their_caller(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        functional(saver)
    found = shown(run, "t")
    assert [(one["name"], one["status"]) for one in found["tasks"]] == [
        ("flow", "interrupted"),
        ("flow (call 0)", "done"),
        ("flow (call 1)", "interrupted"),
    ]
    assert len(found["interrupts"]) == 1
    assert "    returned: 2\n" in run("show", "t")[1]


def test_show_says_what_a_delta_channel_or_a_serializer_hides(run: Run, where: Path) -> None:
    class Long(TypedDict):
        messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=3)]

    builder = StateGraph(Long)
    builder.add_node("talk", talk, input_schema=Long)
    builder.add_edge(START, "talk")
    with PerdureSaver("agent.db") as saver:
        graph: AnyGraph = builder.compile(checkpointer=saver)
        for text in ("turn 0", "turn 1"):
            graph.invoke(say(text), at("t0"))
    pages = [run("show", "t0", json.loads(text)["id"])[1] for text in run("log", "t0", "--json")[1].splitlines()]
    assert any("messages: kept as differences by LangGraph" in page for page in pages)
    assert any("messages:\n  human: turn 0\n" in page for page in pages)
    with PerdureSaver("agent.db", serde=JsonPlusSerializer()) as saver:
        ran(built(saver, {START: "ask", "ask": []}, ask=asks))
    code, out, _ = run("show", "t")
    assert code == 0
    assert "only that can read them" in out
    assert "next: ask" in out


def test_show_lists_namespaces_and_shows_one(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = nested(saver)
        graph.invoke({"topic": "x"}, at("t"))
        inner = graph.get_state(at("t"), subgraphs=True).tasks[0].state
        assert isinstance(inner, StateSnapshot)
    [space] = shown(run, "t")["namespaces"]
    assert space["name"].startswith("sub:")
    assert space["checkpoints"] == 3
    assert f"namespaces:\n  {space['name']}  3 checkpoints\n" in run("show", "t")[1]
    for name in (space["name"], "sub"):
        found = shown(run, "t", "--namespace", name)
        assert found["namespace"] == space["name"]
        assert found["checkpoint_id"] == inner.config["configurable"]["checkpoint_id"]
        assert (found["next"], found["is_newest"]) == (["ask"], True)
    assert shown(run, "t", "head~1", "--namespace", "sub")["next"] == ["read"]
    assert shown(run, "t", "@0", "--namespace", "sub")["next"] == ["__start__"]
    code, _, err = run("show", "t", "--namespace", "other")
    assert (code, err.count("\n")) == (3, 1)
    assert "no namespace 'other'" in err


def test_a_damaged_write_is_left_out_and_said(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        asking(saver)
    connection = apsw.Connection("agent.db")
    connection.execute("UPDATE write SET channel = 'forged' WHERE channel = '__interrupt__'")
    connection.close()
    code, out, err = run("show", "t")
    assert code == 0
    assert "items: [1, 2, 3]" in out
    assert "next: ask" in out
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
    code = without + "from perdure.cli import main; sys.exit(main())"
    for argv in (["show", "talk"], ["show", "t", "--json"], ["diff", "talk", "@0"], ["log", "t"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == run(*argv)[1]


# --- the page


def search(state: MessagesState) -> dict[str, Any]:
    call = {"name": "search", "args": {"to": "NYC"}, "id": "call-1"}
    found = ToolMessage("AF 22, DL 405", id="3", name="search", tool_call_id="call-1")
    return {"messages": [AIMessage("Let me look", id="2", tool_calls=[call]), found]}


def book(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"Booked {interrupt({'question': 'Which one?'})}", id="4")]}


def test_the_page_shows_what_really_comes_out(run: Run, where: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    section = page.partition("## LangGraph's threads\n")[2].partition("\n## ")[0]
    examples = re.findall(r"^\$ (.+)\n((?:(?!\$ |```).*\n)*)", section, flags=re.MULTILINE)
    builder = StateGraph(MessagesState)
    builder.add_sequence([search, book])
    builder.add_edge(START, "search")
    with PerdureSaver("agent.db") as saver:
        builder.compile(checkpointer=saver).invoke(
            {"messages": [HumanMessage("To New York, please", id="1")]}, at("alice-001")
        )
    assert len(examples) == 2
    for command, expected in examples:
        assert masked(run(*shlex.split(command)[1:])[1]) == masked(expected)


def masked(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32}\b|\b0[0-9a-z]{12}\b", "<id>", text)
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d+ B", "<time or size>", text)


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
