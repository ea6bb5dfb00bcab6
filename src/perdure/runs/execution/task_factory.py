"""The task factory of an event loop on which runs execute. It gives each task of a run a scope of its own.

Other tasks are not changed. The application's own factory is still called, and is set again when the last run on the
loop has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from perdure.runs.execution.asyncio_internals import is_made_by_wait_for
from perdure.runs.execution.scope import Scope, current


class TaskFactory:
    """Makes the tasks of a loop while runs execute on it."""

    def __init__(self, before: Any) -> None:
        self._before = before  # the application's, or None
        self._runs = 0

    @classmethod
    def enter(cls, loop: asyncio.AbstractEventLoop) -> TaskFactory:
        """Count a run that begins on the loop. Set a TaskFactory if the loop has none."""
        before: Any = loop.get_task_factory()
        factory = before if isinstance(before, cls) else cls(before)
        if factory is not before:
            loop.set_task_factory(factory)
        factory._runs += 1
        return factory

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the application's factory again if no run is left on the loop.

        A factory that the application has set meanwhile stays. It may call this one, which then only makes tasks.
        """
        self._runs -= 1
        if self._runs == 0 and loop.get_task_factory() is self:
            loop.set_task_factory(self._before)

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        scope: Scope | None = current.get()
        supervisor = None if scope is None or scope.body is not None else scope.execution.supervisor
        own: Scope | None = None
        if scope is not None and supervisor is not None:
            context = options.get("context") or contextvars.copy_context()
            # A callback of the loop may make a task to close an async generator, at a random moment.
            by_code = asyncio.current_task(loop) is not None
            if by_code and not is_made_by_wait_for():
                own = scope.for_task(coro)
            context.run(current.set, own or (scope if by_code else None))
            options["context"] = context
        token = current.set(None)  # else a TaskFactory below the application's would name the task again
        try:
            if self._before is not None:
                task = self._before(loop, coro, **options)
            else:
                task = asyncio.Task(coro, loop=loop, **options)
        finally:
            current.reset(token)
        if supervisor is not None and isinstance(task, asyncio.Task):
            supervisor.adopt(task, own)
        return task
