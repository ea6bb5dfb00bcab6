"""Effects and steps inside the nodes of graphs: a process that is killed in a tool has booked once.

What is written down belongs to a task of the graph, so that it is found by whoever runs the graph next, and by nobody
else: another turn of a loop, another thread, a fork.
"""

from __future__ import annotations

import operator
import re
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import effect_run
import pytest
from effect_run import FLIGHT, HOTEL
from graph_kit import at
from langgraph.graph import START, StateGraph
from soak import SOAK

import perdure
from perdure.cli import main
from perdure.langgraph import PerdureSaver
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.tasks import policy as task_policy
from perdure.testing.fake_airline import AirlineProcess
from perdure.testing.processes import ForkServer
from perdure.threads.store import ThreadStore

WAYS = ["sync", "async"]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("effect_run:child") as made:
        yield made


def times_booked(airline: AirlineProcess) -> dict[str, int]:
    return dict(Counter(one.item for one in airline.bookings()))


class Kill:
    """A graph that is killed while the airline has booked and holds its answers back."""

    def __init__(
        self,
        fork_server: ForkServer,
        url: str,
        airline: AirlineProcess,
        shape: str,
        way: str,
        policy: str,
        durability: str,
    ) -> None:
        self.fork_server, self.url, self.airline = fork_server, url, airline
        # On PostgreSQL a killed process keeps the thread until its lease ends; on SQLite others see that it has died.
        lease_s = 0.001 if url.startswith("postgresql:") else 30.0
        self.arguments = [url, airline.url, shape, way, policy, durability, lease_s]
        running = fork_server.start(*self.arguments)
        airline.wait_for("booked", count=effect_run.BOOKED[shape])
        assert running.kill() == []
        airline.client.behave(hold="")

    def again(self) -> dict[str, Any]:
        [said] = self.fork_server.start(*self.arguments).lines()
        assert isinstance(said, dict)
        return said


# --- killed

