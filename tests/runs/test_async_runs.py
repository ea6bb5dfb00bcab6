"""Async runs: plain asyncio inside of them replays right; they park when all wait; cancelled, they are given back."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from async_kit import PATIENCE_S, noting, until
from lab import Interrupt, Lab, Once, unhashed

import perdure
from perdure.runs.execution.scope import current


@pytest.fixture
def lab(store: perdure.Store) -> Lab:
    return Lab(store, "async")


def again(lab: Lab, agent: Any, *args: Any, id: str = "r") -> perdure.Run:
    with pytest.raises(Interrupt):
        lab.run(agent, *args, id=id)
    return lab.run(agent, *args, id=id)


# --- plain asyncio


def test_asyncio_gather_task_groups_and_create_task_replay_right(lab: Lab) -> None:
    once, note = Once(), noting(lab)

    async def two(name: str) -> list[str]:
        return [await note(name + "1"), await note(name + "2")]

    @perdure.durable
    async def agent() -> Any:
        found: list[Any] = list(await asyncio.gather(two("a"), two("b")))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(two(name)) for name in "cd"]
        found += [task.result() for task in tasks]
        late = asyncio.create_task(two("e"))
        found.append(await note("f"))
        found.append(await late)
        found.append(await asyncio.wait_for(two("g"), PATIENCE_S))
        done, _ = await asyncio.wait([asyncio.create_task(two("h"))])
        found += [task.result() for task in done]
        found += [await earliest for earliest in asyncio.as_completed([two("i")])]
        found.append(await asyncio.shield(asyncio.create_task(two("j"))))
        once.interrupt()
        return found

    run = again(lab, agent)
    pairs = [[name + "1", name + "2"] for name in "abcdeghij"]
    assert run.result() == [*pairs[:4], "f", *pairs[4:]]
    assert len(lab.ran) == 19
    named = {"1@two.1", "1@two.2", "1", "2", "3"}  # `wait_for` makes no task of its own since Python 3.12
    assert {unhashed(step.path) for step in run.steps()} == named


def test_a_task_takes_no_number_and_a_call_takes_it_when_it_is_made(lab: Lab) -> None:
    """On replay the first step is answered at once, and the task begins later than it did before."""
    once, note = Once(), noting(lab)

    @perdure.durable
    async def agent() -> Any:
        task = asyncio.create_task(note("task"))
        sleep = asyncio.create_task(perdure.sleep(0))
        waits = perdure.receive("now", timeout_s=0, default="nothing")
        found = [await note("main"), perdure.random(), await waits, await task, await sleep]
        once.interrupt()
        return found[2:]

    run = again(lab, agent)
    assert run.result() == ["nothing", "task", None]
    assert {unhashed(step.path): step.name for step in run.steps()} == {
        "1@note.1": "note",
        "1": "perdure.sleep",
        "2": "perdure.receive",
        "3": "note",
        "4": "perdure.random",
    }


def test_a_thousand_tasks(lab: Lab) -> None:
    once, note = Once(), noting(lab)

    @perdure.durable
    async def agent() -> int:
        found = await asyncio.gather(*(note(number) for number in range(1000)))
        once.interrupt()
        return sum(found)

    assert again(lab, agent).result() == sum(range(1000))
    assert len(lab.ran) == 1000


def test_a_task_that_the_code_did_not_make_takes_no_number(lab: Lab) -> None:
    """An async generator that is dropped is closed by a task, whenever that happens."""
    once, note = Once(), noting(lab)

    async def chunks() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            lab.ran.append("closed")

    @perdure.durable
    async def agent() -> Any:
        async for _ in chunks():
            break
        gc.collect()
        await note("a")
        await note("b")
        once.interrupt()

    run = again(lab, agent)
    assert run.refresh().status == "done"
    assert [step.path for step in run.steps()] == ["1", "2"]
    assert "closed" in lab.ran


def test_a_factory_of_tasks_that_was_there_is_kept(lab: Lab) -> None:
    note, made = noting(lab), list[str]()

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    @perdure.durable
    async def agent() -> Any:
        return await asyncio.gather(note("a"), note("b"))

    async def main() -> Any:
        asyncio.get_running_loop().set_task_factory(factory)
        run = await lab.store.arun(agent, id="r")
        assert asyncio.get_running_loop().get_task_factory() is factory  # set again: no run is left
        before = len(made)
        await asyncio.create_task(asyncio.sleep(0))
        assert len(made) == before + 1
        return await run.aresult(), [unhashed(step.path) for step in await run.asteps()]

    assert asyncio.run(main()) == (["a", "b"], ["1@note.1", "1@note.1"])


def test_the_factory_of_tasks_is_removed_when_no_run_is_left_on_the_loop(lab: Lab) -> None:
    note, begun, gate = noting(lab), asyncio.Event(), asyncio.Event()

    @perdure.durable
    async def waits() -> Any:
        begun.set()
        await gate.wait()
        return await asyncio.gather(note("a"), note("b"))

    @perdure.durable
    async def ends() -> Any:
        return await asyncio.gather(note("c"))

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        assert loop.get_task_factory() is None
        first = asyncio.create_task(lab.store.arun(waits, id="first"))
        await begun.wait()
        second = await lab.store.arun(ends, id="second")
        assert loop.get_task_factory() is not None  # the first run still makes tasks
        gate.set()
        ended = await first
        assert loop.get_task_factory() is None
        await lab.store.arun(refuses, id="third")
        assert loop.get_task_factory() is None
        return await ended.aresult(), await second.aresult(), [unhashed(s.path) for s in await ended.asteps()]

    @perdure.durable
    async def refuses() -> Any:
        raise ValueError("refused")

    assert asyncio.run(main()) == (["a", "b"], ["c"], ["1@note.1", "1@note.1"])


def test_a_factory_that_is_set_during_a_run_stays(lab: Lab) -> None:
    note = noting(lab)

    @perdure.durable
    async def agent() -> Any:
        loop = asyncio.get_running_loop()
        below: Any = loop.get_task_factory()
        loop.set_task_factory(lambda loop, coro, **options: below(loop, coro, **options))
        return await asyncio.gather(note("a"), note("b"))

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        await lab.store.arun(agent, id="r")
        factory: Any = loop.get_task_factory()
        assert factory.__name__ == "<lambda>"
        run = await lab.store.arun(agent, id="again")
        assert loop.get_task_factory() is not None
        return await run.aresult(), [unhashed(step.path) for step in await run.asteps()]

    assert asyncio.run(main()) == (["a", "b"], ["1@note.1", "1@note.1"])


def test_the_drivers_own_tasks_take_no_numbers(store: perdure.Store, postgres_url: str) -> None:
    """A new connection of psycopg's is made with tasks, and when one is needed is up to chance."""
    del store
    with perdure.open(postgres_url) as fresh:
        lab = Lab(fresh, "async")
        note = noting(lab)

        @perdure.durable
        async def agent() -> Any:
            return await asyncio.gather(*(note(number) for number in range(20)))

        run = lab.run(agent, id="r")
        assert run.result() == list(range(20))
        assert {unhashed(step.path) for step in run.steps()} == {"1@note.1"}


