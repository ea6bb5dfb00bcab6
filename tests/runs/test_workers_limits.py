"""Workers: what limits them, what their errors mean, how they end, and that nothing else ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tcp_proxy import WireProxy
from workshop import (
    Hand,
    ashort,
    done,
    errand,
    hands,
    open_gate,
    short,
    somebody_waits,
    until,
    working,
)

import perdure
from perdure.errors import UsageError
from perdure.runs.functions.specs import known_durables
from perdure.runs.journal import claiming
from perdure.runs.journal.claiming import Claimed, Search, ServedTenants
from perdure.runs.journal.queues import Limits, QueueCapacity, write_limits
from perdure.storage.program import Batch, Program, Sql, Transaction, drive
from perdure.testing.postgres_server import PostgresServer


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


def do(store: perdure.Store, op: Any) -> Any:
    return store._context.driver.run(Transaction(op, write=True))


def claim(store: perdure.Store, most: int, *, queue: str = "default", all_tenants: bool = False) -> Claimed:
    """One claim, as a worker makes it."""
    tenant = None if all_tenants else drive(store._context.driver, store._context.ensure_tenant())
    search = Search("test", (queue,), known_durables(), ServedTenants(tenant), ())
    op = partial(claiming.claim, search, most, lease=2**50, dead=(), recover=False, now=store._context.clock_us())
    found: Claimed = do(store, op)
    return found


def ids(found: Claimed) -> list[str]:
    return [taken.row.id for taken in found.taken]


def finish(store: perdure.Store, found: Claimed) -> None:
    """Those runs are queued again."""
    queued = Sql("UPDATE run SET status = 'queued', owner = NULL, wake_at = 0 WHERE tenant = :tenant AND run = :run")

    def program() -> Program[None]:
        yield Batch(*(queued(tenant=taken.tenant, run=taken.row.run) for taken in found.taken), last=True)

    do(store, program)


# --- limits


def declare(store: perdure.Store, **limits: Any) -> None:
    do(store, partial(write_limits, [perdure.Queue("limited", **limits)], store._context.clock_us()))


def test_a_queue_runs_no_more_at_once_than_it_allows(store: perdure.Store, tmp_path: Path) -> None:
    declare(store, concurrency=2)
    for number in range(5):
        store.start(short, str(tmp_path), id=f"r{number}", queue="limited")
    first = claim(store, 8, queue="limited")
    assert ids(first) == ["r0", "r1"]
    assert ids(claim(store, 8, queue="limited")) == []
    finish(store, Claimed(first.taken[:1]))
    assert len(claim(store, 8, queue="limited").taken) == 1


def test_limits_hold_while_a_worker_runs(store: perdure.Store) -> None:
    running = Counter[str]()
    most = Counter[str]()
    lock = threading.Lock()

    @perdure.durable
    def busy(number: int) -> int:
        with lock:
            running["now"] += 1
            most["ever"] = max(most["ever"], running["now"])
        tick(number)
        with lock:
            running["now"] -= 1
        return number

    @perdure.step
    def tick(number: int) -> int:
        return number

    for number in range(20):
        store.start(busy, number, queue="narrow")
    queue = perdure.Queue("narrow", concurrency=3)
    workers = [perdure.Worker(store, queues=[queue], poll_s=0.01) for _ in range(2)]
    with working(workers[0]), working(workers[1]):
        until(lambda: sum(worker.counts["done"] for worker in workers) == 20)
    assert 1 <= most["ever"] <= 3


def test_one_tenant_cannot_take_all_of_a_queue(store: perdure.Store, tmp_path: Path) -> None:
    """Though its runs are older and more than a claim looks at: the next claim looks behind them."""
    declare(store, tenant_concurrency=2)
    for tenant, count in (("acme", 30), ("beta", 3), ("core", 1)):
        for number in range(count):
            store.tenant(tenant).start(short, str(tmp_path), id=f"{tenant}{number}", queue="limited")
    assert ids(claim(store, 8, queue="limited", all_tenants=True)) == ["acme0", "acme1"]
    found = claim(store, 8, queue="limited", all_tenants=True)
    assert Counter(name.rstrip("0123456789") for name in ids(found)) == {"beta": 2, "core": 1}
    assert ids(claim(store, 8, queue="limited", all_tenants=True)) == []


def test_a_rate_lets_so_many_runs_begin_per_second(tmp_path: Path) -> None:
    """By an hour that the test sets."""
    with perdure.open(str(tmp_path / "agent.db"), durability="normal") as store:
        hour = [1_700_000_000_000_000]
        store._context.clock_us = lambda: hour[0]
        declare(store, rate=2)
        for number in range(9):
            store.start(short, str(tmp_path), id=f"r{number}", queue="limited")
        first = claim(store, 8, queue="limited")
        assert ids(first) == ["r0", "r1"]
        none = claim(store, 8, queue="limited")
        assert ids(none) == []
        assert none.wait_us is not None
        hour[0] += none.wait_us
        assert ids(claim(store, 8, queue="limited")) == ["r2"]
        finish(store, first)
        assert ids(claim(store, 8, queue="limited")) == ["r0", "r1"]  # to go on is no beginning
        hour[0] += 3_600_000_000
        assert ids(claim(store, 8, queue="limited")) == ["r3", "r4"]  # a quiet hour is worth no more than a second
        hour[0] -= 7_200_000_000
        assert ids(claim(store, 8, queue="limited")) == []
        hour[0] += 500_000
        assert ids(claim(store, 8, queue="limited")) == ["r5"]  # a clock that went back stops nothing


def test_a_rate_holds_in_the_database(store: perdure.Store, tmp_path: Path) -> None:
    declare(store, rate=0.001)
    for number in range(5):
        store.start(short, str(tmp_path), id=f"r{number}", queue="limited")
    found = claim(store, 8, queue="limited")
    assert len(found.taken) == 1
    assert found.wait_us is not None
    assert found.wait_us > 900_000_000
    declare(store, rate=0.002)  # declaring again gives no tokens away
    assert claim(store, 8, queue="limited").taken == []


def test_a_worker_keeps_to_a_rate(store: perdure.Store, tmp_path: Path) -> None:
    perdure.Queue("paced", rate=10)
    for number in range(12):
        store.start(short, str(tmp_path), f"p{number}", queue="paced")
    begun = store._context.clock_us()
    perdure.Worker(store, queues="paced").run(until_idle=True)
    assert len(done(tmp_path)) == 12
    assert store._context.clock_us() - begun >= 2 / 10 * 1e6 * 0.99


def test_limits_are_taken_from_the_code_when_a_worker_begins(store: perdure.Store) -> None:
    perdure.Queue("declared", concurrency=7, rate=2)
    perdure.Queue("elsewhere", concurrency=1)
    perdure.Worker(store, queues=("declared",)).run(until_idle=True)
    perdure.Queue("declared", tenant_concurrency=3)
    perdure.Worker(store, queues=("declared",)).run(until_idle=True)
    found = do(store, _queues)
    assert [row[:4] for row in found] == [("declared", None, 3, None)]


def _queues() -> Program[Any]:
    [rows] = yield Batch(Sql("SELECT queue, concurrency, tenant_concurrency, rate FROM queue")(), last=True)
    return rows


def test_a_queue_lets_in_what_it_has_room_for() -> None:
    room = QueueCapacity(Limits("q", 3, 1, 1.0, 1.0, 0, 0), {7: 1})
    assert not room.enter(7, starts=False)  # that tenant is full
    assert room.enter(8, starts=True)
    assert not room.enter(9, starts=True)  # no token left
    assert room.enter(9, starts=False)
    assert not room.enter(10, starts=False)  # three run now
    assert (room.full, room.places, room.tokens) == ([7, 8, 9], 0, 0.0)
    assert room.wait_us == 1_000_001


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"rate": 0}, {"rate": "10/m"}, {"tenant_concurrency": True}])
def test_a_queue_with_limits_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))}="):
        perdure.Queue("bad", **options)


@pytest.mark.parametrize(
    "options", [{"queues": ()}, {"concurrency": 0}, {"poll_s": 0}, {"drain_s": -1}, {"functions": [len]}]
)
def test_a_worker_with_options_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with perdure.open(":memory:") as store, pytest.raises(UsageError):
        perdure.Worker(store, **options)


def test_two_claims_never_give_the_same_run(store: perdure.Store, url: str, tmp_path: Path) -> None:
    for number in range(60):
        store.start(short, str(tmp_path), id=f"r{number}")
    found: list[str] = []

    def take() -> None:
        with perdure.open(url, durability="normal") as other:
            while taken := ids(claim(other, 3)):
                found.extend(taken)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(f"r{number}" for number in range(60))


def test_what_is_due_is_found_by_an_index_on_postgresql(empty_postgres_url: str) -> None:
    """A hundred thousand runs that wait for people must not be passed one by one. clock_timestamp() changes while a
    statement runs, so that an index is searched by it only if it is taken once."""
    import psycopg

    from perdure.storage.postgres.connection import Compiled

    perdure.open(empty_postgres_url).close()  # a new one: the dead rows of earlier tests would change the plan
    with psycopg.connect(empty_postgres_url, options="-c search_path=perdure", autocommit=True) as connection:
        connection.execute("SET enable_seqscan = off")
        for number, (sql, index) in enumerate(zip(claiming._DUE, ("run_queued", "run_waiting"), strict=True)):
            text = Compiled(sql.postgres, None).text
            connection.execute(f"PREPARE due{number} AS ".encode() + text)
            given = ", ".join(["'default'", "NULL", "'[]'", "1", "'[]'", "'[]'", "1", "8"])
            connection.execute("SET plan_cache_mode = force_generic_plan")
            plan = connection.execute(f"EXPLAIN EXECUTE due{number} ({given})".encode()).fetchall()
            found = "\n".join(str(line[0]) for line in plan)
            assert index in found
            assert "(wake_at <= " in next(line for line in found.splitlines() if "Index Cond" in line)


# --- errors


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_error_of_a_runs_code_ends_the_worker(store: perdure.Store, tmp_path: Path, is_async: bool) -> None:
    def bad(kind: str) -> None:
        raise {"error": ValueError, "exit": SystemExit, "interrupt": KeyboardInterrupt}[kind]("secret")

    @perdure.durable
    def fails(kind: str) -> None:
        bad(kind)

    @perdure.durable
    async def afails(kind: str) -> None:
        bad(kind)

    for kind in ("error", "exit", "interrupt"):
        store.start(afails if is_async else fails, kind, id=kind)
        store.start(ashort if is_async else short, str(tmp_path), kind)
    worker = perdure.Worker(store)
    worker.run(until_idle=True)
    assert sorted(done(tmp_path)) == ["error", "exit", "interrupt"]
    assert worker.counts == {"done": 3, "failed": 1, "stuck": 2}
    assert store.get_run("error").status == "failed"
    # Whoever claims it would meet the same: it is not tried over and over.
    assert "SystemExit" in getattr(store.get_run("exit").refresh().waiting_for, "text", "")


def test_nothing_of_a_runs_data_is_logged(store: perdure.Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "perdure")

    @perdure.durable
    def leaks(word: str) -> None:
        raise SystemExit(word)

    store.start(leaks, "topsecret", id="the-run")
    perdure.Worker(store).run(until_idle=True)
    assert "the-run" in caplog.text
    assert "topsecret" not in caplog.text


def test_a_database_that_goes_away_does_not_end_the_worker(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    database = postgres_url.rpartition("/")[2]
    with (
        perdure.open(postgres_url) as direct,
        WireProxy(postgres_server.port) as proxy,
        perdure.open(proxy.url(database), timeout_s=2.0) as behind,
        working(perdure.Worker(behind, poll_s=0.02)) as worker,
    ):
        assert direct.start(short, str(tmp_path)).result(timeout_s=60) == "short"
        proxy.cut()
        until(lambda: worker._troubles > 1)
        proxy.mend()
        assert direct.start(short, str(tmp_path)).result(timeout_s=60) == "short"


def test_a_run_that_a_lost_database_got_stuck_is_tried_again(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody should have to resume every run after the database was restarted."""
    from perdure.errors import Unavailable
    from perdure.runs.engine import execute as module

    monkeypatch.setattr(module, "_LATER_US", 0)
    tries: list[int] = []

    @perdure.durable
    def unlucky() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise Unavailable("the server went away")
        return "at last"

    run = store.start(unlucky)
    worker = perdure.Worker(store)
    worker.run(until_idle=True)
    assert run.result() == "at last"
    assert worker.counts == {"queued": 1, "done": 1}