KILLED = [
    (shape, way, durability)
    for durability in ("async", "sync")
    for shape in ("subgraph", "deep", "send", "functional")
    for way in WAYS
]
PAIRED = [
    ("subgraph", "sync", "async"),
    ("deep", "async", "async"),
    ("send", "sync", "sync"),
    ("functional", "async", "sync"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("shape", "policy"), [("node", "reconcile"), ("tools", "key")])
def test_a_graph_killed_in_a_tool_has_booked_once(
    saver_url: str, tmp_path: Path, fork_server: ForkServer, shape: str, policy: str, way: str
) -> None:
    """After the booking went out, before its end is written down. The same line again goes on."""
    with AirlineProcess(tmp_path / "air.db", hold="after", ignore_keys=policy != "key") as airline:
        kill = Kill(fork_server, saver_url, airline, shape, way, policy, "async")
        said = kill.again()
        assert times_booked(airline) == {FLIGHT: 1, HOTEL: 1}
        assert sorted(said["booked"]) == ["trip-1", "trip-2"]
        assert said["searched"] == 0  # the step before it had ended, and its end was written down


@pytest.mark.parametrize(("shape", "way", "durability"), KILLED if SOAK else PAIRED)
def test_the_same_in_subgraphs_fan_outs_and_functional_tasks(
    tmp_path: Path, fork_server: ForkServer, shape: str, way: str, durability: str
) -> None:
    with AirlineProcess(tmp_path / "air.db", hold="after", ignore_keys=True) as airline:
        kill = Kill(fork_server, str(tmp_path / "a.db"), airline, shape, way, "reconcile", durability)
        said = kill.again()
        assert set(times_booked(airline).values()) == {1}
        assert sorted(said["booked"]) == sorted(one.booking for one in airline.bookings())


@pytest.mark.parametrize("way", WAYS)
def test_where_nobody_knows_a_person_says_and_the_graph_goes_on(
    saver_url: str, tmp_path: Path, fork_server: ForkServer, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error holds the line that settles it; until then the graph stays where it is."""
    with AirlineProcess(tmp_path / "air.db", hold="after", ignore_keys=True) as airline:
        kill = Kill(fork_server, saver_url, airline, "node", way, "ask", "async")
        for _ in range(2):
            doubt = kill.again()
            assert doubt["key"] == airline.bookings()[0].key
            assert times_booked(airline) == {FLIGHT: 1}
        with perdure.open(saver_url) as store:
            [ask] = store.questions()
            assert (ask.run, ask.kind, ask.key) == (doubt["run"], "doubt", doubt["key"])
            [info] = store.runs()
            assert (info.status, info.waiting_for and info.waiting_for.kind) == ("waiting", "doubt")
        [line] = re.findall(r"perdure (run resolve .*?) --done '<result as JSON>'", doubt["doubt"])
        assert main([*shlex.split(line), "--done", "trip-1", "--store", saver_url]) == 0, capsys.readouterr()
        assert kill.again()["booked"] == ["trip-1", "trip-2"]
        assert times_booked(airline) == {FLIGHT: 1, HOTEL: 1}


# --- the runs that stand for tasks


class Trip(TypedDict, total=False):
    booked: Annotated[list[str], operator.add]


class Counted:
    """A node that books once, and whatever a test lets it do then."""

    def __init__(self, saver: PerdureSaver, *, times: int = 1, then: Callable[[], None] = lambda: None) -> None:
        self.keys: list[str] = []
        self.during: Callable[[], None] = lambda: None

        @perdure.effect(name="book", timeout_s=60)
        def book(item: int, key: perdure.IdempotencyKey) -> str:
            self.keys.append(str(key))
            self.during()
            return "x" * 100_000  # a blob

        def trip(state: Trip) -> Trip:
            found = [book(item) for item in range(times)]
            then()
            return {"booked": [text[:1] for text in found]}

        builder = StateGraph(Trip)
        builder.add_node("trip", trip)
        builder.add_edge(START, "trip")
        self.graph = builder.compile(checkpointer=saver)


def test_tasks_are_no_runs_to_look_at_and_done_when_their_writes_are_stored(saver: PerdureSaver) -> None:
    Counted(saver).graph.invoke({}, at("t"))
    store = saver.store
    assert store.runs() == []
    [info] = store.runs(tasks=True)
    assert (info.status, info.function, info.queue) == ("done", "task:trip", "tasks")
    assert info.id.startswith("langgraph/t/trip:")
    [step] = store.get_run(info.id).steps()
    assert (step.name, step.kind, step.status) == ("book", "effect", "done")
    assert store.ops.verify().ok


def test_a_task_that_is_run_again_reads_large_results_back(saver: PerdureSaver) -> None:
    trouble = [RuntimeError("crash")]

    def then() -> None:
        if trouble:
            raise trouble.pop()

    counted = Counted(saver, times=2, then=then)
    with pytest.raises(RuntimeError, match="crash"):
        counted.graph.invoke({}, at("t"))
    assert counted.graph.invoke(None, at("t"))["booked"] == ["x", "x"]
    assert len(counted.keys) == 2


def test_only_the_graph_steers_a_task(saver: PerdureSaver) -> None:
    Counted(saver).graph.invoke({}, at("t"))
    [info] = saver.store.runs(tasks=True)
    run = saver.store.get_run(info.id)
    for steer in (run.cancel, run.pause, run.resume, run.undo, lambda: saver.store.fork(info.id, id="new")):
        with pytest.raises(perdure.UsageError, match="stands for a task of a graph"):
            steer()


@pytest.mark.parametrize("how", ["saver", "store", "handle", "ttl"])
def test_tasks_go_with_their_thread(saver: PerdureSaver, how: str) -> None:
    """Their journals and their large results too; those of other threads stay."""
    for thread in ("t", "t/x", "other"):
        Counted(saver).graph.invoke({}, at(thread))
    store = saver.store
    if how == "saver":
        saver.delete_thread("t")
    elif how == "store":
        store.delete_thread("t")
    elif how == "handle":
        store.delete_thread(store.thread("t"))
    else:
        store.ops.retention(threads="60s")
        clock, store._context.clock_us = store._context.clock_us, lambda: clock() + 61_000_000
        for thread in ("t/x", "other"):
            store.thread(thread).retention(threads=None)
        assert store.ops.compact().expired == ("t",)
        store._context.clock_us = clock
    assert {info.id.rpartition("/")[0] for info in store.runs(tasks=True)} == {"langgraph/t/x", "langgraph/other"}
    for thread in ("t/x", "other"):
        saver.delete_thread(thread)
    assert counts(store) == {"run": 0, "run_value": 0, "journal": 0, "run_blob": 0, "blob": 0}


def test_finished_tasks_are_kept_as_long_as_runs_are(saver_url: str) -> None:
    """And a sweep finds those whose threads were deleted by somebody who was killed before he was done."""
    with perdure.open(saver_url) as store:
        store.ops.retention(runs="0s")
        saver = PerdureSaver(store)
        Counted(saver).graph.invoke({}, at("t"))
        assert store.ops.sweep_runs() == 1
        Counted(PerdureSaver(store)).graph.invoke({}, at("stray"))
    with perdure.open(saver_url) as store:
        assert [info.status for info in store.runs(tasks=True)] == ["done"]
        ThreadStore(store._context).delete_thread("stray")  # the thread alone
        store.ops.compact(vacuum=True)
        assert counts(store) == {"run": 0, "run_value": 0, "journal": 0, "run_blob": 0, "blob": 0}


def counts(store: perdure.Store) -> dict[str, int]:
    def program() -> Program[dict[str, int]]:
        tables = ("run", "run_value", "journal", "run_blob", "blob")
        answers = yield Batch(*(Sql(f"SELECT count(*) FROM {table}")() for table in tables), last=True)
        return {table: int(rows[0][0]) for table, rows in zip(tables, answers, strict=True)}

    return store._context.driver.run(Transaction(program))  # type: ignore[no-any-return]


class Refused(Exception):
    """Of the effect's own package: nothing was booked."""


def test_two_runs_of_the_same_task_at_once_do_not_both_book(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests resume the same thread: while the first is booking, the second waits, and is turned away then."""
    monkeypatch.setattr(task_policy, "_BUSY_S", 0.01)
    counted, booking, go_on = Counted(saver), threading.Event(), threading.Event()
    fails = [Refused("first")]

    def during() -> None:
        if fails:
            raise fails.pop()
        booking.set()
        assert go_on.wait(30)

    counted.during = during
    with pytest.raises(Refused, match="first"):
        counted.graph.invoke({}, at("t"))
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(counted.graph.invoke(None, at("t"))))
    first.start()
    assert booking.wait(30)
    with pytest.raises(perdure.errors.LeaseLost, match="is being run by another"):
        counted.graph.invoke(None, at("t"))
    go_on.set()
    first.join(30)
    assert results == [{"booked": ["x"]}]
    assert (len(counted.keys), len(set(counted.keys))) == (2, 1)


def test_a_subgraph_that_a_node_calls_itself_is_found_again(saver: PerdureSaver) -> None:
    """Twice in one node: each call has a namespace of its own."""
    keys: list[str] = []
    trouble = [RuntimeError("crash")]

    @perdure.effect(name="book", timeout_s=60)
    def book(item: str, key: perdure.IdempotencyKey) -> str:
        keys.append(str(key))
        return item

    inner = StateGraph(Trip)
    inner.add_node("trip", lambda state: {"booked": [book("a")]})
    inner.add_edge(START, "trip")
    called = inner.compile()

    def outer(state: Trip) -> Trip:
        both = [*called.invoke({})["booked"], *called.invoke({})["booked"]]
        if trouble:
            raise trouble.pop()
        return {"booked": both}

    builder = StateGraph(Trip)
    builder.add_node("outer", outer)
    builder.add_edge(START, "outer")
    graph = builder.compile(checkpointer=saver)
    with pytest.raises(RuntimeError, match="crash"):
        graph.invoke({}, at("t"))
    assert graph.invoke(None, at("t"))["booked"] == ["a", "a"]
    assert (len(keys), len(set(keys))) == (2, 2)
