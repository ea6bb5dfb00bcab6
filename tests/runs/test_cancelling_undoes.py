"""Cancelling a run undoes what it did, by whoever has its code; with nothing to undo it ends at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, Once, hooked
from sagas_kit import Trip

import perdure
from perdure.errors import JournalDamaged, RunError
from perdure.runs.execution.hooks import Point
from perdure.storage.program import Batch, Sql, drive, write

_SPOIL = Sql("UPDATE journal SET body = :body WHERE tenant = :tenant")


def waiting_agent(lab: Lab, trip: Trip) -> Any:
    @lab.durable(name="agent")
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(trip.book("car"))
        await lab(perdure.ask("Go on?"))

    return agent


# --- who undoes


@pytest.mark.parametrize("by", ["the same line", "result", "a worker"])
def test_a_run_that_waits_is_undone_then_cancelled(lab: Lab, by: str) -> None:
    trip = Trip(lab)
    agent = waiting_agent(lab, trip)
    run = lab.run(agent, id="r")
    assert run.cancel() == "queued"
    assert trip.did == ["+flight", "+car"]
    if by == "the same line":
        lab.run(agent, id="r")
    elif by == "a worker":
        perdure.Worker(lab.store).run(until_idle=True)
    with pytest.raises(perdure.RunCancelled, match="'r' was cancelled, and what it did was undone"):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "+car", "-car", "-flight"]
    assert (run.refresh().status, lab.store.questions()) == ("cancelled", [])
    assert run.cancel() == run.undo() == "cancelled"
    lab.run(agent, id="r")
    assert len(trip.did) == 4
    assert lab.store.ops.verify().ok


def test_a_run_of_another_process_is_undone_there(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("""
import sys, time
import perdure

did = []

@perdure.effect(undo=lambda what: did.append("-" + what))
def book(what: str) -> None:
    did.append("+" + what)

@perdure.step
def look(number: int) -> None:
    print("looking", flush=True)
    time.sleep(0.01)

@perdure.durable
def agent() -> None:
    book("flight")
    for number in range(1000):
        look(number)

with perdure.open(sys.argv[1]) as store:
    print(store.run(agent, id="r").status, did)
