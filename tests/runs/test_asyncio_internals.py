"""What Perdure reads of asyncio that asyncio does not document: these tests fail on a Python where it is different.

There a run would not park, which looks like a run that hangs. So nothing here waits for a run.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perdure
from perdure.errors import RunError
from perdure.runs.execution import asyncio_internals
from perdure.runs.execution.asyncio_internals import (
    awaited_future,
    check_asyncio,
    has_timer,
    is_made_by_wait_for,
    is_stirring,
    resolved_by,
)
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
        waiter = awaited_future(task)
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
            assert awaited_future(task) not in {None, *resolved_by([task])}
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
            waiters = {awaited_future(task)}
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
        made.append(is_made_by_wait_for())
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        await asyncio.wait_for(asyncio.sleep(0), 60)
        await asyncio.create_task(asyncio.sleep(0))

    asyncio.run(main())
    assert made[:2] == ([True, False] if sys.version_info < (3, 12) else [False, False])


def test_a_python_whose_tasks_show_less_is_refused() -> None:
    class Opaque(asyncio.Task[Any]):
        def __getattribute__(self, name: str) -> Any:
            if name == "_fut_waiter":
                raise AttributeError(name)
            return super().__getattribute__(name)

    async def main() -> None:
        check_asyncio()
        with pytest.raises(RunError, match="does not show what a task waits for"):
            await Opaque(refused())

    async def refused() -> None:
        check_asyncio()

    asyncio.run(main())


def test_no_other_module_uses_a_private_name_of_asyncio() -> None:
    private = re.compile(r"_fut_waiter|\b_callbacks\b|\b_scheduled\b|loop(, \"|\.)_ready")
    package = Path(perdure.__file__).parent
    users = {path for path in package.rglob("*.py") if private.search(path.read_text())}
    assert users == {Path(asyncio_internals.__file__)}
