"""What Perdure reads of asyncio that asyncio does not document: on a Python that has it otherwise, these tests fail.

Without it a run would not park, which looks like a run that hangs. So nothing here waits for a run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.runs.execution import supervisor
from perdure.runs.execution.idleness import has_timer, is_stirring, resolved_by
from perdure.runs.execution.scope import current

Work = asyncio.Future[int]


async def _gather(work: Work) -> None:
    await asyncio.gather(work)


async def _gather_twice(work: Work) -> None:
    await asyncio.gather(asyncio.gather(work), asyncio.gather(work))


async def _wait(work: Work) -> None:
    await asyncio.wait([work])


async def _shield(work: Work) -> None:
    await asyncio.shield(work)


async def _wait_for(work: Work) -> None:
    await asyncio.wait_for(asyncio.shield(work), None)


async def _group(work: Work) -> None:
    async def child() -> None:
        await work

    async with asyncio.TaskGroup() as group:
        group.create_task(child())


async def _as_completed(work: Work) -> None:
    for earliest in asyncio.as_completed([work]):
        await earliest


async def _async_as_completed(work: Work) -> None:
    async for earliest in asyncio.as_completed([work]):  # type: ignore[attr-defined,unused-ignore]
        await earliest


WAYS = [_gather, _gather_twice, _wait, _shield, _wait_for, _group, _as_completed]
if sys.version_info >= (3, 13):
    WAYS.append(_async_as_completed)


async def _begun(call: Any) -> asyncio.Task[Any]:
    """A task that waits."""
    task = asyncio.create_task(call)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("way", WAYS)
def test_a_task_that_waits_for_tasks_in_any_way_is_known_to(way: Callable[[Work], Awaitable[None]]) -> None:
    async def main() -> None:
        work: Work = asyncio.get_running_loop().create_future()
        task = await _begun(way(work))
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        waiter = task._fut_waiter  # type: ignore[attr-defined]
        assert waiter is not None
        assert waiter in resolved_by([work, *tasks])
        other: Work = asyncio.get_running_loop().create_future()
        assert waiter not in resolved_by([other])
        work.set_result(1)
        await task

    asyncio.run(main())


def test_a_task_that_waits_for_something_else_is_known_to() -> None:
    async def main() -> None:
        for call in (asyncio.Queue[int]().get(), asyncio.Event().wait(), asyncio.sleep(60)):
            task = await _begun(call)
            assert task._fut_waiter not in resolved_by([task])  # type: ignore[attr-defined]
            task.cancel()

    asyncio.run(main())


def test_timeouts_are_seen() -> None:
    async def in_timeout(work: Work) -> None:
        async with asyncio.timeout(60):
            await work

    ways: list[Callable[[Work], Any]] = [
        in_timeout,
        lambda work: asyncio.wait_for(work, 60),
        lambda work: asyncio.wait([work], timeout=60),
    ]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for way in ways:
            work: Work = loop.create_future()
            task = await _begun(way(work))
            waiters = {task._fut_waiter}  # type: ignore[attr-defined]
            assert has_timer(loop, {task}, waiters)
            task.cancel()
            await asyncio.wait([task])
            assert not has_timer(loop, {task}, waiters)

    asyncio.run(main())


def test_code_that_is_about_to_continue_is_seen() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, others = SimpleNamespace(), SimpleNamespace()
        token = current.set(SimpleNamespace(execution=ours))  # type: ignore[arg-type]
        loop.call_soon(lambda: None)
        current.reset(token)
        assert is_stirring(loop, ours)  # type: ignore[arg-type]
        assert not is_stirring(loop, others)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not is_stirring(loop, ours)  # type: ignore[arg-type]

    asyncio.run(main())


def test_the_task_that_wait_for_makes_on_old_pythons_is_known() -> None:
    made: list[bool] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(supervisor._is_wait_for())
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        await asyncio.wait_for(asyncio.sleep(0), 60)
        await asyncio.create_task(asyncio.sleep(0))

    asyncio.run(main())
    assert made[:2] == ([True, False] if sys.version_info < (3, 12) else [False, False])
