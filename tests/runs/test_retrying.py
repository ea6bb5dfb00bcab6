"""A defect of the code is no decision: what a run did stands, and the run continues where it failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lab import Lab
from sagas_kit import Trip

import perdure
from perdure.errors import RunError


class SoldOut(Exception):
    """A decision: the trip is off."""


class Agent:
    """Books, then fails as `fails` says."""

    def __init__(self, lab: Lab) -> None:
        self.trip = Trip(lab)
        self.fails: BaseException | None = KeyError("a defect")

        @lab.durable(name="agent", undo_on=SoldOut)
        async def agent() -> str:
            booked = await lab(self.trip.book("flight"))
            if self.fails is not None:
                raise self.fails
            await lab(self.trip.book("hotel"))
            return str(booked)

        self.run: Any = agent


def test_an_error_that_ends_with_a_full_stop_gets_no_second_one(lab: Lab) -> None:
    @lab.durable
    async def agent() -> None:
        raise ValueError("Missing credentials.")

    with pytest.raises(perdure.RunFailed, match=r"Missing credentials\. `perdure run retry r`") as caught:
        lab.run(agent, id="r").result()
    assert caught.value.error == "ValueError: Missing credentials."


def test_a_defect_leaves_effects_standing_and_the_run_continues_after_a_fix(lab: Lab) -> None:
    agent = Agent(lab)
    run = lab.run(agent.run, id="r")
    assert (run.refresh().status, agent.trip.did) == ("failed", ["+flight"])
    with pytest.raises(perdure.RunFailed, match=r"KeyError: 'a defect'. What it did stands: `perdure run retry r`"):
        run.result()
    agent.fails = None
    assert lab.run(agent.run, id="r").status == "failed"  # the same line again asks for what became of it
    assert run.retry() == "queued"
    assert run.result() == "booking of flight"
    assert agent.trip.did == ["+flight", "+hotel"]
    assert run.retry() == "done"
    assert lab.store.ops.verify().ok


def test_the_error_of_a_run_without_effects_names_the_command_that_continues_it(lab: Lab) -> None:
    @lab.durable
    async def agent() -> None:
        raise KeyError("a defect")

    with pytest.raises(perdure.RunFailed, match=r"'a defect'. `perdure run retry r` continues it after a fix"):
        lab.run(agent, id="r").result()


def test_a_defect_leaves_effects_standing_until_an_operator_undoes_them(lab: Lab) -> None:
    agent = Agent(lab)
    run = lab.run(agent.run, id="r")
    assert run.undo() == "queued"
    assert lab.run(agent.run, id="r").status == "undone"
    assert agent.trip.did == ["+flight", "-flight"]


@pytest.mark.parametrize(
    ("error", "undone"),
    [
        (SoldOut("no"), True),
        (ExceptionGroup("both", [SoldOut("a"), SoldOut("b")]), True),
        (ExceptionGroup("one is a defect", [SoldOut("a"), KeyError("b")]), False),
    ],
    ids=["declared", "group", "mixed"],
)
def test_only_declared_errors_undo(lab: Lab, error: Exception, undone: bool) -> None:
    agent = Agent(lab)
    agent.fails = error
    run = lab.run(agent.run, id="r")
    assert (run.refresh().status, agent.trip.did) == ("failed", ["+flight", "-flight"] if undone else ["+flight"])
    if undone:
        assert run.undo() == "failed"
        with pytest.raises(RunError, match="its effects were undone"):
            run.retry()
    with pytest.raises(perdure.RunFailed) as failed:
        run.result()
    assert ("`perdure run retry r`" in str(failed.value)) is not undone


@pytest.mark.parametrize("kind", ["step", "effect"])
def test_the_call_that_a_run_failed_with_runs_again_with_its_retries_and_its_key(lab: Lab, kind: str) -> None:
    keys: list[str] = []
    down = [True]

    def body(key: perdure.IdempotencyKey | None = None) -> str:
        keys.append(str(key))
        if down[0] or len(keys) == 3:
            raise ConnectionError("down")
        return "up"

    options: dict[str, Any] = {"name": "call", "retries": 1, "backoff_s": 0.001}
    call = lab.step(**options)(body) if kind == "step" else lab.effect(**options, definite=ConnectionError)(body)

    @lab.step()
    def before() -> str:
        lab.ran.append("before")
        return "was"

    @lab.durable
    async def agent() -> str:
        return f"{await lab(before())} {await lab(call())}"

    run = lab.run(agent, id="r")
    assert (run.refresh().status, len(keys)) == ("failed", 2)
    down[0] = False
    assert run.retry() == "queued"
    assert run.result() == "was up"
    assert (len(keys), len(set(keys)), lab.ran) == (4, 1, ["before"])  # one retry of its own again
    assert [step.status for step in run.steps()] == ["done", "done"]


def test_an_error_that_the_code_went_on_from_is_not_tried_again(lab: Lab) -> None:
    """Else the code would pass what it did then."""
    down, did = [True], list[str]()

    @lab.step(name="search")
    def search() -> str:
        did.append("search")
        if down[0]:
            raise ConnectionError("down")
        return "found"

    @lab.effect(name="mail")
    def mail() -> None:
        did.append("mail")

    @lab.durable
    async def agent() -> str:
        try:
            return str(await lab(search()))
        except ConnectionError:
            await lab(mail())
            raise

    run = lab.run(agent, id="r")
    down[0] = False
    assert run.retry() == "queued"
    with pytest.raises(perdure.RunFailed, match="down"):
        run.result()
    assert did == ["search", "mail"]


def test_an_effect_in_doubt_is_settled_by_a_retry_not_repeated(lab: Lab) -> None:
    did: list[str] = []
    found: list[str] = []

    def find() -> perdure.outcome.Done | perdure.outcome.Unknown:
        return perdure.outcome.Done(found[0]) if found else perdure.outcome.Unknown()

    @lab.effect(name="pay", on_doubt="fail", timeout_s=0.01, reconcile=lab.body(find))
    def pay() -> str:
        did.append("paid")
        raise TimeoutError

    @lab.durable
    async def agent() -> str:
        return str(await lab(pay()))

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.RunFailed, match="InDoubt"):
        run.result()
    found.append("ch_1")
    assert run.retry() == "queued"
    assert (run.result(), did) == ("ch_1", ["paid"])


def test_branches_that_failed_run_again_and_others_do_not(store: perdure.Store) -> None:
    lab = Lab(store, "async")
    down = [True]

    @perdure.step
    async def visit(city: str) -> str:
        lab.ran.append(city)
        if down[0] and city != "Rome":
            raise ConnectionError(city)
        return city

    @perdure.durable
    async def agent() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(visit(city)) for city in ("Rome", "Oslo")]
        return [task.result() for task in tasks]

    run = lab.run(agent, id="r")
    assert run.refresh().status == "failed"
    down[0] = False
    assert run.retry() == "queued"
    assert run.result() == ["Rome", "Oslo"]
    assert sorted(lab.ran) == ["Oslo", "Oslo", "Rome"]


def test_a_failed_child_is_retried_then_its_parent(lab: Lab) -> None:
    trip, fails = Trip(lab), [True]

    @lab.durable(name="child_agent")
    async def child_agent() -> str:
        await lab(trip.book("opera"))
        if fails[0]:
            raise KeyError("a defect")
        return "evening"

    @lab.durable
    async def agent() -> str:
        child = await lab(perdure.spawn(child_agent, id="c"))
        return str(await lab(child.result()))

    run = lab.run(agent, id="r")
    assert (run.refresh().status, lab.store.get_run("c").status) == ("failed", "failed")
    fails[0] = False
    assert lab.store.get_run("c").retry() == "queued"
    assert run.retry() == "queued"
    assert run.result(timeout_s=20) == "evening"
    assert trip.did == ["+opera"]


def test_a_child_that_failed_is_undone_with_its_parent(lab: Lab) -> None:
    trip = Trip(lab)

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        await lab(trip.book("opera"))
        raise KeyError("a defect")

    @lab.durable(undo_on=perdure.RunFailed)
    async def agent() -> None:
        child = await lab(perdure.spawn(child_agent, id="c"))
        await lab(child.result())

    with pytest.raises(perdure.RunFailed):
        lab.run(agent, id="r").result(timeout_s=20)
    assert (trip.did, lab.store.get_run("c").status) == (["+opera", "-opera"], "undone")
