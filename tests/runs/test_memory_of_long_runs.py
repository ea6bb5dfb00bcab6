"""Memory does not grow with the results that a run records: large ones stay in the database until they are needed."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import perdure

STEPS, SIZE = 60, 1_000_000
ALLOWED_BYTES = 25_000_000
crash: list[bool] = []


class Crash(BaseException):
    """Ends the process's work on a run the way Ctrl-C does: the run is queued and can be resumed."""


@perdure.step
def page(number: int) -> bytes:
    return number.to_bytes(4, "big") + os.urandom(SIZE - 4)


@perdure.step
def crash_once() -> None:
    if crash:
        crash.clear()
        raise Crash


@perdure.durable
def reading() -> int:
    total = sum(int.from_bytes(page(number)[:4], "big") for number in range(STEPS))
    crash_once()
    return total


def test_a_run_with_large_results_stays_small_also_when_it_is_resumed(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "agent.db"), durability="normal") as store:
        crash.append(True)
        tracemalloc.start()
        try:
            with pytest.raises(Crash):
                store.run(reading, id="a")
            first = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            run = store.run(reading, id="a")
            resumed = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert run.result() == sum(range(STEPS))
    assert first < ALLOWED_BYTES
    assert resumed < ALLOWED_BYTES


PAGES, PAGE_BYTES, PAGES_ALLOWED_BYTES = 300, 30_000, 2_500_000  # all of them: 9 MB
grown: list[int] = []
undone: list[tuple[int, bytes]] = []


def _take_back(number: int, result: bytes) -> None:
    undone.append((number, result))


@perdure.effect(undo=_take_back)
def post(number: int) -> bytes:
    return number.to_bytes(2, "big") + os.urandom(PAGE_BYTES)  # cannot be compressed


@perdure.step
def fetch(number: int, after: bytes) -> bytes:
    return after[:1] + os.urandom(PAGE_BYTES)


@perdure.step
async def afetch(number: int, after: bytes) -> bytes:
    return after[:1] + os.urandom(PAGE_BYTES)


@perdure.durable
def many() -> None:
    before, last = tracemalloc.get_traced_memory()[0], b""
    for number in range(PAGES):
        last = fetch(number, last)
    grown.append(tracemalloc.get_traced_memory()[0] - before)
    crash_once()


@perdure.durable
async def amany() -> None:
    before, last = tracemalloc.get_traced_memory()[0], b""
    for number in range(PAGES):
        last = await afetch(number, last)
    grown.append(tracemalloc.get_traced_memory()[0] - before)
    crash_once()


@pytest.mark.parametrize("fn", [many, amany])
def test_results_that_the_code_was_given_are_not_kept(tmp_path: Path, fn: Any) -> None:
    with perdure.open(str(tmp_path / "agent.db"), durability="normal") as store:
        crash[:] = [True]
        grown.clear()
        tracemalloc.start()
        try:
            with pytest.raises(Crash):
                _run(store, fn)
            _run(store, fn)
        finally:
            tracemalloc.stop()
    first, resumed = grown
    assert first < PAGES_ALLOWED_BYTES
    assert resumed < 0  # the journal was read before: what is given to the code is let go


def _run(store: perdure.Store, fn: Any) -> perdure.Run:
    return asyncio.run(store.arun(fn, id="a")) if fn is amany else store.run(fn, id="a")


class Refused(Exception):
    """What the run is undone for."""


@perdure.durable(undo_on=(Refused,))
def posting() -> None:
    posted = [post(number) for number in range(3)]
    digests.append(posted)
    crash_once()
    raise Refused


digests: list[list[bytes]] = []


@pytest.mark.parametrize("is_killed", [False, True])
def test_undo_gets_results_that_are_not_in_memory(tmp_path: Path, is_killed: bool) -> None:
    undone.clear()
    digests.clear()
    with perdure.open(str(tmp_path / "agent.db"), durability="normal") as store:
        crash[:] = [True] * is_killed
        if is_killed:
            with pytest.raises(Crash):
                store.run(posting, id="a")
        assert store.run(posting, id="a").status == "failed"
    results = digests[0]
    assert all(posted == results for posted in digests)
    assert undone == [(number, results[number]) for number in (2, 1, 0)]
