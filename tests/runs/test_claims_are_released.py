"""A run that is interrupted anywhere is free at once: for this process and for others. Leases are 30 s here."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from typing import Any

import pytest
from interrupted_kit import IN_TASKS
from lab import Interrupt, Lab, hooked

import perdure
from perdure.runs.execution.hooks import Point
from perdure.runs.execution.scope import current

STRUCK = perdure.__file__.rpartition("/")[0]


@perdure.step
def double(number: int) -> int:
    return 2 * number


@perdure.durable
def pair(number: int) -> list[int]:
    return [double(number), double(number + 1)]


@perdure.step
async def adouble(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


@perdure.durable
async def apair(number: int) -> list[int]:
    return [await adouble(number), await adouble(number + 1)]


class Strike:
    """Raises KeyboardInterrupt in this thread, where Python looks for signals: as calls begin and end. `at` is the
    number of that moment."""

    def __init__(self, at: int) -> None:
        self.at, self.moments = at, 0

    def __enter__(self) -> Strike:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, _: Any) -> None:
        if event == "c_call" or (event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR):
            return  # raised as a generator yields, an error would pass it by
        if frame.f_code.co_name in ("<genexpr>", "__del__"):
            return  # raised as the object is closed or collected, Python ignores it
        if frame.f_code.co_filename.startswith(STRUCK):
            self.moments += 1
            if self.moments == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt


def moments_of(store: perdure.Store) -> int:
    """How many moments a run has."""
    store.run(pair, 0)
    with Strike(at=0) as count:
        store.run(pair, 0)
    return count.moments


def test_ctrl_c_at_any_moment_leaves_the_run_free(lab: Lab, elsewhere: perdure.Store) -> None:
    total = moments_of(lab.store)
    assert total > 300
    interrupted = 0
    for number, at in enumerate(range(1, total, max(1, total // 70))):
        try:
            with Strike(at):
                lab.store.run(pair, number, id=f"r{number}")
        except KeyboardInterrupt:
            interrupted += 1
        assert current.get() is None, at  # the caller is not in the run
        assert elsewhere.run(pair, number, id=f"r{number}").result(timeout_s=2) == [2 * number, 2 * number + 2], at
    assert interrupted > 50


def test_a_cancelled_arun_leaves_the_run_free(lab: Lab, elsewhere: perdure.Store) -> None:
    async def main() -> int:
        cancelled = 0
        for turns in range(60):
            task = asyncio.create_task(lab.store.arun(apair, turns, id=f"r{turns}"))
            for _ in range(turns if turns < 40 else turns * 20):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            run = await elsewhere.arun(apair, turns, id=f"r{turns}")
            assert await run.aresult(timeout_s=2) == [2 * turns, 2 * turns + 2], turns
        return cancelled

    assert asyncio.run(main()) > 20


def test_the_same_process_resumes_before_the_release(sync_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release takes its time; the process that gave the run up need not wait for it."""
    lab, claims, go = sync_lab, sync_lab.store._runs._runtime.claims, threading.Event()
    release = claims._release
    monkeypatch.setattr("perdure.runs.engine.claims._WAIT_S", 0.01)
    monkeypatch.setattr(claims, "_release", lambda claim: go.wait(20) and release(claim))

    def hook(point: Point) -> None:
        if (point.kind, point.when) == ("claim", "after") and lab.store.get_run("r").refresh().attempts == 1:
            raise Interrupt

    with hooked(hook), pytest.raises(Interrupt):
        lab.run(pair, 1, id="r")
    assert lab.store.get_run("r").status == "running"
    assert lab.run(pair, 1, id="r").status == "done"
    go.set()
    claims.settle()
    assert lab.store.get_run("r").status == "done"  # what was given up was another claim


def test_a_run_that_breaks_off_in_a_worker_is_queued_again(sync_lab: Lab) -> None:
    broke = threading.Event()

    def hook(point: Point) -> None:
        if (point.kind, point.when) == ("claim", "after") and not broke.is_set():
            broke.set()
            raise Interrupt

    run = sync_lab.store.start(pair, 1)
    worker = perdure.Worker(sync_lab.store, [pair])
    with hooked(hook):
        worker.run(until_idle=True)
    sync_lab.store._runs._runtime.claims.settle()
    assert (broke.is_set(), run.refresh().status) == (True, "queued")


def test_an_exit_in_a_task_of_a_worker_ends_only_its_run(sync_lab: Lab) -> None:
    runs = [sync_lab.store.start(function, "SystemExit") for function in IN_TASKS]
    other = sync_lab.store.start(apair, 1)
    perdure.Worker(sync_lab.store, [*IN_TASKS, apair]).run(until_idle=True)
    assert ([run.refresh().status for run in runs], other.refresh().status) == (["stuck"] * 3, "done")
