"""Taking back what is in doubt or fails on the way, and by an operator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, hooked
from sagas_kit import Trip

import perdure
from perdure.runs.execution.hooks import Point


def strike_at(at: str, name: str) -> Callable[[Point], None]:
    def strike(point: Point) -> None:
        if f"{point.when} {point.kind}" == at and point.name == name:
            raise Interrupt

    return strike


# --- doubts and failures on the way


def test_what_is_in_doubt_is_settled_before_anything_is_undone(store: perdure.Store) -> None:
    lab, did, limits = Lab(store, "async"), list[str](), list[asyncio.Timeout]()

    async def cancel(what: str) -> None:
        did.append(f"-{what}")

    @perdure.effect(undo=cancel)
    async def book(what: str) -> None:
        did.append(f"+{what}")
        if what == "hotel":
            limits[-1].reschedule(asyncio.get_running_loop().time())  # broken off in its body: nobody knows
            await asyncio.sleep(60)

    @perdure.durable(undo_on=ValueError)
    async def agent() -> None:
        await book("flight")
        try:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await book("hotel")
        except TimeoutError:
            raise ValueError("give up") from None

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert did == ["+flight", "+hotel"]  # nothing is undone yet
    [ask] = lab.store.questions("r")
    assert ask.kind == "doubt"
    assert ask.step is not None
    run.resolve(ask.step, done=None)
    with pytest.raises(perdure.RunFailed, match="give up"):
        run.result()
    assert did == ["+flight", "+hotel", "-hotel", "-flight"]


@pytest.mark.parametrize("verdict", ["done", "not done"])
def test_an_undo_in_doubt_asks_and_is_not_repeated(lab: Lab, verdict: str) -> None:
    trip = Trip(lab, timeout_s=0.05)

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(trip.book("hotel"))
        perdure.undo("enough")

    at = "before done" if verdict == "done" else "before body"
    with hooked(strike_at(at, "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    [ask] = lab.store.questions("r")
    assert (ask.kind, ask.step) == ("doubt", "undo:2")
    if verdict == "done":
        run.resolve("undo:2", done=None)
    else:
        run.resolve("undo:2", not_done=True)
    with pytest.raises(perdure.RunUndone, match="enough"):
        run.result()
    assert trip.did == ["+flight", "+hotel", "-hotel", "-flight"]


def test_an_undo_with_reconcile_settles_itself(lab: Lab) -> None:
    found: list[Any] = []
    trip: Trip

    def find(key: str, what: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
        found.append(what)
        return perdure.outcome.Done(None) if f"-{what}" in trip.did else perdure.outcome.NotDone()

    trip = Trip(lab, reconcile=find, timeout_s=0.05)

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(trip.book("hotel"))
        raise ValueError("no")

    with hooked(strike_at("before done", "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.refresh().status == "failed"
    assert trip.did == ["+flight", "+hotel", "-hotel", "-flight"]
    assert found == ["hotel"]


def test_an_undo_that_fails_leaves_the_run_stuck_and_it_goes_on_when_mended(lab: Lab) -> None:
    did: list[str] = []
    broken = {"hotel": True}

    def cancel(what: str) -> None:
        did.append(f"try -{what}")
        if broken.get(what):
            raise ValueError("the hotel does not answer the phone")
        did.append(f"-{what}")

    undo = perdure.effect(name="cancel_or_not", retries=1, backoff_s=0, definite=ValueError)(lab.body(cancel))

    @lab.effect(undo=undo)
    def book(what: str) -> None:
        did.append(f"+{what}")

    @lab.durable(undo_on=KeyError)
    async def agent() -> None:
        for what in ("flight", "hotel", "car"):
            await lab(book(what))
        raise KeyError("reason")

    run = lab.run(agent, id="r")
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck, match=r"perdure run resume r|run the same line again") as caught:
        run.result()
    assert "does not answer the phone" in str(caught.value)
    assert did == ["+flight", "+hotel", "+car", "try -car", "-car", "try -hotel", "try -hotel"]
    assert lab.run(agent, id="r").status == "stuck"  # the same line tries again
    broken.clear()
    assert run.resume() == "queued"
    with pytest.raises(perdure.RunFailed, match="reason"):
        run.result()
    assert did[-4:] == ["try -hotel", "-hotel", "try -flight", "-flight"]
    assert did.count("-car") == 1


class Busy(Exception):
    """Of the undo's own package: nothing was cancelled."""


