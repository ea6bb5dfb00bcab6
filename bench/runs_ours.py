"""Our side of the benchmark of durable runs: `python -m bench.runs_ours PATH|URL`, a child that does what it is told.

The same functions as in `bench.runs_dbos`, with the same results, and effects, which DBOS does not have.
The store is opened as its documentation says: full durability. Only the long run that is to be resumed is built with
`durability="normal"`: how it came to be is not measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import perdure
from bench.runs_contenders import serve, stop_here, texts

POOL = 32


@dataclass(slots=True)
class _Child:
    """What bodies have to know."""

    texts: list[str] = field(default_factory=list)
    building: bool = False
    began_at: float = 0.0
    took_s: float = 0.0


child = _Child()


@perdure.step
def note(number: int) -> dict[str, int]:
    return {"number": number}


@perdure.step
async def anote(number: int) -> dict[str, int]:
    return {"number": number}


@perdure.effect
def act(number: int, key: perdure.IdempotencyKey) -> dict[str, int]:
    return {"number": number}


@perdure.step
def write(number: int) -> str:
    return child.texts[number]


@perdure.step
def last() -> None:
    if child.building:
        stop_here()
    child.took_s = time.perf_counter() - child.began_at


@perdure.durable
def plain(count: int) -> int:
    for number in range(count):
        note(number)
    return count


@perdure.durable
async def aplain(count: int) -> int:
    for number in range(count):
        await anote(number)
    return count


@perdure.durable
def acting(count: int) -> int:
    for number in range(count):
        act(number)
    return count


@perdure.durable
def writing(count: int) -> int:
    for number in range(count):
        write(number)
    return count


@perdure.durable
def long(count: int) -> int:
    for number in range(count):
        note(number)
    last()
    return count


def _steps(store: perdure.Store, count: int) -> float:
    start = time.perf_counter()
    assert store.run(plain, count).result() == count
    return time.perf_counter() - start


def _effects(store: perdure.Store, count: int) -> float:
    start = time.perf_counter()
    assert store.run(acting, count).result() == count
    return time.perf_counter() - start


async def _many(store: perdure.Store, count: int, runs: int) -> float:
    start = time.perf_counter()
    handles = await asyncio.gather(*(store.arun(aplain, count // runs) for _ in range(runs)))
    took_s = time.perf_counter() - start
    assert [await handle.aresult() for handle in handles] == [count // runs] * runs
    return took_s


def _texts(store: perdure.Store, count: int, run: str) -> float:
    child.texts = texts(count)
    start = time.perf_counter()
    assert store.run(writing, count, id=run).result() == count
    return time.perf_counter() - start


def _fork(store: perdure.Store, run: str, kept: int) -> float:
    """Fork with so many steps kept; it is not run."""
    start = time.perf_counter()
    store.fork(run, at=kept)
    return time.perf_counter() - start


def _queue(store: perdure.Store, count: int, prefix: str) -> float:
    """Leave runs of one step to workers."""
    start = time.perf_counter()
    for number in range(count):
        store.start(plain, 1, id=f"{prefix}{number}")
    return time.perf_counter() - start


def _build(store: perdure.Store, count: int, run: str) -> None:
    """Leave a run of `count` finished steps behind, and wait to be killed in it."""
    child.building = True
    store.run(long, count, id=run)


def _resume(store: perdure.Store, count: int, run: str) -> float:
    """From the call that resumes it to its first new step: the claim and the reading are in it."""
    child.began_at = time.perf_counter()
    assert store.run(long, count, id=run).result() == count
    return child.took_s


def _main(location: str, durability: str) -> None:
    with (
        perdure.open(location, durability="normal" if durability == "normal" else "full") as store,
        asyncio.Runner() as loop,
    ):

        def on(action: Callable[..., object]) -> Callable[..., object]:
            return lambda *arguments: action(store, *arguments)

        serve(
            {
                "steps": on(_steps),
                "effects": on(_effects),
                "many": lambda count, runs: loop.run(_many(store, count, runs)),
                "texts": on(_texts),
                "fork": on(_fork),
                "queue": on(_queue),
                "build": on(_build),
                "resume": on(_resume),
            }
        )


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "full")
