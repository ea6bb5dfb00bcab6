"""Branches of an async run, as tasks that the run's supervisor watches. When a run parks or ends, none of them is left.

A branch that lost a race is cancelled: a step is as if it had never begun, an effect that was under way
is in doubt and settled before the run ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from perdure.runs.execution.scope import Scope
from perdure.runs.execution.supervisor import Supervisor
from perdure.runs.execution.unwinds import Interrupted
from perdure.runs.parallel.branches import Branch, drop

_PATIENCE_S = 1.0  # for a task that was cancelled


class TaskPool:
    """Tasks that work off branches, so many at a time. One that waits for something outside does not count."""

    def __init__(self, scope: Scope, branches: Sequence[Branch], limit: int) -> None:
        self._supervisor: Supervisor = scope.execution.supervisor
        self._limit = limit
        self._todo = deque(branches)
        self._working = 0
        self._tasks: dict[asyncio.Task[Any], Branch] = {}
        self._ended: deque[Branch] = deque()
        self._next_ended: asyncio.Future[None] | None = None

    def start(self) -> None:
        while self._todo and self._working < self._limit:
            branch = self._todo.popleft()
            self._working += 1
            task = self._supervisor.start(_awaited(branch), branch.scope, self)
            self._tasks[task] = branch
            task.add_done_callback(self._end)

    def pause(self) -> None:
        """A branch begins to wait for something outside: another one may begin."""
        self._working -= 1
        self.start()

    def resume(self) -> None:
        self._working += 1

    def start_another(self) -> bool:
        """Begin one more branch than the limit allows, if there is one: those at work wait for what it comes to."""
        if not self._todo:
            return False
        self._limit += 1
        self.start()
        return True

    async def next(self) -> Branch:
        """Wait until another branch has ended. If this task is cancelled meanwhile, the branches are too."""
        if not self._ended:
            self._next_ended = asyncio.get_running_loop().create_future()
            try:
                await self._supervisor.join(self._next_ended)
            except asyncio.CancelledError:
                await self.abandon(Interrupted("the task that waited for this branch was cancelled"))
                raise
        branch = self._ended.popleft()
        if branch.is_broken:
            await self.abandon(Interrupted("another branch was interrupted"))
        return branch

    async def abandon(self, reason: BaseException) -> None:
        """End the branches that have not ended; those that have not begun never do."""
        while self._todo:
            branch = self._todo.popleft()
            drop(branch.work)
            branch.end(error=reason)
            self._ended.append(branch)
        for task, branch in self._tasks.items():
            if not task.done():
                branch.scope.stop = branch.scope.stop or reason
        left = self._supervisor.cancel(self._tasks)
        if left:
            await asyncio.wait(left, timeout=_PATIENCE_S)  # what does not end now is ended with the run

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._working -= 1
        branch = self._tasks[task]
        if task.cancelled():
            branch.end(error=branch.scope.stop or asyncio.CancelledError())
        else:
            error = task.exception()
            branch.end(task.result() if error is None else None, error)
        self._ended.append(branch)
        if self._next_ended is not None and not self._next_ended.done():
            self._next_ended.set_result(None)
        self.start()


async def _awaited(branch: Branch) -> Any:
    result = branch.work if hasattr(branch.work, "__await__") else branch.work()
    return await result if hasattr(result, "__await__") else result