def test_a_plain_undo_is_tried_again_by_itself(lab: Lab) -> None:
    did: list[str] = []

    def cancel(what: str) -> None:
        did.append(f"-{what}")
        if len(did) == 2:
            raise Busy

    @lab.effect(undo=lab.body(cancel))
    def book(what: str) -> None:
        did.append(f"+{what}")

    @lab.durable
    async def agent() -> None:
        await lab(book("flight"))
        perdure.undo()

    assert lab.run(agent, id="r").status == "undone"
    assert did == ["+flight", "-flight", "-flight"]


# --- by an operator


def test_an_operator_undoes_a_run_that_waits(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(perdure.ask("Go on?"))

    run = lab.run(agent, id="r")
    assert run.undo() == "queued"
    assert lab.run(agent, id="r").status == "undone"
    assert trip.did == ["+flight", "-flight"]
    assert lab.store.questions() == []
    assert run.undo() == "undone"


def test_an_operator_undoes_a_run_that_is_done(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        return "gone"

    run = lab.run(agent, id="r")
    assert run.result() == "gone"
    assert run.undo() == "queued"
    with pytest.raises(perdure.RunUndone):
        run.result()
    assert trip.did == ["+flight", "-flight"]


def test_an_operator_undoes_a_run_that_is_running(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.step()
    def meanwhile() -> None:
        assert lab.store.get_run("r").undo() == "running"  # its owner is told

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        await lab(meanwhile())
        await lab(trip.book("hotel"))
        return "gone"

    run = lab.run(agent, id="r")
    assert run.refresh().status == "undone"
    assert trip.did == ["+flight", "-flight"]


@pytest.mark.parametrize("at", ["before finish", "before park"])
def test_an_undo_at_the_last_moment_is_not_lost(lab: Lab, at: str) -> None:
    trip, once = Trip(lab), Once()

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        if at == "before park":
            await lab(perdure.ask("Go on?"))
        return "gone"

    def strike(point: Point) -> None:
        if f"{point.when} {point.kind}" == at and not once.reached:
            once.reached = 1
            # From another thread: an operator is not on this run's event loop.
            asked = threading.Thread(target=lambda: lab.store.get_run("r").undo())
            asked.start()
            asked.join(20)

    with hooked(strike):
        run = lab.run(agent, id="r")
    assert run.refresh().status == "undone"
    assert trip.did == ["+flight", "-flight"]


def test_an_undo_of_an_operator_may_meet_a_doubt(lab: Lab) -> None:
    trip = Trip(lab, timeout_s=0.05)

    @lab.step()
    def meanwhile() -> None:
        lab.store.get_run("r").undo()

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(meanwhile())

    with hooked(strike_at("before done", "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    run.resolve("undo:1", done=None)
    with pytest.raises(perdure.RunUndone):
        run.result()
    assert trip.did == ["+flight", "-flight"]


def test_an_undo_that_was_interrupted_goes_on(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        for what in ("a", "b", "c"):
            await lab(trip.book(what))
        raise ValueError("reason")

    with hooked(strike_at("after done", "undo book")), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert trip.did == ["+a", "+b", "+c", "-c"]
    run = lab.run(agent, id="r")
    assert run.refresh().status == "failed"
    assert trip.did == ["+a", "+b", "+c", "-c", "-b", "-a"]
    with pytest.raises(perdure.RunFailed, match="reason"):
        run.result()
