"""Calling a body once: the deadlines of async bodies and of those on threads."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from perdure.runs.calls.bodies import BodyTimeout, acall_in_time, call_in_time

SHORT_S = 0.05
current = contextvars.ContextVar("current", default="nothing")


class Refused(Exception):
    """An error of the body's own."""


def refuse() -> None:
    raise Refused("no")


async def test_an_async_body_is_cancelled_at_its_deadline() -> None:
    seen: list[str] = []

    async def body(word: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(word)
            raise

    with pytest.raises(BodyTimeout, match=r"look did not end within timeout_s=0.05") as caught:
        await acall_in_time(body, ("cancelled",), {}, timeout_s=SHORT_S, name="look")
    assert (caught.value.name, caught.value.timeout_s) == ("look", SHORT_S)
    assert seen == ["cancelled"]


async def test_a_timeout_error_of_the_bodys_own_is_not_ours() -> None:
    async def body() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine") as caught:
        await acall_in_time(body, (), {}, timeout_s=10, name="body")
    assert not isinstance(caught.value, BodyTimeout)


async def test_cancelling_an_async_body_from_outside_is_no_timeout() -> None:
    begun = asyncio.Event()

    async def body() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(acall_in_time(body, (), {}, timeout_s=10, name="body"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_timeout_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(BodyTimeout("late", name="look", timeout_s=2.0)))
    assert (str(copy), copy.name, copy.timeout_s) == ("late", "look", 2.0)


def test_a_plain_body_that_is_late_still_runs_while_the_caller_continues() -> None:
    release, ended = threading.Event(), threading.Event()

    def body() -> str:
        release.wait(60)
        ended.set()
        return "dropped"

    with pytest.raises(BodyTimeout, match="still runs on its thread"):
        call_in_time(body, (), {}, timeout_s=SHORT_S, name="body")
    assert not ended.is_set()
    release.set()
    assert ended.wait(60)


def test_a_plain_body_within_its_deadline_gives_its_result_or_error_and_sees_the_context() -> None:
    def within(fn: Any, *args: Any, timeout_s: float = 10) -> Any:
        return call_in_time(fn, args, {}, timeout_s=timeout_s, name="body")

    current.set("the run")
    assert within(current.get) == "the run"
    assert within(threading.get_ident) != threading.get_ident()
    assert within(len, "abc", timeout_s=1e30) == 3  # beyond what threads can wait
    with pytest.raises(Refused, match="no"):
        within(refuse)
    with pytest.raises(SystemExit):
        within(sys.exit, 3)


def test_a_late_body_does_not_keep_the_interpreter_from_ending() -> None:
    script = """
from threading import Event
from perdure.runs.calls.bodies import BodyTimeout, call_in_time
try:
    call_in_time(Event().wait, (), {}, timeout_s=0.01, name="wait")
except BodyTimeout:
    print("late")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "late\n")
