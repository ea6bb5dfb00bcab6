"""Ctrl-C may come just before the main thread waits for a lock. CPython then handles it only after the wait.

Here another thread receives the signal, which does not end the wait either. test_interrupting.py runs this file in a
process of its own.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import perdure
from perdure.runs.execution import unwinds

PATIENCE_S = 30
ended = threading.Event()
missed: list[str] = []


def interrupt(wait: str) -> None:
    """Interrupt the process when its main thread waits in this function of Perdure. Return when the test has ended."""
    until_s = time.monotonic() + PATIENCE_S
    while not _is_in(wait):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.raise_signal(signal.SIGINT)
    if not ended.wait(PATIENCE_S):
        missed.append(wait)


def _is_in(wait: str) -> bool:
    """Return whether the main thread waits in threading or queue, called by the function `wait`."""
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    names: list[str] = []
    while frame is not None and len(names) < 4:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return wait in names


@perdure.step
def interrupting(wait: str) -> None:
    interrupt(wait)


@perdure.step
async def ainterrupting(wait: str) -> None:
    threading.Thread(target=interrupt, args=(wait,)).start()
    await asyncio.sleep(PATIENCE_S)


@perdure.step
def quick() -> None:
    pass


@perdure.step
def slow() -> None:
    ended.wait(PATIENCE_S)


@perdure.durable
def branches() -> Any:
    return perdure.gather(lambda: interrupting("get"), slow)


@perdure.durable
def a_loser() -> Any:
    return perdure.first(quick, lambda: interrupting("join"))


@perdure.durable
async def beside_a_loop() -> Any:
    return await ainterrupting("_on_a_loop")


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unwinds, "ROUND_S", 0.05)
    ended.clear()
    missed.clear()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@pytest.mark.usefixtures("masked")
@pytest.mark.parametrize("function", [branches, a_loser, beside_a_loop], ids=lambda each: each.__name__)
def test_ctrl_c_just_before_a_wait_is_handled_during_it(tmp_path: Path, function: Any) -> None:
    async def call() -> Any:
        return store.run(function, id="r")

    with perdure.open(tmp_path / "runs.db") as store, asyncio.Runner() as runner:
        loop = runner.get_loop()
        try:
            with pytest.raises(KeyboardInterrupt):
                # Not `Runner.run`, which has a handler of its own.
                loop.run_until_complete(call()) if function is beside_a_loop else store.run(function, id="r")
        finally:
            ended.set()
        assert not missed
        assert store.get_run("r").refresh().status == "queued"
