"""From one thread to many: what a save, a load and a page of a list take in stores of growing size.

Then a steady thousand writes a second, paced, so that their latency is that of a service and not of a queue. Sizes are
small here; `python -m bench.scale 100000 [URL]` measures one store of any size: an empty file, or `postgresql://…`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from itertools import count as numbers
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import psycopg

import perdure
from bench.measure import Row, Run, seconds
from perdure.testing.postgres_server import PostgresServer

SIZES = (1, 10_000, 100_000)
RATE, RATE_S = 1000, 10
BAR = 3.0  # how much longer a call may take in the largest store than with one thread
_SAVERS, _ROUNDS = 64, 200
# A chat of four short turns, as a thread has it: about 1 KB.
STATE = {"messages": [{"role": role, "content": "x" * 220} for role in ("user", "assistant") * 2], "step": 0}


class Figures(NamedTuple):
    """Milliseconds of a save, a load and a page of 20; bytes of a thread; threads created in a second."""

    save: float
    load: float
    page: float
    thread_bytes: float
    per_s: float


def scale(run: Run) -> list[Row]:
    rounds = run.count(_ROUNDS, 5)
    rows: list[Row] = []
    with PostgresServer(fsync=True) as server:
        for name in ("SQLite", "PostgreSQL"):
            first: Figures | None = None
            for size in SIZES:
                url = str(run.folder / f"{size}.db") if name == "SQLite" else server.create_database(f"scale{size}")
                figures = measured(url, run.count(size, min(size, 20)), rounds)
                rows += _rows(name, size, figures, first)
                first = first or figures
        for name, url in (("SQLite", str(run.folder / "rate.db")), ("PostgreSQL", server.create_database("rate"))):
            rows.append(_paced(name, url, run.count(RATE_S, 1), run.count(RATE, 20)))
    return rows


def _rows(name: str, size: int, figures: Figures, first: Figures | None = None) -> list[Row]:
    """Return the rows of a store. Those of a larger one are judged by the store with one thread.

    A page is not: with one thread it has one row. All threads were saved within minutes, and a list sorts those of the
    same minute, so this page is slower than that of a store that grew over months.
    """
    where = f"{name}, {size:,} thread{'s' if size > 1 else ''}"
    note = f"{figures.thread_bytes:,.0f} B a thread; {figures.per_s:,.0f} threads created a second"
    named = {"a save": "", "a load of a cold thread": "", "the 20 newest threads": note}
    ratios = [None] * 3 if first is None else [now / then for now, then in zip(figures[:3], first[:3], strict=True)]
    return [
        Row(f"{where}: {what}", took, "ms", ratio=ratio, bar=None if ratio is None or said else BAR, note=said)
        for (what, said), took, ratio in zip(named.items(), figures[:3], ratios, strict=True)
    ]


def measured(url: str, size: int, rounds: int) -> Figures:
    """Fill a store with threads of three checkpoints, then time single calls on threads spread over it."""
    with perdure.open(url) as store:
        began = time.perf_counter()
        asyncio.run(_fill(store, size))
        per_s = size / (time.perf_counter() - began)
    stored = _size(url) / size
    saves, loads, pages = [], [], []
    with perdure.open(url, cache_bytes=0) as store:  # a process that has seen none of the threads
        for turn in range(rounds):
            thread = store.thread(_name(turn * 7919 % size))
            loads.append(seconds(thread.load))
            saves.append(seconds(lambda thread=thread, turn=turn: thread.save({**STATE, "step": turn})))  # type: ignore[misc]
            pages.append(seconds(lambda: store.threads(limit=20)))
    save, load, page = (median(times) * 1000 for times in (saves, loads, pages))
    return Figures(save, load, page, stored, per_s)


def _size(url: str) -> int:
    """Return the bytes of the whole database, indexes included.

    PostgreSQL first counts its rows, as autovacuum does within a minute: until then it plans for empty tables.
    """
    if "://" not in url:
        return Path(url).stat().st_size
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ANALYZE")
        [size] = connection.execute("SELECT pg_database_size(current_database())").fetchone() or [0]
    return int(size)


async def _fill(store: perdure.Store, size: int) -> None:
    todo = iter(range(size))

    async def saver() -> None:
        for number in todo:
            thread = store.thread(_name(number), metadata={"user": f"u{number % 1000}"})
            for step in range(3):
                await thread.asave({**STATE, "step": step})

    await asyncio.gather(*(saver() for _ in range(_SAVERS)))


def _name(number: int) -> str:
    return f"user-{number:08}"


def _paced(name: str, url: str, span_s: int, rate: int) -> Row:
    """Save at fixed times, whatever the saves before take. Latency counts from the time that was due."""
    with perdure.open(url) as store:
        latencies, took = asyncio.run(_saves_at(store, rate * span_s, rate))
    p99 = quantiles(latencies, n=100)[98] * 1000
    note = f"median {median(latencies) * 1000:.1f} ms, 99 % within {p99:.1f} ms; {span_s} s, 200 threads"
    what = f"{name}: saves a second, {rate:,} due"
    return Row(what, rate * span_s / took, "saves/s", bar=0.95 * rate, sense="at least", judged="ours", note=note)


async def _saves_at(store: perdure.Store, total: int, rate: int) -> tuple[list[float], float]:
    threads = [store.thread(_name(number)) for number in range(200)]
    for thread in threads:
        await thread.asave(STATE)
    latencies: list[float] = []
    steps = numbers(1)
    began = time.perf_counter()

    async def writer(first: int) -> None:
        for number in range(first, total, len(threads)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await threads[first].asave({**STATE, "step": next(steps)})
            latencies.append(time.perf_counter() - due)

    await asyncio.gather(*(writer(first) for first in range(len(threads))))
    return latencies, time.perf_counter() - began


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES[-1]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        url = sys.argv[2] if len(sys.argv) > 2 else str(Path(folder) / "scale.db")
        for row in _rows(url.partition(":")[0] if "://" in url else "SQLite", size, measured(url, size, _ROUNDS)):
            print(f"{row.name}: {row.ours:.2f} {row.unit}  {row.note}")


if __name__ == "__main__":
    main()