""")
    url = str(tmp_path / "runs.db")
    with subprocess.Popen([sys.executable, str(script), url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looking\n"
        with perdure.open(url) as store:
            assert store.get_run("r").cancel() == "running"
        *_, said = process.stdout.read().splitlines()
    assert said == "cancelled ['+flight', '-flight']"


# --- nothing to undo


def test_effects_without_an_undo_that_have_ended_do_not_hold_a_cancellation_up(lab: Lab) -> None:
    @lab.effect()
    def mail() -> None:
        pass

    @lab.durable
    async def agent() -> None:
        await lab(mail())
        await lab(perdure.ask("?"))

    assert lab.run(agent, id="r").cancel() == "cancelled"


def test_children_without_effects_do_not_hold_a_cancellation_up(lab: Lab) -> None:
    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        pass

    @lab.durable
    async def agent() -> None:
        child = await lab(perdure.spawn(child_agent, id="c"))
        await lab(child.result())
        await lab(perdure.ask("?"))

    run = lab.run(agent, id="r")
    assert run.cancel() == "cancelled"
    assert lab.store.get_run("c").status == "done"


# --- children


def test_children_are_undone_too_whether_they_have_ended_or_not(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent(what: str, waits: bool) -> None:
        await lab(trip.book(what))
        if waits:
            await lab(perdure.ask("?"))

    @lab.durable(name="middle_agent")
    async def middle_agent() -> None:
        child = await lab(perdure.spawn(child_agent, "opera", True, id="waits"))
        await lab(child.result())

    @lab.durable
    async def agent() -> None:
        child = await lab(perdure.spawn(child_agent, "museum", False, id="done"))
        await lab(child.result())
        child = await lab(perdure.spawn(middle_agent, id="middle"))
        await lab(child.result())

    run = lab.run(agent, id="r")
    assert run.cancel() == "queued"
    with pytest.raises(perdure.RunCancelled):
        run.result(timeout_s=20)
    assert trip.did == ["+museum", "+opera", "-opera", "-museum"]
    found = {info.id: info.status for info in lab.store.runs()}
    assert found == {"r": "cancelled", "done": "undone", "middle": "cancelled", "waits": "cancelled"}
    assert lab.store.questions() == []


# --- at a bad moment


def test_a_cancellation_that_comes_while_the_run_ends_is_carried_out(lab: Lab) -> None:
    trip = Trip(lab)
    once = Once()

    @lab.durable
    async def agent() -> str:
        await lab(trip.book("flight"))
        return "done"

    def strike(point: Point) -> None:
        if (point.kind, point.when) == ("finish", "before") and not once.reached:
            once.reached = 1
            asked = threading.Thread(target=lab.store.get_run("r").cancel)
            asked.start()
            asked.join(20)

    with hooked(strike):
        run = lab.run(agent, id="r")
    assert (run.refresh().status, trip.did) == ("cancelled", ["+flight", "-flight"])


def test_an_undo_that_fails_leaves_the_run_stuck_until_it_is_mended_or_left_standing(lab: Lab) -> None:
    trip = Trip(lab, retries=0, definite=ValueError)
    is_broken = True

    def cancel(what: str) -> None:
        if is_broken:
            raise ValueError("closed today")
        trip.did.append(f"-{what}")

    undo = perdure.effect(name="cancel", definite=ValueError)(lab.body(cancel))

    @lab.effect(name="reserve", undo=undo)
    def reserve(what: str) -> None:
        trip.did.append(f"+{what}")

    @lab.durable
    async def agent(what: str) -> None:
        await lab(reserve(what))
        await lab(perdure.ask("?"))

    runs = [lab.run(agent, what, id=what) for what in ("flight", "car")]
    for run in runs:
        assert run.cancel() == "queued"
        with pytest.raises(perdure.RunStuck, match="closed today"):
            run.result(timeout_s=20)
    is_broken = False
    assert runs[0].cancel() == "queued"  # as good as to resume it
    with pytest.raises(perdure.RunCancelled):
        runs[0].result(timeout_s=20)
    assert runs[1].cancel(undo=False) == "cancelled"
    assert trip.did == ["+flight", "+car", "-flight"]
    assert runs[1].undo() == "queued"


# --- what cannot be undone


def test_a_run_can_end_with_its_effects_standing_if_no_process_runs_it(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.step()
    def meanwhile() -> None:
        with pytest.raises(RunError, match="`perdure run pause r`"):
            lab.store.get_run("r").cancel(undo=False)

    @lab.durable
    async def agent() -> None:
        await lab(trip.book("flight"))
        await lab(meanwhile())
        await lab(perdure.ask("?"))

    run = lab.run(agent, id="r")
    assert run.cancel(undo=False) == "cancelled"
    assert (trip.did, lab.store.questions()) == (["+flight"], [])
    assert run.undo() == "queued"
    with pytest.raises(perdure.RunUndone):
        run.result(timeout_s=20)
    assert trip.did == ["+flight", "-flight"]


def test_a_run_whose_journal_is_damaged_is_not_taken_for_one_without_effects(lab: Lab) -> None:
    run = lab.run(waiting_agent(lab, Trip(lab)), id="r")
    assert run.undo() == "queued"
    context = lab.store._context
    tenant = drive(context.driver, context.ensure_tenant())
    drive(context.driver, write(partial(_spoil, tenant)))
    with pytest.raises(perdure.RunStuck, match="journal"):
        run.result(timeout_s=20)
    assert run.refresh().request == "undo"  # for when the journal is repaired: the run must not continue then
    with pytest.raises(JournalDamaged, match="perdure run cancel r --no-undo"):
        run.cancel()
    assert run.cancel(undo=False) == "cancelled"


def _spoil(tenant: int) -> Any:
    yield Batch(_SPOIL(tenant=tenant, body=b"spoiled"))
