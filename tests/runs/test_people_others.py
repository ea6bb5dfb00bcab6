"""Waiting for time, for messages, for children; and what an operator may ask of a run meanwhile."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, hooked

import perdure
from perdure.runs.execution.hooks import Point

# --- time


def test_a_sleep_passes_once_also_across_restarts(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def agent() -> list[datetime]:
        before = perdure.now()
        await lab(perdure.sleep(1))
        after = perdure.now()
        once.interrupt()
        await lab(perdure.sleep(0))
        return [before, after]

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    points: list[Point] = []
    with hooked(points.append):
        before, after = lab.run(agent, id="r").result()
    assert "2" not in {point.path for point in points}  # not slept again
    assert after - before >= timedelta(seconds=1)


def test_a_long_sleep_parks_the_run(lab: Lab) -> None:
    @lab.durable
    async def agent() -> None:
        await lab(perdure.sleep(3600))

    run = lab.run(agent, id="r")
    info = run.refresh()
    assert info.status == "waiting"
    assert getattr(info.waiting_for, "kind", None) == "sleep"
    assert info.wake_at is not None
    assert timedelta(minutes=59) < info.wake_at - datetime.now(UTC) < timedelta(minutes=61)
    run.resume()
    assert lab.run(agent, id="r").status == "waiting"  # it looked, and the time has not come
    with pytest.raises(TimeoutError, match="sleep"):
        run.result(timeout_s=0.05)


def test_a_run_that_slept_goes_on_when_it_is_due(lab: Lab) -> None:
    @lab.durable
    async def agent() -> str:
        await lab(perdure.sleep(1.1))  # long enough to park
        return "awake"

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert run.result(timeout_s=20) == "awake"
    assert run.refresh().attempts == 2


def test_sleep_until_a_moment(lab: Lab) -> None:
    when = datetime.now(UTC) + timedelta(seconds=0.1)

    @lab.durable
    async def agent() -> datetime:
        await lab(perdure.sleep_until(when))
        await lab(perdure.sleep_until(datetime(2020, 1, 1, tzinfo=UTC)))  # long past
        return perdure.now()

    assert lab.run(agent, id="r").result() >= when


# --- messages


def test_messages_are_received_once_in_the_order_sent(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def agent() -> list[Any]:
        found = [await lab(perdure.receive()), await lab(perdure.receive())]
        once.interrupt()
        return [*found, await lab(perdure.receive()), await lab(perdure.receive("other"))]

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert getattr(run.refresh().waiting_for, "kind", None) == "message"
    lab.store.send("r", "late", topic="other")
    for number in (1, 2, 3):
        lab.store.send("r", {"number": number})
    with pytest.raises(Interrupt):
        run.result()
    assert lab.run(agent, id="r").result() == [{"number": 1}, {"number": 2}, {"number": 3}, "late"]


def test_the_same_key_is_the_same_message(lab: Lab) -> None:
    @lab.durable
    async def agent() -> list[Any]:
        return [await lab(perdure.receive(timeout_s=0.05, default="nothing")) for _ in range(3)]

    run = lab.store.start(agent, id="r")
    lab.store.send("r", "a", key="k1")
    lab.store.send("r", "a", key="k1")
    lab.store.send("r", "b", key="k2")
    assert lab.run(agent, id="r").result(timeout_s=20) == ["a", "b", "nothing"]
    lab.store.send("r", "a", key="k1")  # also when it was received long ago
    assert run.refresh().status == "done"


def test_a_receive_gives_up_after_its_time(lab: Lab) -> None:
    @lab.durable
    async def agent() -> list[Any]:
        return [await lab(perdure.receive(timeout_s=0)), await lab(perdure.receive(timeout_s=0.02, default=7))]

    assert lab.run(agent, id="r").result(timeout_s=20) == [None, 7]
    assert lab.run(agent, id="r").result() == [None, 7]


def test_runs_send_to_each_other_once(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def listener() -> list[Any]:
        return [await lab(perdure.receive("news")), await lab(perdure.receive("news", timeout_s=0.05, default="end"))]

    @lab.durable
    async def speaker() -> None:
        await lab(perdure.send("l", {"said": 1}, topic="news"))
        once.interrupt()

    heard = lab.run(listener, id="l")
    with pytest.raises(Interrupt):
        lab.run(speaker, id="s")
    lab.run(speaker, id="s").result()
    assert heard.result(timeout_s=20) == [{"said": 1}, "end"]


def test_a_message_to_a_run_that_is_not_there(lab: Lab) -> None:
    """The error is recorded: a run that comes later changes nothing on replay. So are values drawn before."""
    once = Once()

    @lab.step()
    def work(chance: float) -> float:
        return chance

    @lab.durable
    async def agent() -> list[Any]:
        chance = perdure.random()
        try:
            await lab(perdure.send("nobody", 1))
        except perdure.NotFound as error:
            found = str(error)
        else:
            found = "sent"
        again = await lab(work(chance))
        once.interrupt()
        return [found, chance == again]

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")

    @lab.durable(name="late")
    async def late() -> Any:
        return await lab(perdure.receive(timeout_s=0.01))

    lab.store.start(late, id="nobody")
    said, same = lab.run(agent, id="r").result()
    assert "nobody" in said
    assert same
    with pytest.raises(perdure.NotFound, match="nowhere"):
        lab.store.send("nowhere", 1)


# --- children


def test_a_child_is_started_once_and_waited_for(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number * 10

    @lab.durable(name="child_agent")
    async def child_agent(number: int) -> int:
        return int(await lab(work(number)))

    @lab.durable
    async def agent() -> list[Any]:
        first = await lab(perdure.spawn(child_agent, 1))
        second = await lab(perdure.spawn(child_agent, 2, id="second"))
        once.interrupt()
        found = [await lab(second.result()), await lab(first.result())]
        return [*found, first.id, second.id]

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.result(timeout_s=20) == [20, 10, "r/1", "second"]
    assert sorted(lab.ran) == [1, 2]
    infos = {info.id: info for info in lab.store.runs()}
    assert {name: info.is_child for name, info in infos.items()} == {"r": False, "r/1": True, "second": True}
    assert lab.run(agent, id="r").result() == [20, 10, "r/1", "second"]


def test_a_child_that_asks_parks_the_family_until_it_is_answered(lab: Lab) -> None:
    @lab.durable(name="child_agent")
    async def child_agent() -> Any:
        return await lab(perdure.ask("From below?"))

    @lab.durable
    async def agent() -> Any:
        child = await lab(perdure.spawn(child_agent, id="c"))
        return ["up", await lab(child.result())]

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert getattr(run.refresh().waiting_for, "run", None) == "c"
    lab.store.answer("c", 5)
    assert run.result(timeout_s=20) == ["up", 5]


def test_a_cancelled_parent_takes_its_children_along(lab: Lab) -> None:
    @lab.durable(name="grandchild_agent")
    async def grandchild_agent() -> None:
        await lab(perdure.ask("?"))

    @lab.durable(name="child_agent")
    async def child_agent() -> None:
        child = await lab(perdure.spawn(grandchild_agent, id="g"))
        await lab(child.result())

    @lab.durable
    async def agent() -> None:
        child = await lab(perdure.spawn(child_agent, id="c"))
        await lab(child.result())

    run = lab.run(agent, id="r")
    assert run.cancel() == "cancelled"
    assert {info.id: info.status for info in lab.store.runs()} == {"r": "cancelled", "c": "cancelled", "g": "cancelled"}
    assert lab.store.questions() == []


def test_a_child_with_an_id_that_is_taken(lab: Lab) -> None:
    once = Once()

    @lab.durable(name="child_agent")
    async def child_agent(number: int) -> int:
        return number

    @lab.durable
    async def agent() -> Any:
        chance = perdure.random()
        try:
            await lab(perdure.spawn(child_agent, 2, id="taken"))
        except perdure.errors.RunMismatch as error:
            once.interrupt()
            return ["taken" in str(error), chance == perdure.random()]
        return []

    lab.run(child_agent, 1, id="taken")
    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert lab.run(agent, id="r").result() == [True, False]


# --- operators


def test_a_run_that_waits_is_cancelled_at_once(lab: Lab) -> None:
    @lab.durable
    async def agent() -> None:
        await lab(perdure.ask("?"))

    run = lab.run(agent, id="r")
    assert run.cancel() == "cancelled"
    with pytest.raises(perdure.RunCancelled, match="'r'"):
        run.result()
    assert lab.run(agent, id="r").status == "cancelled"
    assert run.cancel() == run.pause() == run.resume() == "cancelled"


def test_a_running_run_is_cancelled_at_its_next_step(lab: Lab) -> None:
    @lab.step()
    def meanwhile() -> str:
        lab.ran.append("meanwhile")
        assert lab.store.get_run("r").cancel() == "running"
        return "done"

    @lab.step()
    def never() -> None:
        lab.ran.append("never")

    @lab.durable
    async def agent() -> None:
        try:
            await lab(meanwhile())
        finally:
            await lab(never())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "cancelled"
    assert lab.ran == ["meanwhile"]
    [step] = run.steps()
    assert (step.status, step.result) == ("done", "done")  # what was done is on record


def test_a_run_busy_with_a_long_body_hears_of_it(store: perdure.Store) -> None:
    """An async body is ended; the thread that keeps the leases tells it."""
    lab = Lab(store, "async")
    import asyncio

    begun = threading.Event()

    @perdure.step
    async def slow() -> None:
        begun.set()
        await asyncio.sleep(60)

    @perdure.durable
    async def agent() -> None:
        await slow()

    def cancel() -> None:
        assert begun.wait(20)
        lab.store.get_run("r").cancel()

    operator = threading.Thread(target=cancel)
    operator.start()
    run = lab.run(agent, id="r")
    operator.join(20)
    assert run.refresh().status == "cancelled"


def test_pause_and_resume_of_a_run_that_waits(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("?"))

    run = lab.run(agent, id="r")
    assert run.pause() == "paused"
    lab.store.answer("r", "yes")  # answers are taken meanwhile
    assert lab.run(agent, id="r").status == "paused"
    assert run.pause() == "paused"
    assert run.resume() == "queued"
    assert run.result() == "yes"


def test_pause_of_a_running_run_takes_effect_at_its_next_step(lab: Lab) -> None:
    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        if number == 1:
            lab.store.get_run("r").pause()
        return number

    @lab.durable
    async def agent() -> list[int]:
        return [await lab(work(number)) for number in (1, 2)]

    run = lab.run(agent, id="r")
    assert run.refresh().status == "paused"
    assert lab.ran == [1]
    assert run.resume() == "queued"
    assert lab.run(agent, id="r").result() == [1, 2]
    assert lab.ran == [1, 2]


@pytest.mark.parametrize("wish", ["cancel", "pause"])
def test_what_is_asked_for_while_the_run_parks_is_not_lost(lab: Lab, wish: str) -> None:
    once = Once()

    @lab.durable
    async def agent() -> None:
        await lab(perdure.ask("?"))

    def strike(point: Point) -> None:
        if (point.kind, point.when) == ("park", "before") and not once.reached:
            once.reached = 1
            asked = threading.Thread(target=getattr(lab.store.get_run("r"), wish))
            asked.start()
            asked.join(20)

    with hooked(strike):
        run = lab.run(agent, id="r")
    assert run.refresh().status == {"cancel": "cancelled", "pause": "paused"}[wish]


def test_started_runs_wait_for_a_worker_and_any_line_may_take_them_up(lab: Lab) -> None:
    @lab.durable
    async def agent(number: int) -> int:
        return number + 1

    queued = lab.store.start(agent, 1, id="r", queue="slow", priority=3)
    info = queued.refresh()
    assert (info.status, info.queue, info.priority, info.attempts) == ("queued", "slow", 3, 0)
    assert lab.store.start(agent, 1, id="r").id == "r"
    assert lab.run(agent, 1, id="r").result() == 2
    later = lab.store.start(agent, 1, id="later", delay_s=3600)
    assert lab.run(agent, 1, id="later").status == "queued"
    assert later.cancel() == "cancelled"
    assert later.refresh().attempts == 0


def test_runs_are_listed(lab: Lab) -> None:
    @lab.durable(name="one")
    async def one() -> None:
        pass

    @lab.durable(name="two")
    async def two() -> None:
        await lab(perdure.ask("?"))

    for number in range(3):
        lab.run(one, id=f"one-{number}")
    lab.run(two, id="two-0")
    assert [info.id for info in lab.store.runs()] == ["two-0", "one-2", "one-1", "one-0"]
    assert [info.id for info in lab.store.runs(statuses="waiting")] == ["two-0"]
    assert [info.id for info in lab.store.runs(function="one", limit=2)] == ["one-2", "one-1"]
    assert lab.store.runs(queue="other") == []
    with pytest.raises(perdure.UsageError, match="status"):
        lab.store.runs(statuses="asleep")
