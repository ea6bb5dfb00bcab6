"""Steps: retries and deadlines."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from lab import Flaky, Lab

import perdure
from perdure.runs.execution.execution import Execution

# --- retries


def test_an_attempt_that_fails_is_tried_again_after_its_backoff(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def answered_late(execution: Execution) -> None:
        execution.skew_us = -100_000

    monkeypatch.setattr(Execution, "set_clock", answered_late)
    times: list[float] = []

    @lab.step(retries=3, backoff_s=0.04, retry_on=(Flaky,))
    def call() -> str:
        times.append(time.monotonic())
        if len(times) < 3:
            raise Flaky(f"attempt {len(times)}")
        return "ok"

    @lab.durable
    async def agent() -> Any:
        return await lab(call())

    run = lab.run(agent, id="r")
    assert run.result() == "ok"
    first, second, third = times
    assert second - first >= 0.02  # half of the backoff, at least; then it doubles
    assert third - second >= 0.04
    [step] = run.steps()
    assert (step.attempts, step.status, step.error) == (3, "done", None)


@pytest.mark.parametrize(
    ("options", "attempts"),
    [
        ({"retries": 2}, 3),
        ({"retries": 2, "retry_on": (KeyError,)}, 1),
        ({"retries": 2, "retry_on": lambda error: "Flaky" in repr(error)}, 3),
        ({}, 1),
    ],
)
def test_which_errors_are_tried_again_and_how_often(lab: Lab, options: dict[str, Any], attempts: int) -> None:
    @lab.step(backoff_s=0, **options)
    def call() -> None:
        lab.ran.append("call")
        raise Flaky("no")

    @lab.durable
    async def agent() -> str:
        try:
            await lab(call())
        except Flaky as error:
            return f"gave up: {error}"
        return ""

    run = lab.run(agent, id="r")
    assert run.result() == "gave up: no"
    assert lab.count("call") == attempts
    [step] = run.steps()
    assert (step.status, step.attempts) == ("failed", attempts)


def test_a_long_backoff_parks_the_run_and_the_attempts_go_on_counting(lab: Lab) -> None:
    @lab.step(retries=1, backoff_s=3600)
    def call() -> None:
        lab.ran.append("call")
        raise Flaky("no")

    @lab.durable
    async def agent() -> None:
        await lab(call())

    run = lab.run(agent, id="r")
    info = run.refresh()
    assert info.status == "waiting"
    assert info.waiting_for is not None
    assert info.waiting_for.kind == "retry"
    assert info.wake_at is not None
    assert timedelta(minutes=29) < info.wake_at - datetime.now(UTC) < timedelta(minutes=61)
    assert lab.run(agent, id="r").status == "waiting"
    assert run.resume() == "queued"
    assert lab.run(agent, id="r").status == "waiting"  # it looked: still not due
    assert lab.count("call") == 1
    [step] = run.steps()
    assert (step.status, step.attempts, step.error) == ("retrying", 1, "Flaky: no")


# --- deadlines


def test_a_body_that_takes_too_long_is_given_up(lab: Lab) -> None:
    release = threading.Event()

    async def slow_async() -> None:
        lab.ran.append("slow")
        await asyncio.sleep(60)

    def slow() -> None:
        lab.ran.append("slow")
        release.wait(60)

    step = perdure.step(timeout_s=0.05, retries=1, backoff_s=0)(slow_async if lab.is_async else slow)

    @lab.durable
    async def agent() -> str:
        try:
            await lab(step())
        except TimeoutError as error:
            return str(error)
        return ""

    try:
        assert "0.05" in lab.run(agent, id="r").result()
    finally:
        release.set()
    assert lab.count("slow") == 2
