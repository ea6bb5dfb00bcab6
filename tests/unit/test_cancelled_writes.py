"""A write that was sent has ended when its caller is told of a cancellation or an interruption.

Else it could land after a later write that was acknowledged. Each write here waits for a lock that the test holds.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import apsw
import psycopg
import pytest

from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.program import Batch, Driver, Program, Sql, Transaction
from perdure.storage.sqlite import commit_queue
from perdure.storage.sqlite.commit_queue import CommitQueue
from perdure.storage.sqlite.driver import SqliteDriver

PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, 'v')")
COUNT = Sql("SELECT count(*) FROM meta WHERE key LIKE 'put-%'")
PATIENCE_S = 20.0


class Gate:
    """Keeps writes from being committed until `open`."""

    def __init__(self, url: str) -> None:
        if url.startswith("postgres"):
            self.driver: Driver = PostgresDriver(url)
            self._server = psycopg.connect(url, autocommit=True)
            self._server.execute("BEGIN")
            self._server.execute("LOCK TABLE perdure.meta IN SHARE MODE")
            self._looker = psycopg.connect(url, autocommit=True)
            self.close = self._end_session
        else:
            self.driver = SqliteDriver(url)
            self._file = apsw.Connection(url)
            self._file.execute("BEGIN IMMEDIATE")
            self.close = self._file.close

    def open(self) -> None:
        if isinstance(self.driver, PostgresDriver):
            self._server.execute("COMMIT")
        else:
            self._file.execute("COMMIT")

    def waiting(self) -> int:
        """How many writes were sent and wait."""
        if isinstance(self.driver, PostgresDriver):
            found = self._looker.execute(
                "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
                "WHERE NOT granted AND datname = current_database()"
            ).fetchone()
            assert found is not None
            return int(found[0])
        assert isinstance(self.driver, SqliteDriver)
        return int(self.driver._lock._held)

    def count(self) -> int:
        return int(self.driver.run(Transaction(_count)))

    def _end_session(self) -> None:
        self._server.close()
        self._looker.close()


@pytest.fixture(params=["sqlite", "postgres"])
def gate(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gate]:
    is_sqlite = request.param == "sqlite"
    gate = Gate(str(tmp_path / "a.db") if is_sqlite else str(request.getfixturevalue("postgres_url")))
    yield gate
    gate.driver.close()
    gate.close()


def _put(key: str) -> Program[None]:
    yield Batch(PUT(key=f"put-{key}"), last=True)


def _put_in_two(key: str) -> Program[None]:
    yield Batch(PUT(key=f"put-{key}"))


def _count() -> Program[int]:
    [[(number,)]] = yield Batch(COUNT(), last=True)
    return int(number)


WAYS: dict[str, Callable[[Driver], Any]] = {
    "transaction": lambda driver: driver.arun(Transaction(lambda: _put("a"), write=True)),
    "several batches": lambda driver: driver.arun(Transaction(lambda: _put_in_two("a"), write=True)),
    "append": lambda driver: driver.aappend([PUT(key="put-a")], [1]),
}


async def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_write_that_was_sent_ends_first(gate: Gate, way: str, beside: bool) -> None:
    others = []
    if beside:  # then PostgreSQL's writes gather
        others = [asyncio.create_task(gate.driver.arun(Transaction(lambda: _put("other"), write=True)))]
        await _until(lambda: gate.waiting() == 1)
    task = asyncio.create_task(WAYS[way](gate.driver))
    is_queued = beside and gate.driver.dialect == "sqlite"  # behind the other: it is withdrawn
    await _until(lambda: gate.waiting() == 1 + (beside and not is_queued))
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(50):
        task.cancel()
        await asyncio.sleep(0)
    assert task.done() == is_queued
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*others)
    assert gate.count() == 1 + (beside and not is_queued)


class Striker(threading.Thread):
    """Sends Ctrl-C to the main thread once `reached`, and then opens a gate: late, so that the main thread could leave
    before."""

    def __init__(self, reached: Callable[[], bool], open_gate: Callable[[], None]) -> None:
        super().__init__()
        self._reached, self._open_gate = reached, open_gate
        self.left = threading.Event()  # the main thread was told

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._reached() and time.monotonic() < deadline:
            time.sleep(0.002)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.left.wait(0.2)
        self._open_gate()


def test_an_interrupted_write_on_postgresql_ends_first(postgres_url: str) -> None:
    """Ctrl-C while the main thread waits for the answer to its COMMIT."""
    gate = Gate(postgres_url)
    striker = Striker(lambda: gate.waiting() == 1, gate.open)
    striker.start()
    with pytest.raises(KeyboardInterrupt):
        gate.driver.run(Transaction(lambda: _put("a"), write=True))
    assert gate.count() == 1
    striker.left.set()
    striker.join()
    gate.driver.close()
    gate.close()


@contextmanager
def _slow_before_it_waits(queue: CommitQueue) -> Iterator[None]:
    """Let this thread stand still after it queued its job and before it waits for the job: until Ctrl-C."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is CommitQueue.run.__code__ and queue.waiting and not queue._mutex.locked():
            threading.Event().wait(PATIENCE_S)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_interrupted_write_that_another_thread_commits_ends_first(
    is_waiting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite: a leader has taken the main thread's job into its group."""
    # However late the main thread comes on a busy machine: after 20 ms a group takes no more jobs.
    monkeypatch.setattr(commit_queue, "WORK_S_MAX", math.inf)
    queued, committing, gate = threading.Event(), threading.Event(), threading.Event()

    def hook(name: str) -> None:
        if name == "statement:0" and not committing.is_set():
            while not queued.is_set() and not driver._queue.waiting:
                time.sleep(0.001)
            queued.set()
        if name == "commit":
            committing.set()
            gate.wait(PATIENCE_S)

    driver = SqliteDriver(tmp_path / "a.db", hook=hook)
    leader = threading.Thread(target=lambda: driver.run(Transaction(lambda: _put("leader"), write=True)))
    striker = Striker(committing.is_set, gate.set)
    leader.start()
    while not driver._queue._leading:
        time.sleep(0.001)
    striker.start()
    with nullcontext() if is_waiting else _slow_before_it_waits(driver._queue), pytest.raises(KeyboardInterrupt):
        driver.run(Transaction(lambda: _put("a"), write=True))
    assert gate.is_set()  # it had to wait for the commit
    striker.left.set()
    striker.join()
    leader.join()
    assert driver.run(Transaction(_count)) == 2
    driver.close()
