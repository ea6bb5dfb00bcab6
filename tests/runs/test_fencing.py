"""Two workers, one run: whoever was taken for dead cannot write, nothing is recorded twice, and nothing is lost.

Real processes, stopped and killed; real connections, cut, frozen, and broken after COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from driver_proxy import LateDriver
from tcp_proxy import WireProxy
from workshop import (
    Hand,
    asked,
    done,
    errand,
    hands,
    names,
    notes,
    open_gate,
    paid,
    paid_slowly,
    short,
    somebody_waits,
    until,
    working,
)

import perdure
from perdure.log.cache import BaseCache
from perdure.runs.engine.runtime import TICK_S, runtime_of
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.hooks import Point
from perdure.runs.journal import rows
from perdure.storage.postgres import connection as postgres_connection
from perdure.storage.program import Transaction
from perdure.storage.urls import open_driver
from perdure.testing.postgres_server import PostgresServer
from perdure.threads.context import StoreContext
from perdure.values.registry import Codec

ERRAND = [("mark", "done"), ("hold", "done"), ("mark", "done")]


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


def test_a_stopped_worker_that_comes_back_cannot_write(url: str, store: perdure.Store, tmp_path: Path) -> None:
    """SIGSTOP in a body; the lease runs out, another one finishes; SIGCONT: LeaseLost, and nothing is there twice."""
    run = store.start(errand, str(tmp_path), id="a")
    with hands(2) as (first, second):
        stopped = Hand(first, url, lease_s=2.0)
        somebody_waits(tmp_path)
        stopped.stop()
        other = Hand(second, url, lease_s=2.0)
        assert run.result(timeout_s=60) == ["first", "held", "last"]
        stopped.go_on()
        open_gate(tmp_path)
        assert stopped.end() == {"lost": 1}
        assert other.end() == {"done": 1}
    assert names(run) == ERRAND
    assert run.refresh().attempts == 2
    # The step that was under way ran in both; what was recorded before and after it ran once.
    assert sorted(done(tmp_path)) == ["first", "hold", "hold", "last"]
    assert dict(notes(tmp_path))["last"] == other.child.pid


def test_a_stopped_worker_keeps_its_run_while_its_lease_lasts(url: str, store: perdure.Store, tmp_path: Path) -> None:
    """A process that is stopped is not dead."""
    run = store.start(errand, str(tmp_path), id="a")
    with hands(1) as (first,):
        stopped = Hand(first, url, lease_s=3600)
        somebody_waits(tmp_path)
        stopped.stop()
        worker = perdure.Worker(store)
        worker.run(until_idle=True)  # it looks, and there is nothing for it
        assert not worker.counts
        stopped.go_on()
        open_gate(tmp_path)
        assert run.result(timeout_s=60) == ["first", "held", "last"]
        assert stopped.end() == {"done": 1}
    assert run.refresh().attempts == 1


def lease_of_a_killed_worker(url: str) -> float:
    """SQLite: an hour, because its file says that it is dead. PostgreSQL: others wait until the lease ends."""
    return 0.5 if url.startswith("postgresql:") else 3600


def test_what_a_killed_worker_had_is_taken_over(url: str, store: perdure.Store, tmp_path: Path) -> None:
    run = store.start(errand, str(tmp_path), id="a")
    with hands(1) as (first,):
        killed = Hand(first, url, lease_s=lease_of_a_killed_worker(url))
        somebody_waits(tmp_path)
        killed.kill()
        with working(perdure.Worker(store)) as worker:
            assert run.result(timeout_s=60) == ["first", "held", "last"]
    assert worker.counts == {"done": 1}
    assert names(run) == ERRAND
    assert done(tmp_path).count("first") == 1


def test_an_effect_that_a_killed_worker_had_begun_is_in_doubt_and_not_repeated(
    url: str, store: perdure.Store, tmp_path: Path
) -> None:
    run = store.start(paid_slowly, str(tmp_path), id="a")
    with hands(1) as (first,):
        killed = Hand(first, url, lease_s=lease_of_a_killed_worker(url))
        somebody_waits(tmp_path)
        killed.kill()
        with working(perdure.Worker(store)):
            until(lambda: run.refresh().status == "waiting")
    assert getattr(run.refresh().waiting_for, "kind", None) == "doubt"
    run.resolve("2", done="receipt")
    perdure.Worker(store).run(until_idle=True)
    assert run.result() == "after"
    assert done(tmp_path) == ["before", "pay", "after"]


@pytest.mark.parametrize(("lease_s", "tick_s"), [(0.6, 0.1), (60.0, TICK_S)])
def test_the_shortest_lease_sets_the_pace_of_renewals(tmp_path: Path, lease_s: float, tick_s: float) -> None:
    """A lease of a second must not run out between two looks."""
    ticks: list[float] = []

    @perdure.durable
    def watching() -> None:
        ticks.append(runtime_of(opened._context)._tick_s())

    with perdure.open(str(tmp_path / "agent.db"), lease_s=lease_s) as opened:
        opened.run(watching)
    assert ticks == [pytest.approx(tick_s)]


# --- clocks


def test_a_clock_that_jumps_ahead_takes_a_run_away_and_the_fence_holds(tmp_path: Path) -> None:
    """To whoever's clock is an hour ahead, every lease is over. What he takes, the other cannot write any more."""
    path = str(tmp_path / "agent.db")
    with perdure.open(path, durability="normal") as store, perdure.open(path, durability="normal") as ahead:
        run = store.start(errand, str(tmp_path), id="a")
        honest = ahead._context.clock_us
        with working(perdure.Worker(store)) as slow:
            somebody_waits(tmp_path)
            ahead._context.clock_us = lambda: honest() - 3_600_000_000
            early = perdure.Worker(ahead)
            early.run(until_idle=True)
            assert not early.counts  # by a clock that is behind, nothing is over
            ahead._context.clock_us = lambda: honest() + 3_600_000_000
            fast = perdure.Worker(ahead)
            fast.run(until_idle=True)
            assert fast.counts == {"done": 1}
            open_gate(tmp_path)
        assert slow.counts == {"lost": 1}
        assert run.result() == ["first", "held", "last"]
        assert names(run) == ERRAND


