"""first: who was first stays first in a replay; and branches that are runs of their own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from lab import Interrupt, Lab, Once
from parallel_kit import PATIENCE_S, Order, again, branch, ordered

import perdure

# --- first


def test_the_first_to_succeed_wins_and_only_its_branch_is_replayed(lab: Lab) -> None:
    once, order = Once(), Order("b", "only when it is free")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        lab.ran.append(f"begin {name}")
        return await lab(work(name))

    async def fails() -> None:
        raise LookupError("no")

    @lab.durable
    async def agent() -> Any:
        found = await lab(perdure.first(branch(lab, fails), branch(lab, go, "a"), branch(lab, go, "b")))
        order.free()
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    lab.ran.clear()
    run = lab.run(agent, id="r")
    assert run.result() == "B"
    assert [what for what in lab.ran if what.startswith("begin")] == ["begin b"]
    assert lab.step_at(run, "1").result == 2


def test_if_all_fail_the_error_of_the_first_by_position_is_raised_again_and_again(lab: Lab) -> None:
    once, order = Once(), Order("b", "a")
    work = ordered(lab, order)

    async def fails(name: str) -> None:
        await lab(work(name))
        raise LookupError(name)

    @lab.durable
    async def agent() -> Any:
        try:
            await lab(perdure.first(branch(lab, fails, "a"), branch(lab, fails, "b")))
        except LookupError as error:
            once.interrupt()
            return str(error)

    assert again(lab, agent, id="r").result() == "a"


def test_a_question_against_the_clock(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(perdure.ask("Which?"))

    async def gives_up() -> str:
        await lab(perdure.sleep(1.2))
        return "too late"

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.first(branch(lab, asks), branch(lab, gives_up)))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert len(lab.store.questions("r")) == 1
    assert run.result(timeout_s=PATIENCE_S) == "too late"
    assert lab.store.questions("r") == []
    with pytest.raises(perdure.errors.AnswerRefused):
        lab.store.answer("r", "me", step="2.1")


def test_what_a_loser_waited_for_does_not_wake_the_run_later(lab: Lab) -> None:
    async def sleeps() -> Any:
        await lab(perdure.sleep(3000))

    async def wins() -> str:
        return "won"

    @lab.durable
    async def agent() -> Any:
        await lab(perdure.first(branch(lab, sleeps), branch(lab, wins)))
        return await lab(perdure.ask("And now?"))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert getattr(run.refresh().waiting_for, "kind", None) == "question"
    assert run.refresh().wake_at is None
    lab.store.answer("r", "home")
    assert run.result() == "home"


def test_a_loser_in_a_long_body_holds_up_nobody_but_the_end_of_the_run(store: perdure.Store) -> None:
    """A thread cannot be stopped: the effect that it is in ends, and is recorded, before the run does."""
    lab = Lab(store, "sync")
    begun, go_on = threading.Event(), threading.Event()

    @perdure.effect
    def slow(key: perdure.IdempotencyKey) -> str:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "slow"

    @perdure.step
    def later() -> None:
        lab.ran.append("after the race")

    def loses() -> str:
        slow()
        lab.ran.append("slow has ended")
        later()
        lab.ran.append("went on")
        return "slow"

    def wins() -> str:
        assert begun.wait(PATIENCE_S)
        return "fast"

    @perdure.durable
    def agent() -> str:
        found = perdure.first(loses, wins)
        lab.ran.append("won")
        go_on.set()
        return found

    run = lab.run(agent, id="r")
    assert run.result() == "fast"
    assert lab.ran == ["won", "slow has ended"]
    assert [(step.name, step.status) for step in run.steps() if step.kind == "effect"] == [("slow", "done")]


def test_a_loser_is_cancelled_in_an_async_run_but_not_out_of_an_effect(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.step
    async def long() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            lab.ran.append("step cancelled")

    @perdure.effect
    async def book(key: perdure.IdempotencyKey) -> str:
        await asyncio.sleep(0.05)
        lab.ran.append("booked")
        return "booked"

    async def wins() -> str:
        while not lab.store.get_run("r").steps():
            await asyncio.sleep(0.001)
        return "fast"

    @perdure.durable
    async def agent() -> Any:
        found: Any = await perdure.first(long(), book(), wins())
        lab.ran.append("won")
        return found

    run = lab.run(agent, id="r")
    assert run.result() == "fast"
    assert lab.ran == ["step cancelled", "won", "booked"]
    assert [(step.name, step.status) for step in run.steps() if step.kind == "effect"] == [("book", "done")]


def test_a_patch_after_a_race_is_not_misled_by_what_losers_recorded(lab: Lab) -> None:
    order = Order("a", "b")
    work = ordered(lab, order)
    new_code = [False]

    async def two(name: str) -> Any:
        return [await lab(work(name)), await lab(perdure.ask("Which?"))]

    async def one(name: str) -> Any:
        return await lab(work(name))

    @lab.durable
    async def agent() -> Any:
        found = await lab(perdure.first(branch(lab, two, "a"), branch(lab, one, "b")))
        await lab(perdure.ask("And now?"))
        return [found, perdure.patched("after") if new_code[0] else None]

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    new_code[0] = True
    [ask] = lab.store.questions("r")
    lab.store.answer("r", "on", step=ask.path)
    assert run.result() == ["B", True]


# --- children


def test_gather_of_children(lab: Lab) -> None:
    @lab.durable(name=f"child-{id(lab)}")
    async def child(number: int) -> int:
        return number * 10

    async def one(number: int) -> Any:
        started = await lab(perdure.spawn(child, number))
        return await lab(started.result())

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.gather(*(branch(lab, one, number) for number in range(5))))

    assert lab.run(agent, id="r").result(timeout_s=PATIENCE_S) == [0, 10, 20, 30, 40]
    assert len(lab.store.runs(limit=None)) == 6
