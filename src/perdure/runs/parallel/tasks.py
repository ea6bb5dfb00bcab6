"""Parallel branches of an async run, as tasks under the run's supervisor. No task outlives the run's park or end.

A branch that lost a race is cancelled. Its open step counts as never begun. Its open effect is in doubt, and is settled
before the run ends.
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

_PATIENCE_S = 1.0  # how long to wait for cancelled tasks


class TaskPool:
    """Runs branches as tasks, at most `limit` at a time. A branch that waits for an external event does not count."""

    def __init__(self, scope: Scope, branches: Sequence[Branch], limit: int) -> None:
        self._supervisor: Supervisor = scope.execution.supervisor
        self._index = scope.execution.index
        self._limit = limit
        self._todo = deque(branches)
        self._working = 0
        self._tasks: dict[asyncio.Task[Any], Branch] = {}
        self._ended: deque[Branch] = deque()
        self._next_ended: asyncio.Future[None] | None = None
        for branch in branches:  # the limit may be lower than when their calls were recorded
            self._index.hold(branch.scope.prefix)

    def start(self) -> None:
        while self._todo and self._working < self._limit:
            branch = self._todo.popleft()
            self._working += 1
            self._index.begin(branch.scope.prefix)
            task = self._supervisor.start(_awaited(branch), branch.scope, self)
            self._tasks[task] = branch
            task.add_done_callback(self._end)

    def pause(self) -> None:
        """Note that a branch begins to wait for an external event, and start another one."""
        self._working -= 1
        self.start()

    def resume(self) -> None:
        self._working += 1

    def start_another(self) -> bool:
        """Start one branch beyond the limit, because those at work wait for it. Return False if there is none."""
        if not self._todo:
            return False
        self._limit += 1
        self.start()
        return True

    async def next(self) -> Branch:
        """Wait for the next branch to end and return it. If this task is cancelled meanwhile, cancel the branches."""
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
        """Cancel the branches that have not ended. Those that have not begun never begin."""
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
            await asyncio.wait(left, timeout=_PATIENCE_S)  # the end of the run ends the others

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