def test_a_clock_that_jumps_does_not_make_a_worker_take_its_own_run(tmp_path: Path) -> None:
    """Its leases look over to itself, until they are renewed."""
    with perdure.open(str(tmp_path / "agent.db"), durability="normal") as store:
        run = store.start(errand, str(tmp_path), id="a")
        honest = store._context.clock_us
        worker = perdure.Worker(store, poll_s=0.01)
        with working(worker):
            somebody_waits(tmp_path)
            store._context.clock_us = lambda: honest() + 86_400_000_000
            store.start(short, str(tmp_path), id="b").result(timeout_s=60)
            store._context.clock_us = lambda: honest() - 86_400_000_000
            store.start(short, str(tmp_path), id="c").result(timeout_s=60)
            open_gate(tmp_path)
            run.result(timeout_s=60)
        assert run.refresh().attempts == 1
        assert done(tmp_path).count("hold") == 1


# --- networks


@pytest.fixture
def proxied(
    postgres_server: PostgresServer, postgres_url: str
) -> Iterator[tuple[WireProxy, perdure.Store, perdure.Store]]:
    """The network, a store behind it, and one that is not."""
    database = postgres_url.rpartition("/")[2]
    with (
        perdure.open(postgres_url) as direct,
        WireProxy(postgres_server.port) as proxy,
        perdure.open(proxy.url(database), lease_s=2.0, timeout_s=2.0) as behind,
    ):
        yield proxy, behind, direct


def test_a_worker_behind_a_cut_network_loses_its_run_and_repeats_nothing(
    proxied: tuple[WireProxy, perdure.Store, perdure.Store], tmp_path: Path
) -> None:
    """It cannot renew its lease; another one takes the run; when the network is back, its write finds no row."""
    proxy, behind, direct = proxied
    run = direct.start(errand, str(tmp_path), id="a")
    with working(perdure.Worker(behind)) as cut_off:
        somebody_waits(tmp_path)
        proxy.cut()
        with working(perdure.Worker(direct)) as other:
            assert run.result(timeout_s=60) == ["first", "held", "last"]
        proxy.mend()
        open_gate(tmp_path)
        until(lambda: not cut_off._active)
        # It is a worker as before.
        assert direct.start(short, str(tmp_path), id="b").result(timeout_s=60) == "short"
    assert other.counts == {"done": 1}
    assert cut_off.counts == {"lost": 1, "done": 1}
    assert names(run) == ERRAND
    assert run.refresh().attempts == 2


