"""PostgreSQL: a save is one round trip, and 32 async savers come near what bare inserts reach.

The server is a real one with fsync on, started for this. Round trips are counted by a proxy between driver and
server, over many saves to a thread that exists (the first makes it). For throughput, 32 tasks save 1 KB states to
threads of their own through a pool of 32; in turns with 32 tasks that insert the same 1 KB, each over a psycopg
connection of its own, prepared, one INSERT per transaction, nothing else. Client and server share the machine's
cores in both. In the same turns the savers also save as a role that row-level security holds to its tenant.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from statistics import median

import orjson
import psycopg
from tcp_proxy import WireProxy

import perdure
from bench.measure import Row, Run, small_states
from perdure.ops.roles import make_role
from perdure.testing.postgres_server import PostgresServer

SAVERS = 32
TRIPS_BAR = 1.0
SHARE_BAR = 0.625  # 5,000 saves where the bare insert reaches 8,000
HELD_BAR = 0.8
STATES = 256
INSERT = "INSERT INTO bare (id, data) VALUES (%s, %s)"


def postgres(run: Run) -> list[Row]:
    with PostgresServer(fsync=True) as server:
        server.create_database("bench")
        server.execute("CREATE TABLE bare (id bigint PRIMARY KEY, data bytea NOT NULL)", "bench")
        trips = _trips(server, run.count(50, 5))
        make_role(server.url("bench"), "app", "held")
        ours, bare, held = asyncio.run(_throughput(server, run.count(4, 1), 0.2 if run.quick else 1.0))
    return [
        Row("PostgreSQL: round trips per save", trips, "trips", floor=1.0, ratio=trips, bar=TRIPS_BAR,
            note="counted by a proxy"),
        Row("PostgreSQL: 32 async savers", ours, "saves/s", floor=bare, ratio=ours / bare, bar=SHARE_BAR,
            sense="at least", note="floor: 32 psycopg connections, a bare insert each; fsync on"),
        Row("PostgreSQL: the same, held to their tenant", held, "saves/s", floor=ours, ratio=held / ours, bar=HELD_BAR,
            sense="at least", note="floor: the same as a superuser, without row-level security"),
    ]  # fmt: skip


def _trips(server: PostgresServer, saves: int) -> float:
    states = small_states(saves + 1)
    with WireProxy(server.port) as proxy, perdure.open(proxy.url("bench")) as store:
        thread = store.thread("counted")
        thread.save(states[0])
        before = proxy.turns
        for state in states[1:]:
            thread.save(state)
        return (proxy.turns - before) / saves


async def _throughput(server: PostgresServer, rounds: int, length_s: float) -> tuple[float, float, float]:
    """Per second: our saves, bare inserts, our saves as a role that is held to its tenant."""
    url = server.url("bench")
    states = small_states(STATES)
    texts = [orjson.dumps(state) for state in states]
    numbers = itertools.count(1)
    ours: list[float] = []
    bare: list[float] = []
    held: list[float] = []
    connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(SAVERS)]
    app = server.url("bench", user="held")
    async with perdure.open(url, pool_size=SAVERS) as store, perdure.open(app, pool_size=SAVERS) as theirs:
        threads = [store.thread(f"agent-{number}") for number in range(SAVERS)]
        held_threads = [theirs.thread(f"held-{number}") for number in range(SAVERS)]

        async def save(task: int) -> None:
            await threads[task].asave(states[next(numbers) % STATES])

        async def save_held(task: int) -> None:
            await held_threads[task].asave(states[next(numbers) % STATES])

        async def insert(task: int) -> None:
            number = next(numbers)
            await connections[task].execute(INSERT, (number, texts[number % STATES]), prepare=True, binary=True)

        for warm in (save, insert, save_held):
            await _rate(warm, length_s / 4)
        for _ in range(rounds):
            ours.append(await _rate(save, length_s))
            bare.append(await _rate(insert, length_s))
            held.append(await _rate(save_held, length_s))
    for connection in connections:
        await connection.close()
    return median(ours), median(bare), median(held)


async def _rate(action: Callable[[int], Awaitable[None]], length_s: float) -> float:
    """How often per second 32 tasks do it."""
    done = 0
    start = time.perf_counter()

    async def task(number: int) -> None:
        nonlocal done
        while time.perf_counter() < start + length_s:
            await action(number)
            done += 1

    await asyncio.gather(*map(task, range(SAVERS)))
    return done / (time.perf_counter() - start)
