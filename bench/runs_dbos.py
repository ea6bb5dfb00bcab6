"""DBOS as the peer of durable runs: `python -m bench.runs_dbos PATH|URL`, a child that does what it is told.

As its documentation sets it up, with two kindnesses: its SQLite file is put into WAL mode before (as shipped it is
several times slower), and its pool has a connection for each of 32 runs. Nothing imports this module but the child
that it is, and `bench.runs_claims` in its own children: DBOS is slow to load, and starts threads.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import psycopg
from dbos import DBOS, SetWorkflowID

from bench.runs_contenders import serve, stop_here, texts

POOL = 32
QUEUE = "work"
AT_ONCE = 32  # runs that a worker has at a time: what is best for it here
POLL_S = 0.02  # as shipped a second, which would be all that is measured
# All rows of a run's steps out of the first one's.
ROWS = """
WITH RECURSIVE numbers (number) AS (SELECT 2 UNION ALL SELECT number + 1 FROM numbers WHERE number < {count})
INSERT INTO {schema}operation_outputs
    (workflow_uuid, function_id, function_name, output, error, child_workflow_id, started_at_epoch_ms,
     completed_at_epoch_ms, serialization, application_name, retention_timestamp)
SELECT workflow_uuid, number, function_name, output, error, child_workflow_id, started_at_epoch_ms,
       completed_at_epoch_ms, serialization, application_name, retention_timestamp
FROM {schema}operation_outputs, numbers WHERE function_id = 1 AND workflow_uuid = '{run}'
"""


@dataclass(slots=True)
class _Child:
    """What bodies have to know."""

    location: str = ""
    texts: list[str] = field(default_factory=list)
    building: tuple[int, str] | None = None
    entered_at: float = 0.0
    took_s: float = 0.0
    reached: threading.Event = field(default_factory=threading.Event)


child = _Child()


@DBOS.step()
def note(number: int) -> dict[str, int]:
    return {"number": number}


@DBOS.step()
async def anote(number: int) -> dict[str, int]:
    return {"number": number}


@DBOS.step()
def write(number: int) -> str:
    return child.texts[number]


@DBOS.step()
def counted(number: int) -> dict[str, int]:
    if child.building and number == 1:
        _add_rows(*child.building)
        stop_here()
    return {"number": number}


@DBOS.step()
def last() -> None:
    child.took_s = time.perf_counter() - child.entered_at
    child.reached.set()


@DBOS.workflow()
def plain(count: int) -> int:
    for number in range(count):
        note(number)
    return count


@DBOS.workflow()
async def aplain(count: int) -> int:
    for number in range(count):
        await anote(number)
    return count


@DBOS.workflow()
def writing(count: int) -> int:
    for number in range(count):
        write(number)
    return count


@DBOS.workflow()
def long(count: int) -> int:
    child.entered_at = time.perf_counter()
    for number in range(count):
        counted(number)
    last()
    return count


def launch(location: str, executor: str = "local", queues: Sequence[str] = ()) -> None:
    """Start DBOS on a file or a PostgreSQL URL. What an executor of this name left unfinished is recovered."""
    child.location = url = location
    if "://" not in location:
        with closing(sqlite3.connect(location)) as connection:
            connection.execute("PRAGMA journal_mode=wal")
        url = f"sqlite:///{location}"
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "sys_db_pool_size": POOL,
            "log_level": "CRITICAL",
            "application_version": "bench",
            "executor_id": executor,
        }
    )
    DBOS.listen_queues(queues)
    DBOS.launch()


def _steps(count: int) -> float:
    start = time.perf_counter()
    plain(count)
    return time.perf_counter() - start


def _many_threads(count: int, runs: int) -> float:
    """Workflows in DBOS's own threads."""
    start = time.perf_counter()
    for handle in [DBOS.start_workflow(plain, count // runs) for _ in range(runs)]:
        handle.get_result()
    return time.perf_counter() - start


def _many_tasks(loop: asyncio.Runner) -> Callable[[int, int], float]:
    """Async workflows, on a loop that stays: DBOS lends it its threads, and its end would end them."""

    async def all_of_them(count: int, runs: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(aplain(count // runs) for _ in range(runs)))
        return time.perf_counter() - start

    return lambda count, runs: loop.run(all_of_them(count, runs))


def _texts(count: int, run: str) -> float:
    child.texts = texts(count)
    start = time.perf_counter()
    with SetWorkflowID(run):
        writing(count)
    return time.perf_counter() - start


def _fork(run: str, kept: int) -> float:
    """Fork with so many steps kept, onto a queue without a listener: what is stored is the fork alone."""
    start = time.perf_counter()
    DBOS.fork_workflow(run, kept + 1, queue_name="nobody")
    return time.perf_counter() - start


def _queue(count: int, prefix: str) -> float:
    """Leave runs of one step to workers."""
    start = time.perf_counter()
    DBOS.register_queue(QUEUE, worker_concurrency=AT_ONCE, polling_interval_sec=POLL_S)
    for number in range(count):
        with SetWorkflowID(f"{prefix}{number}"):
            DBOS.enqueue_workflow(QUEUE, plain, 1)
    return time.perf_counter() - start


def _build(count: int, run: str) -> None:
    """Leave a run of `count` finished steps behind, and wait to be killed in it.

    The first step is a real one; the others' rows are copied from it. They differ in nothing but their number, and
    DBOS itself would need most of a minute for them.
    """
    child.building = count, run
    with SetWorkflowID(run):
        long(count)


def _add_rows(count: int, run: str) -> None:
    if "://" in child.location:
        with psycopg.connect(child.location) as connection:
            connection.execute(ROWS.format(count=count, run=run, schema="dbos.").encode())
    else:
        with closing(sqlite3.connect(child.location)) as file, file:
            file.execute(ROWS.format(count=count, run=run, schema=""))


def _resume(count: int, run: str) -> float:
    """From the first line of the recovered function to its first new step.

    Launching DBOS began the recovery. That waits for a queue to be polled, which is not counted: with it, it takes
    up to a second longer.
    """
    if not child.reached.wait(240):
        raise RuntimeError(f"DBOS did not come to step {count} of {run}")
    return child.took_s


def _main(location: str) -> None:
    launch(location)
    with asyncio.Runner() as loop:
        serve(
            {
                "steps": _steps,
                "many threads": _many_threads,
                "many tasks": _many_tasks(loop),
                "texts": _texts,
                "fork": _fork,
                "queue": _queue,
                "build": _build,
                "resume": _resume,
            }
        )
    DBOS.destroy()


if __name__ == "__main__":
    _main(sys.argv[1])