def test_a_sync_step_works_in_an_async_run(lab: Lab) -> None:
    once = Once()

    @perdure.step
    def plain(number: int) -> int:
        lab.ran.append(number)
        return number

    async def go(number: int) -> int:
        return plain(number)

    @perdure.durable
    async def agent() -> Any:
        token = perdure.random()
        found = [plain(1), *await asyncio.gather(go(2), go(3)), await asyncio.to_thread(plain, 4)]
        found += await perdure.map(plain, [5, 6])  # type: ignore[misc]
        once.interrupt()
        return [found, token]

    run = again(lab, agent)
    assert run.result()[0] == [1, 2, 3, 4, 5, 6]
    assert lab.ran == [1, 2, 3, 4, 5, 6]


def test_a_sync_step_does_not_wait_for_ever_for_what_another_branch_writes(lab: Lab) -> None:
    """It holds the loop, so that the other one cannot go on: it writes what was drawn itself."""
    once, drawn = Once(), list[float]()
    note = noting(lab)

    @perdure.step
    def plain(number: float) -> None:
        drawn.append(number)

    @perdure.durable
    async def agent() -> Any:
        number = perdure.random()
        task = asyncio.create_task(note("other"))
        for _ in range(3):
            await asyncio.sleep(0)  # until the other one is writing
        plain(number)
        await task
        once.interrupt()
        return number

    run = again(lab, agent)
    assert drawn == [run.result()]
    assert [(step.path, step.name) for step in run.steps() if step.name == "perdure.random"] == [
        ("1", "perdure.random")
    ]


# --- parking


def test_a_run_parks_when_all_of_its_tasks_wait(lab: Lab) -> None:
    """Whatever way they are waited for."""

    async def asks(question: str) -> Any:
        return await perdure.ask(question)

    @perdure.durable
    async def agent() -> Any:
        found = list(await asyncio.gather(asks("gather"), asyncio.gather(asks("in gather"), asks("too"))))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asks("group"))]
        found += [task.result() for task in tasks]
        done, _ = await asyncio.wait([asyncio.create_task(asks("wait"))])
        found += [task.result() for task in done]
        found.append(await asyncio.shield(asyncio.create_task(asks("shield"))))
        found += [await earliest for earliest in asyncio.as_completed([asks("as_completed")])]
        found.append(await asyncio.create_task(asks("task")))
        found.append(await asyncio.wait_for(asks("for ever"), None))
        return found

    run = lab.run(agent, id="r")
    parks = 0
    while run.refresh().status == "waiting":
        parks += 1
        for ask in lab.store.questions("r"):
            lab.store.answer("r", ask.text, step=ask.path)
        run = lab.run(agent, id="r")
    assert parks == 7
    assert run.result() == [
        "gather",
        ["in gather", "too"],
        "group",
        "wait",
        "shield",
        "as_completed",
        "task",
        "for ever",
    ]


