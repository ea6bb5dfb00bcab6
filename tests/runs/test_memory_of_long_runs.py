"""Memory does not grow with the results that a run records: large ones stay in the database until they are needed."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

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
