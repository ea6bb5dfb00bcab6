"""diff, fork, rollback, prune and delete on threads of LangGraph's: what changed, and that graphs go on after it."""

from __future__ import annotations

import json
from pathlib import Path

from cli_runs_kit import Run
from graph_shapes import Work, at, nested, say, shown, talking
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Command

import perdure
from perdure.langgraph import PerdureSaver

# --- diff


def test_diff_shows_messages_and_no_bookkeeping(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        graph = talking(saver)
        graph.invoke(say("hello"), at("t"))
        graph.update_state(at("t"), {"messages": [AIMessage("Echo: HELLO", id="echo hello")]})
        graph.update_state(at("t"), {"messages": [RemoveMessage("tool hello"), HumanMessage("bye", id="bye")]})
        graph.update_state(at("t"), {"messages": [AIMessage("Echo: HELLO", id="echo hello", name="bo")]})
        graph.update_state(
            at("t"), {"messages": [AIMessage("Echo: HELLO", id="echo hello", response_metadata={"n": 1})]}
        )
    calls = '+ ai: Let me see [image] (tool calls: search(query="hello", n=3))'
    tool = "tool(search): " + "x" * 145 + "…"
    assert run("diff", "t", "@0", "@2")[1].splitlines() == ["+ human: hello", calls, f"+ {tool}", "+ ai: Echo:\\nhello"]
    assert run("diff", "t", "@2", "@3")[1].splitlines() == ["~ ai: Echo:\\nhello -> Echo: HELLO"]
    assert run("diff", "t", "@3", "@4")[1].splitlines() == [f"- {tool}", "+ human: bye"]
    assert run("diff", "t", "@4", "@5")[1].splitlines() == ["~ ai: Echo: HELLO -> ai(bo): Echo: HELLO"]
    assert run("diff", "t", "@4", "@6")[1].splitlines() == ["~ ai: Echo: HELLO (changed: response_metadata)"]
    [change] = json.loads(run("diff", "t", "@2", "@3", "--json")[1])["changes"]
    assert (change["path"], change["kind"], change["after"]["content"]) == ("messages[3]", "changed", "Echo: HELLO")
    everything = run("diff", "t", "@2", "@3", "--all")[1]
    assert "__line__.metadata.source" in everything
    assert '~ messages[3].content: "Echo:\\nhello" -> "Echo: HELLO"' in everything


def test_diff_of_bookkeeping_alone_shows_nothing(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        builder = StateGraph(Work)
        builder.add_node("a", lambda state: None)
        builder.add_edge(START, "a")
        builder.compile(checkpointer=saver).invoke({"items": [1]}, at("t"))
    code, out, err = run("diff", "t", "@1", "@2", "--exit-code")
    assert (code, out) == (0, "")
    assert "--all shows LangGraph's bookkeeping" in err
    assert run("diff", "t", "@1", "@2", "--exit-code", "--all")[0] == 1


def test_diff_shows_the_messages_of_a_plain_thread_as_messages(run: Run, where: Path) -> None:
    first, long = HumanMessage("hi", id="1"), "y" * 300
    with perdure.open("agent.db") as store:
        thread = store.thread("t")
        thread.save({"messages": [], "last": first, "team": {"log": [first]}, "n": 1})
        thread.save({"messages": [first, AIMessage("a")], "last": AIMessage(long), "team": {"log": []}, "n": 2})
        thread.save({"messages": [AIMessage("a"), AIMessage("b")], "last": AIMessage(long + "!"), "n": 2})
    assert run("diff", "t", "@0", "@1")[1].splitlines() == [
        "+ human: hi",
        "+ ai: a",
        f"~ last = human: hi -> ai: {'y' * 155}…",
        "- team.log[0] = human: hi",
        "~ n: 1 -> 2",
    ]
    assert run("diff", "t", "@1", "@2")[1].splitlines() == [
        "- human: hi",
        "+ ai: b",
        f"~ last = ai: …{'y' * 20} -> …{'y' * 20}!",
        '- team = {"log": []}',
    ]


# --- fork, rollback, prune, delete, verify


def test_a_graph_goes_on_with_a_fork(run: Run, where: Path) -> None:
    with PerdureSaver("agent.db") as saver:
        nested(saver).invoke({"topic": "x"}, at("t"))
    assert run("thread", "fork", "t", "--name", "t2")[0] == 0
    assert shown(run, "t2")["interrupts"] == shown(run, "t")["interrupts"]
    assert shown(run, "t2")["namespaces"] == shown(run, "t")["namespaces"]
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
    assert 'topic: "two"' in run("show", "t", "--namespace", "sub")[1]
    assert 'topic: "one"' in run("show", "t2", "--namespace", "sub")[1]
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
    assert shown(run, "t")["is_newest"] is True
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
    assert "+ human: four\n" in run("diff", "t", "head~3", *store)[1]
    for name in ("t", "t2"):
        assert run("thread", "delete", name, "--yes", *store)[0] == 0
    assert run("store", "verify", *store)[0] == 0


def test_after_a_prune_the_rest_of_the_history_is_there(run: Run, where: Path) -> None:
    check_prune(run, "agent.db")


def test_the_same_on_postgresql(run: Run, postgres_url: str) -> None:
    check_prune(run, postgres_url)
    with PerdureSaver(postgres_url) as saver:
        nested(saver).invoke({"topic": "x"}, at("t"))
    store = ["--store", postgres_url]
    assert shown(run, "t", "--namespace", "sub", *store)["is_newest"]
