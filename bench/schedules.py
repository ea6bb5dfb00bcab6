"""10,000 schedules that are due at one second, with two workers: how long until each has started its run, once.

Then the same schedules, none of them due: the processor time of a worker that waits for the next instant.
Run as a module it is one worker: `python -m bench.schedules URL`. It works until its input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import apsw
import psycopg

import perdure
from bench.measure import Row, Run, answer_of, in_child
from perdure.testing.postgres_server import PostgresServer

SCHEDULES = 10_000
BAR_S, IDLE_BAR = 10.0, 1.0
_DAY_US = 86_400_000_000
_MAKE_DUE = f"UPDATE schedule SET next_at = next_at - {_DAY_US}, last_at = last_at - {_DAY_US}"
_STARTED = "SELECT count(*), count(DISTINCT id), max(created_at) FROM run"


@perdure.durable(name="bench.scheduled")
def scheduled(number: int) -> int:
    return number


def schedules(run: Run) -> list[Row]:
    count, idle_s = run.count(SCHEDULES, 20), 0.5 if run.quick else 10.0
    rows = []
    with PostgresServer(fsync=True) as server:
        for name, url in (("SQLite", str(run.folder / "due.db")), ("PostgreSQL", server.create_database("due"))):
            with perdure.open(url) as store:
                for number in range(count):
                    store.schedule(f"s{number}", scheduled, every="1d", args=(number,), catch_up="last")
            _execute(url, _MAKE_DUE)
            took, done = _fire(url, count)
            idle = _idle(url, idle_s)
            rows += [
                Row(f"{name}: {count:,} schedules due at once", took, "s", bar=BAR_S, judged="ours",
                    note=f"two workers, until each has started; all runs done after {done:.1f} s"),
                Row(f"{name}: a worker beside them, idle", idle, "% of a core", bar=IDLE_BAR, judged="ours"),
            ]  # fmt: skip
    return rows


def _fire(url: str, count: int) -> tuple[float, float]:
    """Return after how long the last run was started, and after how long all had ended."""
    workers = [in_child("bench.schedules", url) for _ in range(2)]
    for worker in workers:  # both are loaded before either begins
        assert worker.stdout is not None
        worker.stdout.readline()
    began = time.time()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
    with perdure.open(url) as store:
        while store.count_runs().get("done", 0) < count:
            time.sleep(0.05)
    done = time.time() - began
    for worker in workers:
        answer_of(worker)
    [(started, ids, last)] = _execute(url, _STARTED)
    assert started == ids == count, (started, ids)
    return last / 1e6 - began, done


def _idle(url: str, seconds: float) -> float:
    """Return the processor time of one worker without work, in percent."""
    worker = in_child("bench.schedules", url)
    assert worker.stdout is not None
    assert worker.stdin is not None
    worker.stdout.readline()
    worker.stdin.write(b"go\n")
    worker.stdin.flush()
    time.sleep(seconds)
    share: float = answer_of(worker)
    return share * 100


def _execute(url: str, text: str) -> list[tuple[int, ...]]:
    if not url.startswith("postgresql:"):
        return list(apsw.Connection(url).execute(text))
    with psycopg.connect(url, options="-c search_path=perdure", autocommit=True) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


def _main(url: str) -> None:
    with perdure.open(url) as store:
        worker = perdure.Worker(store, [scheduled])
        print("ready", flush=True)
        sys.stdin.readline()
        thread = threading.Thread(target=worker.run)
        thread.start()
        time.sleep(0.3)  # what it does once, when it starts, is not counted
        cpu, began = time.process_time(), time.monotonic()
        sys.stdin.read()
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        worker.stop()
        thread.join()
    print(json.dumps(share))


if __name__ == "__main__":
    _main(sys.argv[1])