# --- the end


def test_stop_lets_runs_finish_and_takes_no_more(store: perdure.Store, tmp_path: Path) -> None:
    first = store.start(errand, str(tmp_path), id="a")
    worker = perdure.Worker(store, concurrency=1)
    with working(worker):
        somebody_waits(tmp_path)
        store.start(short, str(tmp_path), "never", id="b")
        worker.stop()
        open_gate(tmp_path)
    assert first.result() == ["first", "held", "last"]
    assert store.get_run("b").status == "queued"


def test_sigterm_drains(url: str, store: perdure.Store, tmp_path: Path) -> None:
    run = store.start(errand, str(tmp_path), id="a")
    with hands(1) as (fork_server,):
        hand = Hand(fork_server, url, concurrency=1)
        somebody_waits(tmp_path)
        hand.ask_to_end()
        store.start(short, str(tmp_path), "never", id="b")
        open_gate(tmp_path)
        assert hand.counts() == {"done": 1}
    assert run.result() == ["first", "held", "last"]
    assert store.get_run("b").status == "queued"


@pytest.mark.parametrize("drain_s", [0.0, 3600.0], ids=["time is over", "second signal"])
def test_what_does_not_finish_in_time_is_resumed_by_another_worker_at_once(
    url: str, store: perdure.Store, tmp_path: Path, drain_s: float
) -> None:
    """Its body cannot be stopped; nevertheless the process ends, and the run is not held by its lease of an hour."""
    run = store.start(errand, str(tmp_path), id="a")
    with hands(1) as (fork_server,):
        hand = Hand(fork_server, url, drain_s=drain_s, lease_s=3600)
        somebody_waits(tmp_path)
        hand.ask_to_end()
        if drain_s:
            _end_with_a_second_signal(hand)
        assert hand.counts() == {}
        worker = perdure.Worker(store)
        worker.run(until_idle=True)
        assert worker.counts == {"done": 1}
    assert run.result() == ["first", "held", "last"]
    assert done(tmp_path).count("first") == 1