def test_a_branch_that_works_goes_on_to_its_end_before_the_run_parks(lab: Lab) -> None:
    """Also where its work is nothing that Perdure knows of."""
    note = noting(lab)

    async def works() -> Any:
        await note("a")
        await asyncio.sleep(0.2)
        await note("b")
        await asyncio.to_thread(time.sleep, 0.2)
        return await note("c")

    @perdure.durable
    async def agent() -> Any:
        return await asyncio.gather(perdure.ask("Which?"), works())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert lab.ran == ["a", "b", "c"]
    lab.store.answer("r", 1)
    assert run.result() == [1, "c"]
    assert lab.ran == ["a", "b", "c"]


def test_the_code_that_made_a_waiting_task_may_work_on_by_itself(lab: Lab) -> None:
    @perdure.durable
    async def agent() -> Any:
        question = asyncio.create_task(perdure.ask("Which?"))
        await asyncio.sleep(0.3)
        lab.ran.append("worked")
        return await question

    run = lab.run(agent, id="r")
    assert lab.ran == ["worked"]
    assert run.refresh().status == "waiting"


def test_a_run_that_waits_inside_the_process_does_not_park_and_hears_the_answer(lab: Lab) -> None:
    """A queue between two branches: nobody knows who will put something into it."""

    @perdure.durable
    async def agent() -> Any:
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def asks() -> None:
            await queue.put(await perdure.ask("Which?"))

        task = asyncio.create_task(asks())
        found = await queue.get()
        await task
        return found

    async def main() -> Any:
        running = asyncio.create_task(lab.store.arun(agent, id="r"))
        await until(lambda: running.done() or (lab.store.runs() and lab.store.questions("r")))
        await lab.store.aanswer("r", "that")
        return await (await running).aresult(timeout_s=PATIENCE_S)

    assert asyncio.run(main()) == "that"


def test_a_timeout_of_asyncios_own_is_waited_for_in_the_process(lab: Lab) -> None:
    note = noting(lab)

    @perdure.durable
    async def agent() -> Any:
        found = []
        try:
            found.append(await asyncio.wait_for(perdure.ask("Quick?"), 0.15))
        except TimeoutError:
            found.append(await note("too late"))
        try:
            async with asyncio.timeout(0.15):
                await perdure.receive()
        except TimeoutError:
            found.append(await note("nothing came"))
        await asyncio.wait([asyncio.create_task(perdure.ask("Slow?"))], timeout=0.15)
        return [*found, await note("on")]

    assert lab.run(agent, id="r").result() == ["too late", "nothing came", "on"]


def test_a_timeout_that_is_due_when_the_run_looks_idle_still_counts(lab: Lab) -> None:
    """A busy event loop finds both timers due at once: that of the timeout, and that which parks an idle run."""

    @perdure.durable
    async def agent() -> str:
        supervisor: Any = current.get().execution.supervisor  # type: ignore[union-attr]

        async def keep_the_loop_busy() -> None:
            while not supervisor._waits and not is_late.is_set():  # on a slow machine it is late at once
                await asyncio.sleep(0)
            time.sleep(0.5)

        is_late = asyncio.Event()
        busy = asyncio.create_task(keep_the_loop_busy())
        try:
            return str(await asyncio.wait_for(perdure.ask("Quick?"), 0.15))
        except TimeoutError:
            is_late.set()
            await busy
            return "too late"

    assert lab.run(agent, id="r").result(timeout_s=PATIENCE_S) == "too late"


def test_a_parked_run_whose_code_catches_everything_and_waits_elsewhere_parks_all_the_same(lab: Lab) -> None:
    @perdure.durable
    async def agent() -> Any:
        while True:
            try:
                return await perdure.ask("Which?")
            except asyncio.CancelledError:
                raise
            except BaseException:
                await asyncio.sleep(3600)

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    lab.store.answer("r", 1)
    assert run.result() == 1


def test_a_sync_effect_that_must_wait_parks_the_whole_run(lab: Lab) -> None:
    """Blocking code cannot be suspended."""

    @perdure.effect(approve=True)
    def book(key: perdure.IdempotencyKey) -> str:
        return "booked"

    async def books() -> str:
        return book()

    @perdure.durable
    async def agent() -> Any:
        return await asyncio.gather(perdure.ask("Which?"), books())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    for ask in lab.store.questions("r"):
        lab.store.answer("r", True, step=ask.path)
    assert run.result(timeout_s=PATIENCE_S) == [True, "booked"]
