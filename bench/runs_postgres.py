"""Durable runs on PostgreSQL, beside DBOS and bare inserts: one run, effects, 32 runs in one process, sizes.

The server is a real one with fsync on, started for this; client and server share the machine's cores. The floor of one
run is one psycopg connection with a prepared INSERT of 100 bytes per commit; that of 32 runs are 32 such connections on
one event loop. DBOS is shown by the better of its two ways to have 32 runs in a process: threads, async workflows.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import psycopg

from bench.measure import Row, Run
from bench.runs import RECORD, best_in_turns, sizes
from bench.runs_contenders import DBOS, OURS, Contender
from perdure.testing.postgres_server import PostgresServer

RUNS = 32
ONE_BAR = 3.0
EFFECTS_BAR = 2.0
MANY_BAR = 5.0
INSERT = "INSERT INTO bare (id, data) VALUES (%s, %s)"


def runs_postgres(run: Run) -> list[Row]:
    with PostgresServer(fsync=True) as server:
        ours, dbos = server.create_database("ours"), server.create_database("dbos")
        bare = server.create_database("bare")
        server.execute("CREATE TABLE bare (id bigint PRIMARY KEY, data bytea NOT NULL)", "bare")
        rows = _rates(run, ours, dbos, bare)
        ours, dbos = server.create_database("ours_sizes"), server.create_database("dbos_sizes")
        return [*rows, *sizes(run, ours, dbos, "PostgreSQL runs")]


def _rates(run: Run, ours_at: str, dbos_at: str, bare_at: str) -> list[Row]:
    inserts, steps, effects = run.count(1500, 20), run.count(1000, 10), run.count(500, 10)
    peer_steps = run.count(300, 10)
    many, peer_many = run.count(2560, RUNS), run.count(640, RUNS)
    with (
        Contender(OURS, ours_at) as ours,
        Contender(DBOS, dbos_at) as dbos,
        _Bare(bare_at) as bare,
    ):
        best = best_in_turns(
            run.count(3, 1),
            {
                "bare": lambda: bare.one(inserts),
                "steps": lambda: ours.rate("steps", steps),
                "effects": lambda: ours.rate("effects", effects),
                "dbos": lambda: dbos.rate("steps", peer_steps),
                "bare many": lambda: bare.many(many),
                "many": lambda: ours.rate("many", many, RUNS),
                "threads": lambda: dbos.rate("many threads", peer_many, RUNS),
                "tasks": lambda: dbos.rate("many tasks", peer_many, RUNS),
            },
        )
    threads, tasks = best["threads"], best["tasks"]
    one, many_peer = best["dbos"], max(threads, tasks)
    return [
        Row("PostgreSQL runs: plain steps", best["steps"], "/s", one, best["bare"], best["steps"] / one, ONE_BAR,
            "at least", note="one run; floor: bare inserts, one connection; ratio: to DBOS"),
        Row("PostgreSQL runs: effects", best["effects"], "/s", one, best["bare"], best["effects"] / one, EFFECTS_BAR,
            "at least", note="two commits each; peer: DBOS steps"),
        Row(f"PostgreSQL runs: {RUNS} in one process", best["many"], "/s", many_peer, best["bare many"],
            best["many"] / many_peer, MANY_BAR, "at least",
            note=f"steps; DBOS: threads {threads:.0f}, async {tasks:.0f}; floor: {RUNS} connections"),
    ]  # fmt: skip


class _Bare:
    """Bare inserts: one connection, and 32 on an event loop that stays."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count(1)

    def __enter__(self) -> _Bare:
        self._one = psycopg.connect(self._url, autocommit=True)
        self._loop = asyncio.Runner()
        self._many = self._loop.run(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self._one.close()
        self._loop.run(self._disconnect())
        self._loop.close()

    def one(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._one.execute(INSERT, (next(self._numbers), RECORD), prepare=True, binary=True)
        return count / (time.perf_counter() - start)

    def many(self, count: int) -> float:
        return count / self._loop.run(self._all(count))

    async def _all(self, count: int) -> float:
        async def task(connection: psycopg.AsyncConnection) -> None:
            for _ in range(count // RUNS):
                await connection.execute(INSERT, (next(self._numbers), RECORD), prepare=True, binary=True)

        start = time.perf_counter()
        await asyncio.gather(*map(task, self._many))
        return time.perf_counter() - start

    async def _connect(self) -> list[psycopg.AsyncConnection]:
        return [await psycopg.AsyncConnection.connect(self._url, autocommit=True) for _ in range(RUNS)]

    async def _disconnect(self) -> None:
        for connection in self._many:
            await connection.close()