def _end_with_a_second_signal(hand: Hand) -> None:
    """Send it again after a while: Python may see two signals at once as one."""
    status = Path(f"/proc/{hand.child.pid}/status")
    for _ in range(10):
        hand.ask_to_end()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not status.exists() or "State:\tZ" in status.read_text():
                return
            time.sleep(0.005)


def test_code_that_is_told_to_stop_ends_at_its_next_step(store: perdure.Store, tmp_path: Path) -> None:
    """Within the grace: given back by itself, with all that it has recorded."""
    endless = perdure.durable(name="endless")(partial(_endless, str(tmp_path)).func)
    run = store.start(endless, str(tmp_path))
    worker = perdure.Worker(store, drain_s=0)
    with working(worker):
        until(lambda: len(done(tmp_path)) > 3)
    assert worker.counts == {"queued": 1}
    assert run.refresh().status == "queued"
    assert len(run.steps()) == len(done(tmp_path))


def _endless(folder: str) -> None:
    from workshop import mark

    while True:
        mark(folder, "again")


def test_an_async_run_that_waits_in_a_body_is_interrupted(store: perdure.Store) -> None:
    entered = threading.Event()
    ended: list[str] = []

    @perdure.step
    async def forever() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    @perdure.durable
    async def waits() -> None:
        await forever()

    run = store.start(waits)
    worker = perdure.Worker(store, drain_s=0)
    with working(worker):
        assert entered.wait(60)
    assert ended == ["cancelled"]
    assert worker.counts == {"queued": 1}
    assert run.refresh().status == "queued"


