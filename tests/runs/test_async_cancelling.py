"""Async runs that are cancelled: by a task, by a timeout, by an operator, by the end of the loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
from async_kit import PATIENCE_S, noting, until
from lab import Interrupt, Lab, Once, hooked

import perdure
from perdure.runs.execution.hooks import Point


@pytest.fixture
def lab(store: perdure.Store) -> Lab:
    return Lab(store, "async")


# --- cancelling


def test_cancelling_whoever_awaits_the_run_gives_it_back_and_it_goes_on(lab: Lab) -> None:
    note = noting(lab)
    begun = threading.Event()

    @perdure.step
    async def slow() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.sleep(3600)
        return "slow"

    @perdure.durable
    async def agent() -> Any:
        await note("a")
        return await asyncio.gather(slow(), note("b"))

    async def main() -> Any:
        running = asyncio.create_task(lab.store.arun(agent, id="r"))
        await until(lambda: begun.is_set() and "b" in lab.ran)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await lab.store.aget_run("r")).status == "queued"
        return await (await lab.store.arun(agent, id="r")).aresult()

    assert asyncio.run(main()) == ["slow", "b"]
    assert lab.ran == ["a", "b"]


def test_cancelling_whoever_awaits_a_sync_run_gives_it_back_at_its_next_call(lab: Lab) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @perdure.step
    def slow(number: int) -> int:
        lab.ran.append(number)
        begun.set()
        go_on.wait(PATIENCE_S)
        return number

    @perdure.durable
    def agent() -> Any:
        return [slow(1), slow(2)]

    async def main() -> Any:
        running = asyncio.create_task(lab.store.arun(agent, id="r"))
        await until(begun.is_set)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        go_on.set()
        await until(lambda: lab.store.get_run("r").status == "queued")
        assert lab.ran == [1]
        return await (await lab.store.arun(agent, id="r")).aresult()

    assert asyncio.run(main()) == [1, 2]
    assert lab.ran == [1, 2]


def test_cancelled_while_it_is_written_a_step_is_recorded_and_nothing_is_lost(lab: Lab) -> None:
    """What was drawn is written with the step. The task is cancelled in the middle of that."""
    once, drawn = Once(), list[float]()
    tasks: list[asyncio.Task[Any]] = []

    note = noting(lab)

    def hook(point: Point) -> None:
        if tasks and (point.kind, point.when) == ("value", "before"):
            asyncio.get_running_loop().call_soon(tasks.pop().cancel)

    @perdure.durable
    async def agent() -> Any:
        drawn.append(perdure.random())
        tasks.append(task := asyncio.create_task(note("cancelled before its body")))
        try:
            await task
        except asyncio.CancelledError:
            lab.ran.append("cancelled")
        await note("on")
        once.interrupt()
        tasks.clear()

    with hooked(hook), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert lab.ran == ["cancelled", "on"]
    lab.run(agent, id="r")
    assert drawn[0] == drawn[1]


def test_cancelling_a_run_stops_a_long_body(lab: Lab) -> None:
    begun = threading.Event()

    @perdure.step
    async def slow() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            lab.ran.append("stopped")

    @perdure.durable
    async def agent() -> Any:
        await asyncio.gather(slow(), perdure.ask("Which?"))

    async def main() -> Any:
        running = asyncio.create_task(lab.store.arun(agent, id="r"))
        await until(begun.is_set)
        assert await (await lab.store.aget_run("r")).acancel() == "running"
        return (await running).status

    assert asyncio.run(main()) == "cancelled"
    assert lab.ran == ["stopped"]


def test_a_paused_run_finishes_the_body_that_it_is_in(lab: Lab) -> None:
    begun, told = threading.Event(), threading.Event()

    @perdure.effect
    async def book(key: perdure.IdempotencyKey) -> str:
        begun.set()
        await until(told.is_set)
        await asyncio.sleep(1.5)  # until the run has heard of it
        lab.ran.append("booked")
        return "booked"

    @perdure.durable
    async def agent() -> Any:
        event = asyncio.Event()  # nobody sets it once the branch is paused

        async def books() -> Any:
            await book()
            await book()
            event.set()

        task = asyncio.create_task(books())
        await event.wait()
        await task

    async def main() -> Any:
        running = asyncio.create_task(lab.store.arun(agent, id="r"))
        await until(begun.is_set)
        await (await lab.store.aget_run("r")).apause()
        told.set()
        return (await running).status

    assert asyncio.run(main()) == "paused"
    assert lab.ran == ["booked"]
    assert [(step.name, step.status) for step in lab.store.get_run("r").steps()] == [("book", "done")]


def test_a_function_that_ends_by_a_cancellation_of_its_own_has_failed(lab: Lab) -> None:
    @perdure.durable
    async def agent() -> None:
        task = asyncio.create_task(asyncio.sleep(3600))
        task.cancel()
        await task

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.RunFailed, match="CancelledError"):
        run.result()


def test_tasks_that_are_left_when_the_function_ends_are_ended_and_write_nothing_more(lab: Lab) -> None:
    note = noting(lab)

    async def goes_on() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                await note("after the end")

    @perdure.durable
    async def agent() -> str:
        task = asyncio.create_task(goes_on())
        await asyncio.sleep(0)
        assert not task.done()
        return "done"

    run = lab.run(agent, id="r")
    assert run.result() == "done"
    assert lab.ran == []
    assert run.steps() == []


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_gives_an_async_run_back(lab: Lab) -> None:
    begun = threading.Event()

    @perdure.step
    async def slow() -> str:
        if not begun.is_set():
            begun.set()
            while True:
                await asyncio.sleep(0.01)  # a signal that comes just before the loop sleeps does not wake it
        return "slow"

    @perdure.durable
    async def agent() -> Any:
        return await slow()

    def press() -> None:
        assert begun.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        lab.run(agent, id="r")
    presser.join()
    assert lab.store.get_run("r").status == "queued"
    assert lab.run(agent, id="r").result() == "slow"


def test_a_keyboard_interrupt_that_the_code_raises_gives_the_run_back(lab: Lab) -> None:
    once, note = Once(), noting(lab)

    @perdure.durable
    async def agent() -> Any:
        await note("a")
        if not once.reached:
            once.reached += 1
            raise KeyboardInterrupt
        return await note("b")

    with pytest.raises(KeyboardInterrupt):
        lab.run(agent, id="r")
    assert lab.store.get_run("r").status == "queued"
    assert lab.run(agent, id="r").result() == "b"
    assert lab.ran == ["a", "b"]


@pytest.mark.usefixtures("ctrl_c")
def test_a_blocking_call_on_a_loops_thread_can_be_interrupted(lab: Lab) -> None:
    """As in a notebook: the run has a loop and a thread of its own."""
    begun = threading.Event()

    @perdure.step
    async def slow() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.sleep(3600)
        return "slow"

    @perdure.durable
    async def agent() -> Any:
        return await slow()

    def press() -> None:
        assert begun.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def main() -> str:
        presser = threading.Thread(target=press)
        presser.start()
        try:
            lab.run(agent, id="r")
        except KeyboardInterrupt:
            return lab.store.get_run("r").status
        finally:
            presser.join()
        return "not interrupted"

    runner = asyncio.new_event_loop()  # not asyncio.run: its handler would cancel the task
    try:
        assert runner.run_until_complete(main()) == "queued"
    finally:
        runner.close()
    assert lab.run(agent, id="r").result() == "slow"


def test_a_blocking_call_that_is_interrupted_while_its_thread_starts_gives_the_run_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread.start waits for the thread: an interrupt that comes then must reach the run too."""
    begun = threading.Event()

    @perdure.step(name="slow-while-starting")
    async def slow() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.sleep(3600)
        return "slow"

    @perdure.durable(name="started-and-interrupted")
    async def agent() -> Any:
        return await slow()

    start, presses = threading.Thread.start, ["once"]

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "perdure-run" and presses:
            presses.clear()
            assert begun.wait(PATIENCE_S)
            raise KeyboardInterrupt

    async def main() -> str:
        with pytest.raises(KeyboardInterrupt):
            lab.run(agent, id="r")
        return lab.store.get_run("r").status

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    runner = asyncio.new_event_loop()
    try:
        assert runner.run_until_complete(main()) == "queued"
    finally:
        runner.close()
    assert lab.run(agent, id="r").result() == "slow"
