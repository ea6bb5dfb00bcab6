"""What a run draws, spends, gives time to, begins anew and does in tasks: the same on every replay."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from lab import Flaky, Interrupt, Lab, Once, again

import perdure

# --- recorded values


def test_values_that_a_run_draws_are_the_same_on_every_replay(lab: Lab) -> None:
    once = Once()
    seen: list[list[Any]] = []

    @lab.step()
    def work() -> None:
        pass

    @lab.durable
    async def agent() -> list[Any]:
        drawn = [perdure.now(), perdure.random(), perdure.uuid(), perdure.random()]
        seen.append(drawn)
        await lab(work())
        once.interrupt()
        return drawn

    found = again(lab, agent, id="r").result()
    assert found == seen[0] == seen[1]
    when, chance, number, other = found
    assert abs(when - datetime.now(UTC)) < timedelta(minutes=1)
    assert 0 <= chance < 1
    assert isinstance(number, UUID)
    assert other != chance


def test_patched_sends_new_runs_the_new_way_and_old_runs_the_old_one(lab: Lab) -> None:
    once, fresh = Once(), Once()

    @lab.step()
    def old() -> str:
        perdure.emit("at work")
        return "old"

    @lab.step()
    def new() -> str:
        return "new"

    @lab.durable(name="changing")
    async def before() -> list[str]:
        found = [await lab(old()), await lab(old())]
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(before, id="r")

    @lab.durable(name="changing")
    async def after() -> list[str]:
        found = [await lab(new() if perdure.patched("first") else old()), await lab(old())]
        if perdure.patched("tail"):  # both runs come here for the first time
            found.append(await lab(new()))
        fresh.interrupt()
        return [*found, str(perdure.patched("first")), str(perdure.patched("tail"))]

    assert again(lab, after, id="new").result() == ["new", "old", "new", "True", "True"]
    assert lab.run(after, id="r").result() == ["old", "old", "new", "False", "True"]


# --- deadlines of parts, new beginnings


def test_a_timeout_is_recorded_and_raises_at_the_same_call_again(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number

    @lab.durable
    async def agent() -> list[Any]:
        found: list[Any] = []
        try:
            with perdure.timeout(0.05):
                found.append(await lab(work(1)))
                await lab(perdure.sleep(0.06))
                found.append(await lab(work(2)))
        except TimeoutError:
            found.append("late")
        once.interrupt()
        with perdure.timeout(60):
            found.append(await lab(work(3)))
        return found

    assert again(lab, agent, id="r").result() == [1, "late", 3]
    assert lab.ran == [1, 3]


def test_a_timeout_ends_a_wait(lab: Lab) -> None:
    @lab.durable
    async def asking() -> str:
        try:
            with perdure.timeout(0.05):
                return str(await lab(perdure.ask("Who?")))
        except TimeoutError:
            return "late"

    @lab.durable
    async def receiving() -> str:
        try:
            with perdure.timeout(0.05):
                return str(await lab(perdure.receive()))
        except TimeoutError:
            return "late"

    for number, agent in enumerate((asking, receiving)):
        assert lab.run(agent, id=f"r{number}").result(timeout_s=20) == "late"
        assert lab.run(agent, id=f"r{number}").result() == "late"
    assert lab.store.questions() == []


def test_continue_as_new_begins_again_with_an_empty_journal(lab: Lab) -> None:
    entries: list[int] = []

    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number

    @lab.durable
    async def agent(round: int, total: int = 0) -> int:
        entries.append(len(lab.store.get_run("r").steps()))
        perdure.now()
        total += await lab(work(round))
        if round < 4:
            perdure.continue_as_new(round + 1, total=total)
        return total

    run = lab.run(agent, 1, id="r")
    assert run.result() == 10
    assert lab.ran == [1, 2, 3, 4]
    assert entries == [0, 0, 0, 0]
    assert [step.name for step in run.steps()] == ["perdure.now", "work"]
    assert lab.run(agent, 1, id="r").result() == 10  # the arguments that it was started with still name it


# --- tasks


def test_plain_tasks_of_asyncio_replay_right(store: perdure.Store) -> None:
    lab, once = Lab(store, "async"), Once()

    @perdure.step
    async def work(name: str, turns: int) -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        lab.ran.append(name)
        return name

    async def branch(name: str, turns: int) -> list[str]:
        return [await work(name, turns), await work(name + "'", 0)]

    @perdure.durable
    async def agent() -> list[Any]:
        # The second time the branches take other times; each finds its own steps.
        slow, fast = (50, 0) if not once.reached else (0, 50)
        gathered = await asyncio.gather(branch("a", slow), branch("b", fast), work("c", slow))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branch(name, turns)) for name, turns in (("d", fast), ("e", slow))]
        once.interrupt()
        return [*gathered, *(task.result() for task in tasks), await work("f", 0)]

    # What is passed to the steps differs, and must not: it is an input.
    work.perdure.ignore = ("turns",)
    work.perdure.__dict__.pop("binder", None)
    run = again(lab, agent, id="r")
    assert run.result() == [["a", "a'"], ["b", "b'"], "c", ["d", "d'"], ["e", "e'"], "f"]
    assert sorted(lab.ran) == sorted(["a", "a'", "b", "b'", "c", "d", "d'", "e", "e'", "f"])
    assert len({step.path for step in run.steps()}) == 10


def test_a_sync_step_in_a_task_may_wait_for_its_next_attempt(store: perdure.Store) -> None:
    """A sync step of an async run cannot be suspended: it ends its branch, and the run parks."""
    lab = Lab(store, "async")

    @perdure.step(retries=1, backoff_s=3600)
    def call() -> None:
        lab.ran.append("call")
        raise Flaky("no")

    async def branch() -> None:
        call()

    @perdure.durable
    async def agent() -> None:
        await asyncio.gather(branch(), branch())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert getattr(run.refresh().waiting_for, "kind", None) in ("retry", "all")
    assert lab.run(agent, id="r").status == "waiting"
    assert lab.count("call") <= 2


async def test_every_operation_has_an_async_twin(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.step
    async def work(number: int) -> int:
        return number * 2

    @perdure.durable
    async def agent(number: int) -> int:
        return await work(number) + int(await perdure.ask("More?", schema=int))

    run = await lab.store.arun(agent, 4, id="r")
    assert (await run.arefresh()).status == "waiting"
    [ask] = await lab.store.aquestions("r")
    assert ask.text == "More?"
    assert (await lab.store.aanswer("r", 3, who="bob")).settled
    assert await run.aresult() == 11
    assert (await run.arefresh()).status == "done"
    assert [step.name for step in await run.asteps()] == ["work", "perdure.ask"]
    assert [event.kind async for event in run.astream()][-1] == "status"
    assert (await lab.store.aget_run("r")).id == "r"
    assert [info.id for info in await lab.store.aruns()] == ["r"]
    queued = await lab.store.astart(agent, 1, id="s")
    assert await queued.apause() == "paused"
    assert await queued.aresume() == "queued"
    assert await queued.acancel() == "cancelled"
    with pytest.raises(perdure.RunCancelled):
        await queued.aresult()


async def test_a_sync_agent_runs_beside_an_async_caller(store: perdure.Store) -> None:
    lab = Lab(store, "sync")
    ticks: list[int] = []

    @perdure.step
    def work() -> int:
        return threading.get_ident()

    @perdure.durable
    def agent() -> int:
        return work()

    async def tick() -> None:
        ticks.append(1)

    run, _ = await asyncio.gather(lab.store.arun(agent, id="r"), tick())
    assert await run.aresult() != threading.get_ident()
