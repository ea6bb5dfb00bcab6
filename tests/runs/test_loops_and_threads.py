"""Sync code beside event loops: the threads of a store are bounded, and nothing keeps a loop from turning unsaid."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lab import Lab

import perdure
from perdure.storage.store_threads import StoreThreads, threads_of

PATIENCE_S = 20.0


@pytest.fixture
def few(sync_lab: Lab) -> Iterator[int]:
    """A store with three threads."""
    threads = threads_of(sync_lab.store._context.driver)
    before, threads._most = threads._most, threads._count + 3
    yield 3
    threads._most = before


class Peak:
    """How many are inside at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


def test_400_branches_take_32_threads(sync_lab: Lab) -> None:
    peak = Peak()

    @perdure.step
    def work(number: int) -> int:
        with peak:
            time.sleep(0.001)
        return number

    @perdure.durable
    def agent() -> Any:
        return perdure.gather(*(lambda number=number: work(number) for number in range(400)))

    assert sync_lab.run(agent).result() == list(range(400))
    assert 1 < peak.most <= 32


def test_branches_inside_of_branches_get_on_without_a_free_thread(sync_lab: Lab, few: int) -> None:
    """Three levels of five: each level waits for the next, and there are three threads for all."""
    peak = Peak()

    @perdure.step
    def leaf(number: int) -> int:
        with peak:
            return number

    def level(depth: int, number: int) -> int:
        if depth == 0:
            return leaf(number)
        return sum(perdure.map(lambda each: level(depth - 1, each), range(number, number + 5)))

    @perdure.durable
    def agent() -> int:
        return level(3, 0)

    assert sync_lab.run(agent).result() == sum(a + b + c for a in range(5) for b in range(5) for c in range(5))
    assert peak.most <= few + 1  # and the caller's own


def test_sync_runs_do_not_take_the_threads_of_asyncio(sync_lab: Lab) -> None:
    """Sixty runs wait. What the application does by `asyncio.to_thread` does not wait for them."""
    go, inside = threading.Event(), threading.Semaphore(0)

    @perdure.step
    def slow() -> bool:
        inside.release()
        return go.wait(PATIENCE_S)

    @perdure.durable
    def agent() -> bool:
        return slow()

    async def main() -> list[Any]:
        runs = [asyncio.create_task(sync_lab.store.arun(agent, id=f"r{number}")) for number in range(60)]
        for _ in range(60):
            assert await asyncio.to_thread(inside.acquire, timeout=PATIENCE_S)
        go.set()
        return [await (await run).aresult() for run in runs]

    assert asyncio.run(main()) == [True] * 60


def test_a_run_that_waits_for_a_thread_keeps_its_lease_and_can_be_cancelled(sync_lab: Lab, few: int) -> None:
    go, inside = threading.Event(), threading.Semaphore(0)

    @perdure.durable
    def agent() -> bool:
        inside.release()
        return go.wait(PATIENCE_S)

    async def main() -> None:
        runs = [asyncio.create_task(sync_lab.store.arun(agent, id=f"r{number}")) for number in range(few + 1)]
        for _ in range(few):
            assert await asyncio.to_thread(inside.acquire, timeout=PATIENCE_S)
        runtime = sync_lab.store._runs._runtime
        while len(runtime._executions) < few + 1:
            await asyncio.sleep(0.001)
        begun = {execution.row.id for execution in runtime._executions}
        assert begun == {f"r{number}" for number in range(few + 1)}
        last = runs[few]  # tasks begin in order, but their claims are committed in any
        waiting = [number for number in range(few + 1) if sync_lab.store.get_run(f"r{number}").status == "running"]
        assert len(waiting) == few + 1
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        go.set()
        await asyncio.gather(*runs, return_exceptions=True)

    asyncio.run(main())
    for number in range(few + 1):
        run = sync_lab.run(agent, id=f"r{number}")
        assert run.result(timeout_s=5) is True


def test_threads_that_wait_for_each_other_are_not_held_up_by_the_bound() -> None:
    threads = StoreThreads(None, most=2)

    def nested(depth: int) -> int:
        return depth if depth == 0 else threads.submit(lambda: nested(depth - 1)).result(PATIENCE_S)

    waiting = [threads.submit(lambda: nested(5)) for _ in range(4)]
    assert [one.result(PATIENCE_S) for one in waiting] == [0, 0, 0, 0]
    assert threads.try_run(lambda: None) or threads._count == 2


# --- sync steps in async runs


def test_a_sync_step_that_is_awaited_leaves_the_loop_free(sync_lab: Lab) -> None:
    """Another task sets what the body waits for: on the loop's thread it could not."""
    go = threading.Event()

    @perdure.step
    def wait(number: int) -> int:
        return number if go.wait(PATIENCE_S) else -1

    @perdure.durable
    async def agent() -> list[int]:
        one = await wait.on_thread(1)
        two: list[int] = await perdure.map(wait, [2, 3])  # type: ignore[misc]  # in a sync run it is not awaited
        return [one, *two, *await perdure.gather(wait.on_thread(4), wait.on_thread(5))]

    async def main() -> Any:
        asyncio.get_running_loop().call_later(0.01, go.set)
        return await (await sync_lab.store.arun(agent, id="r")).aresult()

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]
    assert [(step.path, step.result) for step in sync_lab.store.get_run("r").steps()][:1] == [("1", 1)]
    assert asyncio.run(wait.on_thread(6)) == 6  # without a run, as the function itself