def test_signal_handlers_are_put_back(store: perdure.Store) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    perdure.Worker(store).run(until_idle=True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_signal_wakes_a_worker_that_waits(store: perdure.Store) -> None:
    """In the main thread, with nothing to do for an hour."""
    worker = perdure.Worker(store, poll_s=3600)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    worker.run()
    timer.join()


async def test_arun_works_until_it_is_cancelled(store: perdure.Store, tmp_path: Path) -> None:
    task = asyncio.create_task(perdure.Worker(store).arun())
    run = await store.astart(ashort, str(tmp_path))
    assert await run.aresult(timeout_s=60) == "ashort"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await perdure.Worker(store).arun(until_idle=True)


def test_a_worker_that_was_told_to_stop_before_it_ran_does_not_run(store: perdure.Store, tmp_path: Path) -> None:
    store.start(short, str(tmp_path))
    worker = perdure.Worker(store)
    worker.stop()
    worker.run()
    assert done(tmp_path) == []
    worker.run(until_idle=True)  # it can be run again
    assert done(tmp_path) == ["short"]


def test_a_worker_runs_once_at_a_time(store: perdure.Store) -> None:
    worker = perdure.Worker(store)
    with working(worker):
        until(lambda: worker._working.locked())
        with pytest.raises(UsageError, match="runs already"):
            worker.run()


def test_no_thread_and_no_lock_file_is_left(store: perdure.Store, tmp_path: Path) -> None:
    store.start(short, str(tmp_path))
    store.start(ashort, str(tmp_path))
    perdure.Worker(store).run(until_idle=True)
    until(lambda: not [thread for thread in threading.enumerate() if "perdure-worker" in thread.name])
    assert not [name for name in os.listdir(tmp_path) if "-owner-" in name]
