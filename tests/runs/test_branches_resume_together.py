"""Parallel branches that resume at the same time share one journal index: none of them disturbs another.

The interpreter switches threads every microsecond here, so that an unguarded iteration over what siblings change fails
within a few runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure

BRANCHES, RACES = 8, 12
crash: list[bool] = []


class Crash(BaseException):
    """Ends the process's work on a run the way Ctrl-C does: the run is queued and can be resumed."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path / "agent.db"), durability="normal") as opened:
        yield opened


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@perdure.step
def number(value: int) -> int:
    return value


@perdure.step
def crash_once() -> str:
    if crash:
        crash.clear()
        raise Crash
    return "resumed"


def races(branch: int) -> int:
    """Decide many small races, so that a resume drops the losers' rows while sibling branches read theirs."""
    return sum(perdure.first(lambda: number(branch), lambda: number(branch)) for _ in range(RACES))


@perdure.durable
def racing() -> tuple[list[int], str]:
    return perdure.gather(*[lambda n=n: races(n) for n in range(BRANCHES)]), crash_once()


def draws(branch: int) -> int:
    return sum(number(branch) + 0 * hash(perdure.uuid()) for _ in range(RACES * 4))


async def araces(branch: int) -> int:
    async def one() -> int:
        return number(branch)

    return sum([await perdure.first(one(), one()) for _ in range(RACES)])


@perdure.durable
async def aracing() -> tuple[list[int], str]:
    """Half of the branches race on the event loop; the others run their steps on threads."""
    halves = [araces(n) if n % 2 else asyncio.to_thread(draws, n) for n in range(BRANCHES)]
    return await perdure.gather(*halves), crash_once()


def test_threads_that_forget_the_losers_of_a_race_do_not_disturb_their_siblings(store: perdure.Store) -> None:
    for attempt in range(5):
        crash.append(True)
        with pytest.raises(Crash):
            store.run(racing, id=f"r{attempt}")
        again = store.run(racing, id=f"r{attempt}")
        assert again.result() == ([n * RACES for n in range(BRANCHES)], "resumed")


async def test_tasks_and_the_threads_they_wait_for_do_not_disturb_each_other(store: perdure.Store) -> None:
    for attempt in range(5):
        crash.append(True)
        with pytest.raises(Crash):
            await store.arun(aracing, id=f"r{attempt}")
        again = await store.arun(aracing, id=f"r{attempt}")
        expected = [n * RACES if n % 2 else n * RACES * 4 for n in range(BRANCHES)]
        assert await again.aresult() == (expected, "resumed")
