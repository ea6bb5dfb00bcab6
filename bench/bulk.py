"""Cancelling 100,000 runs that wait, with one call, and how long a writer beside it had to wait at most."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import perdure
from bench import listings
from bench.measure import Row, Run
from perdure.testing.postgres_server import PostgresServer

RUNS = 100_000
BAR_S, WAIT_BAR_S = 60.0, 1.0
# As a run has it that was parked before its first step.
_WAITS = {"status": "'waiting'", "entries": "0", "digest": "0", "seq": "0"}


def bulk(run: Run) -> list[Row]:
    count = run.count(RUNS, 200)
    rows = []
    with PostgresServer(fsync=True) as server:
        for name, url in (("SQLite", _sqlite(run.folder, count)), ("PostgreSQL", _postgres(server, count))):
            took, longest = _cancel(url, count)
            rows += [
                Row(f"{name}: cancel {count:,} waiting runs", took, "s", bar=BAR_S, judged="ours"),
                Row(f"{name}: longest wait of a writer beside it", longest, "s", bar=WAIT_BAR_S, judged="ours"),
            ]
    return rows


def _sqlite(folder: Path, count: int) -> str:
    path = str(folder / "bulk.db")
    perdure.open(path).close()
    listings.fill_sqlite(path, count, **_WAITS)
    return path


def _postgres(server: PostgresServer, count: int) -> str:
    url = server.create_database("bulk")
    perdure.open(url).close()
    listings.fill_postgres(url, count, **_WAITS)
    return url


def _cancel(url: str, count: int) -> tuple[float, float]:
    """Return how long it took, and the longest save of a thread meanwhile."""
    ended, waits = threading.Event(), [0.0]
    with perdure.open(url) as store, perdure.open(url) as other:

        def save() -> None:
            while not ended.is_set():
                began = time.perf_counter()
                other.thread("beside").save({"at": began})
                waits.append(time.perf_counter() - began)
                time.sleep(0.01)

        writer = threading.Thread(target=save)
        writer.start()
        began = time.perf_counter()
        result = store.bulk("cancel", statuses="waiting")
        took = time.perf_counter() - began
        ended.set()
        writer.join()
    assert result.changed == count, result
    return took, max(waits)