@pytest.mark.parametrize("how", ["cut", "frozen", "frozen for long"])
def test_a_network_that_comes_back_costs_nothing(
    proxied: tuple[WireProxy, perdure.Store, perdure.Store], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a body gave is written down when the network is back, by the same owner; late arrivals are not doubled."""
    monkeypatch.setattr(postgres_connection, "GRACE_S", 0.1)
    proxy, behind, direct = proxied
    behind._runs._runtime.lease_us = 3_600_000_000
    run = direct.start(errand, str(tmp_path), id="a")
    with working(perdure.Worker(behind)):
        somebody_waits(tmp_path)
        proxy.cut() if how == "cut" else proxy.freeze()
        turns, connections = proxy.turns, len(proxy._sockets)
        open_gate(tmp_path)
        if how != "cut":
            until(lambda: proxy.turns > turns)
        if how == "frozen for long":
            until(lambda: len(proxy._sockets) > connections)  # it has given up waiting, and connects anew
        proxy.mend()
        assert run.result(timeout_s=60) == ["first", "held", "last"]
    assert names(run) == ERRAND
    assert run.refresh().attempts == 1
    assert done(tmp_path) == ["first", "hold", "last"]


@pytest.mark.parametrize("late", ["done", "intent", "finish"])
def test_a_write_that_arrives_after_it_was_looked_for_is_written_once(tmp_path: Path, late: str) -> None:
    driver = LateDriver(open_driver(":memory:", durability="normal", timeout_s=5, create=True))
    store = perdure.Store(StoreContext(driver, Codec(), BaseCache(1000), "default"))

    def hook(point: Point) -> None:
        if point.kind == late and point.when == "before" and not armed:
            armed.append(point)
            driver.armed = True

    armed: list[Point] = []
    hooks.hook = hook
    try:
        run = store.run(paid, str(tmp_path), id="a")
    finally:
        hooks.hook = None
    assert armed
    assert run.result() == "after"
    assert names(run) == [("mark", "done"), ("pay", "done"), ("mark", "done")]
    assert done(tmp_path) == ["before", "pay", "after"]
    store.close()


# Bytes of the transaction whose answer is lost: what it writes, or its text the first time that it is prepared.
LOST = {
    "a step's completion": b'"before"',
    "the end of the run": b'"after"',
    "an effect's intent": b"deadline",
    "a claim": b"fence = fence + 1",
}


@pytest.mark.parametrize("delivered", [True, False], ids=["committed", "never arrived"])
@pytest.mark.parametrize("what", LOST)
def test_a_commit_whose_answer_is_lost_is_looked_up(
    proxied: tuple[WireProxy, perdure.Store, perdure.Store], tmp_path: Path, what: str, delivered: bool
) -> None:
    """Whether it was committed or not, everything happens once."""
    proxy, behind, direct = proxied
    behind._runs._runtime.lease_us = 3_600_000_000  # nobody helps by taking over
    run = direct.start(paid, str(tmp_path), id="a")
    proxy.lose(LOST[what], delivered=delivered)
    with working(perdure.Worker(behind, poll_s=0.02)) as worker:
        assert run.result(timeout_s=60) == "after"
        until(lambda: not worker._active)
    assert proxy.lost == 1
    assert done(tmp_path) == ["before", "pay", "after"]
    assert names(run) == [("mark", "done"), ("pay", "done"), ("mark", "done")]
    assert worker.counts == {"done": 1}


@pytest.mark.parametrize("delivered", [True, False], ids=["committed", "never arrived"])
def test_a_park_whose_answer_is_lost_is_looked_up(
    proxied: tuple[WireProxy, perdure.Store, perdure.Store], tmp_path: Path, delivered: bool
) -> None:
    proxy, behind, direct = proxied
    run = direct.start(asked, str(tmp_path), id="a")
    proxy.lose(b"wakeup_pending = 1 OR", delivered=delivered)
    with working(perdure.Worker(behind, poll_s=0.02)) as worker:
        until(lambda: run.refresh().status == "waiting")
        until(lambda: not worker._active)
        direct.answer("a", "yes")
        assert run.result(timeout_s=60) == "yes"
    assert proxy.lost == 1
    assert done(tmp_path) == ["before", "yes"]


def test_a_lost_lease_is_said_to_the_code_at_its_next_step(url: str, store: perdure.Store, tmp_path: Path) -> None:
    """LeaseLost, and every further call says it again."""
    heard: list[BaseException] = []

    @perdure.durable
    def stubborn(folder: str) -> None:
        execution: Execution = store_sessions(store)[0]
        with perdure.open(url) as thief:
            thief._context.driver.run(take_over(execution))
        for _ in range(2):
            try:
                mark_step()
            except BaseException as error:
                heard.append(error)

    @perdure.step
    def mark_step() -> None: ...

    store.start(stubborn, str(tmp_path), id="a")
    worker = perdure.Worker(store, [stubborn])
    worker.run(until_idle=True)
    assert [type(error) for error in heard] == [perdure.errors.LeaseLost, perdure.errors.LeaseLost]
    assert worker.counts == {"lost": 1}


def store_sessions(store: perdure.Store) -> list[Execution]:
    return list(runtime_of(store._context)._executions)


def take_over(execution: Execution) -> Transaction:
    row = execution.row
    return Transaction(
        partial(
            rows.claim,
            execution.tenant,
            row.run,
            fence=row.fence,
            owner="another",
            lease=3_600_000_000,
            now=execution.ctx.clock_us(),
            dead=True,
        ),
        write=True,
    )
