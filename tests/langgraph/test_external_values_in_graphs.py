"""Large values in the states of graphs: channels, writes of tasks and results of steps in nodes refer to objects. None
is missing while a checkpoint, a pending write or a snapshot refers to it, and none stays for ever."""

from __future__ import annotations

import asyncio
import itertools
import operator
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from external_kit import Interfering, files, swept, uses
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt
from workshop import until

import perdure
from perdure.errors import NotFound, Unstorable, UsageError
from perdure.langgraph import PerdureSaver, PerdureStore

CONFIG: Any = {"configurable": {"thread_id": "t"}}
CHILD = Path(__file__).parent / "killed_value_run.py"


class State(TypedDict, total=False):
    film: perdure.External[bytes]
    notes: Annotated[list[Any], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]


@pytest.fixture(params=["sqlite", "sqlite-async", "postgres", "postgres-async"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def options(mode: str, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The arguments of `perdure.open`: an encrypted file, or PostgreSQL."""
    (tmp_path / "objects").mkdir()
    if mode.startswith("postgres"):
        return {"url": request.getfixturevalue("postgres_url"), "objects": tmp_path / "objects"}
    return {"url": str(tmp_path / "agent.db"), "objects": tmp_path / "objects", "keys": bytes(32)}


@pytest.fixture
def store(options: dict[str, Any]) -> Iterator[perdure.Store]:
    with perdure.open(**options) as opened:
        yield opened


def load(state: State) -> State:
    result = ToolMessage("loaded", tool_call_id="1", artifact=perdure.External(b"artifact" * 99))
    return {"film": perdure.External(b"film" * 999), "notes": [1], "messages": [result]}


def look(state: State) -> State:
    return {"notes": [len(state["film"].get())], "messages": [HumanMessage("fine")]}


def ask(state: State) -> State:
    return {"notes": [interrupt("go on?"), perdure.External(b"note" * 99)]}


def graph(store: perdure.Store, **nodes: Any) -> Any:
    builder = StateGraph(State)
    names = [START, *(nodes := nodes or {"load": load, "look": look, "ask": ask}), END]
    for name, node in nodes.items():
        builder.add_node(name, node)
    for one, after in itertools.pairwise(names):
        builder.add_edge(one, after)
    return builder.compile(checkpointer=PerdureSaver(store))


def invoke(mode: str, app: Any, value: Any, config: Any = CONFIG) -> Any:
    return asyncio.run(app.ainvoke(value, config)) if mode.endswith("async") else app.invoke(value, config)


def test_a_graph_keeps_large_values_and_reads_them_on_demand(
    mode: str, store: perdure.Store, options: dict[str, Any]
) -> None:
    invoke(mode, graph(store), {"messages": [HumanMessage("hi")]})
    assert swept(store) == 0
    with perdure.open(**options) as again:
        app = graph(again)
        values = app.get_state(CONFIG).values
        assert values["film"].get() == b"film" * 999
        assert values["messages"][1].artifact.get() == b"artifact" * 99
        done = invoke(mode, app, Command(resume="yes"))
        assert done["notes"][1:3] == [3996, "yes"]
        assert done["notes"][3].get() == b"note" * 99
        for checkpoint in app.get_state_history(CONFIG):
            assert all(message.artifact.get() for message in checkpoint.values["messages"][1:2])
        newest = again.thread("t").load(raw=True)
        assert newest.size_bytes < 4000
        assert again.ops.verify().problems == ()
    assert len(files(options["objects"])) == 3


def test_collection_sees_checkpoints_writes_forks_and_snapshots(mode: str, store: perdure.Store) -> None:
    app = graph(store)
    invoke(mode, app, {"messages": []})
    invoke(mode, app, Command(resume="yes"))
    saver = app.checkpointer
    saver.copy_thread("t", "copy")
    snapshot = store.snapshot()
    app.update_state(CONFIG, {"film": None})
    saver.prune(["t"])
    assert swept(store) == 0, "the copy"
    store.delete_thread("copy")
    saver.prune(["t"])
    assert swept(store) == 0, "the snapshot"
    snapshot.release()
    assert swept(store) == 1, "the film"
    assert app.get_state(CONFIG).values["messages"][0].artifact.get() == b"artifact" * 99
    store.ops.erase("t")
    assert uses(store) == (0, 0)


def test_a_rolled_back_graph_has_the_values_of_then(mode: str, store: perdure.Store) -> None:
    app = graph(store)
    invoke(mode, app, {"messages": []})
    thread = store.thread("t")
    then = next(one for one in thread.history() if len(one.state.get("notes", ())) == 2)
    app.update_state(CONFIG, {"film": None, "notes": ["gone"]})
    thread.rollback(then)
    thread.prune(keep=1)
    assert swept(store) == 0
    assert app.get_state(CONFIG).values["film"].get() == b"film" * 999


def test_the_writes_of_a_task_keep_their_values_until_the_graph_goes_on(
    mode: str, store: perdure.Store, options: dict[str, Any]
) -> None:
    ran: list[str] = []

    def good(state: State) -> State:
        ran.append("good")
        return {"notes": [perdure.External(b"good" * 99)]}

    def bad(state: State) -> State:
        ran.append("bad")
        if ran.count("bad") == 1:
            until(lambda: uses(store)[0])  # else the other task may be cancelled before its writes are stored
            raise ValueError("once")
        return {"notes": ["bad"]}

    def app(opened: perdure.Store) -> Any:
        builder = StateGraph(State).add_node("good", good).add_node("bad", bad)
        builder.add_edge(START, "good").add_edge(START, "bad")
        return builder.compile(checkpointer=PerdureSaver(opened))

    with pytest.raises(ValueError, match="once"):
        invoke(mode, app(store), {"messages": []})
    assert swept(store) == 0, "a pending write refers to it"
    (tmp := options["objects"].parent / "there").mkdir()
    target = {"objects": tmp, "keys": bytes([1] * 32)}
    store.ops.transfer(tmp / "there.db", threads=["t"], **target)
    with perdure.open(tmp / "there.db", **target) as there:
        [task] = [one for one in app(there).get_state(CONFIG).tasks if one.name == "good"]
        assert task.result["notes"][0].get() == b"good" * 99
    with perdure.open(**options) as again:
        done = invoke(mode, app(again), None)
        assert ran.count("good") == 1
        [note] = [one for one in done["notes"] if one != "bad"]
        assert note.get() == b"good" * 99
    store.delete_thread("t")
    assert swept(store) == 1


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
def test_writes_before_their_checkpoint_keep_their_values(store: perdure.Store) -> None:
    line = store.thread("t").line()
    line.attach("0001", "key", perdure.External(b"early" * 99))
    assert swept(store) == 0
    line.save({"n": 1}, id="0001")
    assert swept(store) == 0
    loaded = line.load("0001")
    assert loaded is not None
    assert loaded.writes
    line.save({"n": perdure.External(b"second" * 99)}, id="0002", parent="0001")
    store.thread("t").prune(keep=1)
    assert swept(store) == 0, "an hour passes for the first"
    assert uses(store) == (2, 0)


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
def test_a_value_that_is_removed_before_its_checkpoint_is_stored_again(store: perdure.Store) -> None:
    removed: list[int] = []

    def remove() -> None:
        if len(removed) < 2:
            removed.append(swept(store))

    store._context.objects = Interfering(store._context.objects, after=remove)
    app = graph(store, load=load)
    app.invoke({"messages": []}, CONFIG)
    assert sum(removed) > 0
    assert app.get_state(CONFIG).values["film"].get() == b"film" * 999
    assert store.ops.verify().problems == ()


@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
def test_a_kill_between_object_and_checkpoint_loses_nothing(point: str, options: dict[str, Any]) -> None:
    place = [options["url"], options["objects"]]
    ran = subprocess.run([sys.executable, CHILD, *place, point], capture_output=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
    ran = subprocess.run([sys.executable, CHILD, *place, ""], capture_output=True)
    assert ran.stdout.decode() == "2000\n", ran.stderr.decode()
    with perdure.open(options["url"], objects=options["objects"]) as store:
        assert store.ops.verify().problems == ()
        swept(store)
        assert len(files(options["objects"])) == 2
        store.delete_thread("t")
        swept(store)
        assert files(options["objects"]) == []
        assert uses(store) == (0, 0)


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
def test_steps_in_nodes_record_large_results_and_copies_have_them(
    mode: str, store: perdure.Store, tmp_path: Path
) -> None:
    ran: list[str] = []

    @perdure.step(name="nodes.render")
    def render(film: perdure.External[bytes]) -> perdure.External[bytes]:
        ran.append("render")
        return perdure.External(film.get()[:100])

    def node(state: State) -> State:
        short = render(perdure.External(b"raw" * 999))
        if len(ran) == 1:
            ran.append("failed")
            raise ValueError("after the step")
        return {"notes": [len(short.get())]}

    app = graph(store, node=node)
    with pytest.raises(ValueError, match="after the step"):
        app.invoke({"messages": []}, CONFIG)
    assert swept(store) == 0
    refused = "the store was opened without a place for such values"
    with pytest.raises(UsageError, match=refused):
        store.snapshot("s").export(tmp_path / "bundle.db")
    (tmp_path / "elsewhere").mkdir()
    options: dict[str, Any] = {"objects": tmp_path / "elsewhere", "keys": bytes([1] * 32)}
    store.ops.transfer(tmp_path / "there.db", threads=["t"], **options)
    with perdure.open(tmp_path / "there.db", **options) as target:
        assert graph(target, node=node).invoke(None, CONFIG)["notes"] == [100]
        assert target.ops.verify().problems == ()
    assert ran == ["render", "failed"], "the recorded result was read in the other store"


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
def test_where_a_graph_cannot_keep_a_large_value_it_says_so(store: perdure.Store, tmp_path: Path) -> None:
    with perdure.open(":memory:") as bare, pytest.raises(Unstorable, match="the store must say where such values are"):
        graph(bare, load=load).invoke({"messages": []}, CONFIG)
    with pytest.raises(Unstorable, match="and nowhere else"):
        PerdureStore(store).put(("films",), "one", {"film": perdure.External(b"film")})
    graph(store, load=load).invoke({"messages": []}, CONFIG)
    for path in files(tmp_path / "objects"):
        path.unlink()
    values = graph(store, load=load).get_state(CONFIG).values
    with pytest.raises(NotFound, match="there is no file"):
        values["film"].get()
    assert all("there is no file" in problem.what for problem in store.ops.verify().problems)
