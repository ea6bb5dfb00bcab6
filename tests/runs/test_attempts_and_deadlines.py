"""What a second attack on durable runs found, in attempts, deadlines and doubts: the smallest case of each."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from lab import Flaky, Interrupt, Lab, Once, again, finished, hooked

import perdure
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.hooks import Point


class Signal:
    """What one branch does is seen by another one, on threads or on a loop."""

    def __init__(self) -> None:
        self._given = threading.Event()

    def give(self) -> None:
        self._given.set()

    async def seen(self, lab: Lab) -> None:
        if not lab.is_async:
            assert self._given.wait(60)
        while not self._given.is_set():
            await asyncio.sleep(0)


def failing(lab: Lab, kind: str, **options: Any) -> Any:
    """A step or an effect that fails for certain, at every attempt."""
    make: Any = lab.step if kind == "step" else partial(lab.effect, definite=Flaky)
    settings = {"retries": 9, "backoff_s": 0.05, **options}

    def call() -> None:
        lab.ran.append("call")
        raise Flaky("not today")

    return make(name="call", **settings)(call)


# --- an effect that is tried again although nobody wants it any more


@pytest.mark.parametrize("request_", ["cancel", "pause"])
def test_an_effect_is_not_tried_again_when_the_run_was_cancelled_or_paused(lab: Lab, request_: str) -> None:
    call = failing(lab, "effect")

    @lab.durable
    async def agent() -> Any:
        return await lab(call())

    def ask_for_it(point: Point) -> None:
        if (point.kind, point.when, lab.count("call")) == ("body", "after", 1):
            getattr(lab.store.get_run("a"), request_)()

    with hooked(ask_for_it):
        run = lab.run(agent, id="a")
    assert run.refresh().status == {"cancel": "cancelled", "pause": "paused"}[request_]
    assert lab.count("call") == 1
    assert lab.step_at(run, "1").status == "retrying"  # it failed for certain: that is no doubt


def test_a_loser_that_failed_for_certain_is_not_tried_again_and_leaves_no_doubt(lab: Lab) -> None:
    call = failing(lab, "effect", backoff_s=0.9)
    failed = Signal()

    @lab.step()
    def quick() -> str:
        return "quick"

    @lab.durable
    async def agent() -> Any:
        async def waits() -> Any:
            await failed.seen(lab)
            return await lab(quick())

        if lab.is_async:
            return await perdure.first(call(), waits())
        return perdure.first(call, lambda: finished(waits()))

    def hear(point: Point) -> None:
        if (point.kind, point.name, point.when) == ("body", "call", "after"):
            failed.give()

    with hooked(hear):
        run = lab.run(agent, id="a")
    assert (run.refresh().status, run.result(), lab.count("call")) == ("done", "quick", 1)
    assert [step.status for step in lab.named(run, "call")] == ["retrying"]


# --- perdure.timeout and attempts


@pytest.mark.parametrize("kind", ["step", "effect"])
@pytest.mark.parametrize("backoff_s", [0.0, 0.05, 3.0])
def test_no_attempt_begins_after_the_deadline(
    lab: Lab, kind: str, backoff_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = failing(lab, kind, backoff_s=backoff_s)
    once = Once()

    @lab.durable
    async def agent() -> str:
        try:
            with perdure.timeout(60):
                await lab(call())
        except TimeoutError:
            once.interrupt()
            return "over"
        return "not over"

    def pass_time(point: Point) -> None:
        if (point.kind, point.when) == ("body", "after"):
            monkeypatch.setattr(Execution, "ahead_us", 61_000_000)

    with hooked(pass_time):
        run = again(lab, agent, id="a")
    assert run.result() == "over"
    assert lab.count("call") == 1
    assert lab.named(run, "call")[0].status == "failed"


def test_a_short_sleep_ends_at_the_deadline(sync_lab: Lab) -> None:
    @perdure.durable(name="attacked_again.dozes")
    def agent() -> str:
        try:
            with perdure.timeout(0.05):
                perdure.sleep(0.9)
        except TimeoutError:
            return "over"
        return "slept"

    run = sync_lab.run(agent, id="a")
    assert run.result() == "over"
    assert sync_lab.store.replay(run).result == "over"


# --- what a run waits for when its function has ended


def in_doubt(lab: Lab, **options: Any) -> Any:
    """An effect that is interrupted in its body, once."""
    once = Once()

    @lab.effect(name="book", timeout_s=0.1, **options)
    def book() -> str:
        lab.ran.append("book")
        once.interrupt()
        return "booked"

    return book


@pytest.mark.parametrize("policy", ["ask", "retry", "fail"])
def test_a_doubt_of_a_loser_is_named_and_settled(sync_lab: Lab, policy: Any) -> None:
    lost, won = threading.Event(), threading.Event()

    @sync_lab.effect(name="loses", timeout_s=30, on_doubt=policy)
    def loses() -> None:
        lost.set()
        won.wait(60)
        raise ConnectionResetError("no answer")

    @sync_lab.durable
    async def agent() -> Any:
        return perdure.first(loses, lambda: lost.wait(60))

    def hear(point: Point) -> None:
        if (point.kind, point.path, point.when) == ("value", "1", "after"):
            won.set()

    with hooked(hear):
        run = sync_lab.run(agent, id="a")
    [loser] = sync_lab.named(run, "loses")
    if policy == "ask":
        assert run.refresh().status == "waiting"
        waiting = run.refresh().waiting_for
        assert waiting is not None
        assert (waiting.kind, waiting.step) == ("doubt", loser.path)
        run.resolve(loser, done="it was")
    else:  # nobody wants it any more: it is not run again, and nobody says that it did not happen
        assert "InDoubt" in str(loser.error)
    assert run.result(timeout_s=60) is True


@pytest.mark.parametrize("policy", ["ask", "retry", "fail"])
def test_what_is_in_doubt_is_not_taken_for_not_done_when_a_run_is_undone(lab: Lab, policy: Any) -> None:
    undone: list[Any] = []
    book = in_doubt(lab, on_doubt=policy, undo=lambda result: undone.append(result))

    @lab.durable
    async def agent() -> Any:
        return await lab(book())

    with pytest.raises(Interrupt):
        lab.run(agent, id="a")
    lab.store.get_run("a").undo()
    run = lab.run(agent, id="a")
    assert (run.refresh().status, undone) == ("waiting", [])
    run.resolve("1", done="booked")
    with pytest.raises(perdure.RunUndone):
        run.result(timeout_s=60)
    assert (undone, lab.count("book")) == (["booked"], 1)


def test_a_doubt_that_nothing_depends_on_is_said_to_be_one_when_a_run_is_undone(lab: Lab) -> None:
    book = in_doubt(lab, on_doubt="retry")

    @lab.durable
    async def agent() -> Any:
        return await lab(book())

    with pytest.raises(Interrupt):
        lab.run(agent, id="a")
    lab.store.get_run("a").undo()
    run = lab.run(agent, id="a")
    assert run.refresh().status == "undone"
    assert lab.count("book") == 1
    assert "InDoubt" in str(lab.step_at(run, "1").error)
