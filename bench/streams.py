"""Tokens on their way to a reader in another process: how late they are, and what 50 a second cost the step.

A step emits 50 values a second, each with the time. The reader of another process takes the difference: both have the
same clock. The cost is CPU time of a process whose step computes for 20 ms between two values, with and without
emitting them, in turns; the fastest of each counts, because a busy machine only makes them slower.
Run as a module it is the reader: `python -m bench.streams URL`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import quantiles

import perdure
from bench.measure import Row, Run, answer_of, in_child
from perdure.testing.postgres_server import PostgresServer

BAR_MS = 200.0
BAR_COST = 1.05
_RATE = 50


@perdure.step(name="bench.talk")
def talk(count: int) -> int:
    begun = time.perf_counter()
    for number in range(count):
        perdure.emit({"token": "word ", "at": time.time()})
        time.sleep(max(0.0, begun + (number + 1) / _RATE - time.perf_counter()))
    return count


@perdure.step(name="bench.compute")
def compute(count: int, loops: int, emits: bool) -> int:
    for number in range(count):
        _spin(loops)
        if emits:
            perdure.emit({"token": "word ", "number": number})
    return count


@perdure.durable(name="bench.streaming")
def streaming(count: int) -> int:
    return talk(count)


@perdure.durable(name="bench.computing")
def computing(count: int, loops: int, emits: bool) -> int:
    return compute(count, loops, emits)


def streams(run: Run) -> list[Row]:
    rows = _measure(run, "SQLite", str(run.folder / "streams.db"))
    with PostgresServer() as server:
        return rows + _measure(run, "PostgreSQL", server.create_database("streams"))


def _measure(run: Run, database: str, url: str) -> list[Row]:
    with perdure.open(url) as store:
        store.start(streaming, run.count(500, 10), id="talk", queue="here")
        reader = in_child("bench.streams", url)
        assert reader.stdout is not None
        assert reader.stdout.readline()  # it follows the run
        store.run(streaming, run.count(500, 10), id="talk")
        late_ms: list[float] = answer_of(reader)
        p50, p95 = (quantiles(late_ms, n=100)[at - 1] for at in (50, 95))
        cost = _cost(run, store)
    return [
        Row(f"{database} stream: p50", p50, "ms", note="an emitted value, until another process has it"),
        Row(f"{database} stream: p95", p95, "ms", bar=BAR_MS, judged="ours", note=f"{len(late_ms)} values, 50 a second"),
        Row(f"{database} stream: cost", 100 * (cost - 1), "%", ratio=cost, bar=BAR_COST,
            note="CPU time of a busy step that emits 50 values a second"),
    ]  # fmt: skip


def _cost(run: Run, store: perdure.Store) -> float:
    loops = 20_000
    while (took := _cpu_s(_spin, loops)) < 0.02:
        loops = int(loops * 0.02 / took) + 1
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(run.count(6, 1)):
        for emits, some in times.items():
            some.append(_cpu_s(store.run, computing, run.count(100, 5), loops, emits))
    return min(times[True]) / min(times[False])


def _cpu_s(action: Callable[..., object], *arguments: object) -> float:
    begun = time.process_time()
    action(*arguments)
    return time.process_time() - begun


def _spin(loops: int) -> int:
    found = 0
    for number in range(loops):
        found = (found * 31 + number) & 0xFFFF
    return found


def _read(url: str) -> None:
    late_ms: list[float] = []
    with perdure.open(url) as store:
        print("ready", flush=True)
        events = store.get_run("talk").stream()
        late_ms += [1000 * (time.time() - event.value["at"]) for event in events if event.kind == "chunk"]
    print(json.dumps(late_ms))


if __name__ == "__main__":
    _read(sys.argv[1])