def test_a_map_over_a_method_keeps_its_instance(sync_lab: Lab) -> None:
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        @perdure.step(ignore=("self",))
        def offer(self, item: str) -> str:
            return f"{item} of {self.name}, {threading.current_thread().name}"

    @perdure.durable
    async def agent() -> list[str]:
        offers: list[str] = await perdure.map(Shop("A").offer, ["tea", "rice"])  # type: ignore[misc]
        return offers

    assert sync_lab.store.run(agent, id="r").result() == ["tea of A, perdure-thread", "rice of A, perdure-thread"]


def test_a_sync_step_that_blocks_a_loop_is_named(sync_lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    @perdure.step
    def heavy() -> int:
        time.sleep(0.26)
        return 1

    @perdure.durable
    async def agent() -> int:
        return heavy()

    with caplog.at_level(logging.WARNING, "perdure"):
        assert asyncio.run(sync_lab.store.arun(agent)).result() == 1
    [message] = [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]
    assert "step heavy" in message
    assert "await heavy.on_thread(…)" in message


def test_a_step_in_a_thread_of_the_users_own_is_named(sync_lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    @perdure.step
    def look() -> str:
        return "seen"

    @perdure.durable
    def agent() -> list[str]:
        found: list[str] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(look()))
            thread.start()
            thread.join()
        return found

    with caplog.at_level(logging.WARNING, "perdure"):
        look()
        assert not caplog.records  # an ordinary call, outside of any run
        assert sync_lab.run(agent, id="r").result() == ["seen", "seen"]
    assert sync_lab.store.get_run("r").steps() == []
    [message] = [record.getMessage() for record in caplog.records if "is not recorded" in record.getMessage()]
    assert "step look" in message
    assert "look.direct(…)" in message


# --- StopIteration, which no generator, coroutine or future of asyncio passes on


@perdure.step
def first_of_none(number: int = 0) -> int:
    return next(each for each in range(number) if each > number)


def unknown_end(key: perdure.IdempotencyKey) -> Any:
    return next(iter([]))


@perdure.effect
def pay_none(key: perdure.IdempotencyKey) -> int:
    return next(iter([]))


@perdure.effect(reconcile=unknown_end)
async def pay_in_doubt(key: perdure.IdempotencyKey) -> int:
    raise ConnectionError("the answer was lost")


@perdure.effect(undo=unknown_end)
async def pay_and_undo(key: perdure.IdempotencyKey) -> int:
    return 1


@perdure.durable
async def stops_in_a_step() -> None:
    await first_of_none.on_thread()


@perdure.durable
async def stops_in_an_effect() -> None:
    await pay_none.on_thread()


@perdure.durable
async def stops_in_a_map() -> None:
    await perdure.map(first_of_none, [1, 2])  # type: ignore[misc]


@perdure.durable
async def stops_in_a_reconcile() -> None:
    await pay_in_doubt()


@perdure.durable
async def stops_in_an_undo() -> None:
    await pay_and_undo()
    perdure.undo("not wanted")


@pytest.mark.parametrize(
    ("function", "status"),
    [
        (stops_in_a_step, "failed"),
        (stops_in_an_effect, "waiting"),
        (stops_in_a_map, "failed"),
        (stops_in_a_reconcile, "waiting"),
        (stops_in_an_undo, "waiting"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_stop_iteration_on_a_thread_ends_the_call(sync_lab: Lab, function: Any, status: str) -> None:
    async def main() -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await sync_lab.store.arun(function, id="r")).status

    assert asyncio.run(main()) == status


def test_a_stop_iteration_is_the_same_error_when_it_is_replayed(sync_lab: Lab) -> None:
    seen: list[str] = []

    @perdure.durable
    def plain() -> Any:
        try:
            first_of_none()
        except Exception as error:
            seen.append(repr(error))
        return perdure.ask("continue?")

    @perdure.durable
    async def on_threads() -> Any:
        try:
            await first_of_none.on_thread()
        except Exception as error:
            seen.append(repr(error))
        return await perdure.ask("continue?")

    for run_id, function in (("plain", plain), ("threads", on_threads)):
        sync_lab.store.run(function, id=run_id)
        sync_lab.store.answer(run_id, "yes")
        assert sync_lab.store.run(function, id=run_id).result() == "yes"
        [step, *_] = sync_lab.store.get_run(run_id).steps()
        assert "RuntimeError" in str(step.error)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert "first_of_none raised StopIteration" in seen[0]


def test_a_future_of_a_thread_is_done_whatever_was_raised() -> None:
    class OwnStop(StopIteration): ...

    def stop(error: BaseException) -> None:
        raise error

    async def main() -> None:
        threads = StoreThreads(None)
        for error in (StopIteration(), OwnStop(), StopAsyncIteration(), GeneratorExit()):
            with pytest.raises((RuntimeError, StopAsyncIteration, GeneratorExit)):
                async with asyncio.timeout(PATIENCE_S):
                    await threads.call(lambda error=error: stop(error))  # type: ignore[misc]

    asyncio.run(main())
