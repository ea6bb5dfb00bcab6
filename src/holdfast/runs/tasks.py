"""An async run: its function as a task, a scope for every task it makes, and when it has nothing to do but wait.

Tasks are numbered when they are made, through the loop's task factory, so that plain `asyncio.gather` replays right. A
branch that waits for something outside is suspended; when every branch waits, the run parks. Parking too early is never
wrong: the run can always start again from its journal.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.runs.acting import Parked, Wait
from holdfast.runs.scope import Scope, current
from holdfast.runs.session import Session

_LOOK_S = 0.01  # how soon after a branch began to wait to see whether all do
_POLL_S = 0.25  # how often a waiting branch looks for news while others work
_LINGER_US = 1_000_000  # a shorter wait is not worth parking


class Supervisor:
    """Watches the tasks of one async run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._makers: dict[asyncio.Task[Any], asyncio.Task[Any] | None] = {}
        self._waits: dict[asyncio.Future[None], Wait] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._polled = self._loop.time()
        self._main: asyncio.Task[Any] | None = None
        session.on_stop = self._stopped

    async def main(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run the durable function to its end, or until the run parks."""
        session = self._session
        session.busy -= 1  # whoever drives us counts as busy, and only waits
        _install(self._loop)
        context = contextvars.copy_context()
        context.run(current.set, session.root)
        task = self._main = asyncio.Task(call(), loop=self._loop, context=context)
        self.adopt(task, None)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done() and session.stop is not None:
                raise session.stop from None
            raise
        finally:
            await self._end()
            session.busy += 1

    async def _end(self) -> None:
        """No task of a run outlives its session: they could write with a fence that is given back."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(100):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at: no complaint about errors that nobody awaited

    def adopt(self, task: asyncio.Task[Any], maker: asyncio.Task[Any] | None) -> None:
        self._tasks.add(task)
        self._makers[task] = maker
        task.add_done_callback(self._makers.pop)

    async def suspend(self, wait: Wait) -> None:
        """Wait until there may be news. Raises Parked when the run has nothing else to do."""
        if self._session.stop is not None:
            raise self._session.stop
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits[future] = wait
        self._arm(_LOOK_S)
        try:
            await future
        finally:
            self._waits.pop(future, None)

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waits:
            return
        if self._is_idle():
            now = self._session.shared_clock_us()
            wake_at = min((wait.wake_at for wait in self._waits.values() if wait.wake_at is not None), default=None)
            if wake_at is None or wake_at - now > _LINGER_US:
                self._park()
                return
            if wake_at > now:
                self._arm((wake_at - now) / 1e6)
                return
            self._news()
        elif self._loop.time() - self._polled > _POLL_S:
            self._polled = self._loop.time()
            self._news()
        self._arm(_LOOK_S * 5)

    def _news(self) -> None:
        """Let every waiting branch look again."""
        for future in list(self._waits):
            if not future.done():
                future.set_result(None)

    def _park(self) -> None:
        session = self._session
        session.waits = list(self._waits.values())
        stop = session.stop = session.stop or Parked()
        for future in list(self._waits):
            if not future.done():
                future.set_exception(stop)

    def _is_idle(self) -> bool:
        """Whether no task of the run can do anything until something comes from outside."""
        if self._session.busy > 0:
            return False
        makers = {maker for task, maker in self._makers.items() if not task.done()}
        for task in self._tasks:
            waiter = getattr(task, "_fut_waiter", None)
            if task.done() or waiter in self._waits or waiter in self._tasks:
                continue
            if waiter is None or waiter.done() or task not in makers:
                return False  # it runs, or waits for something that is not ours
        return True

    def _stopped(self) -> None:
        """The run must stop (cancelled, taken over): wake what waits, also when it is busy with a long body."""
        try:
            self._loop.call_soon_threadsafe(self._interrupt)
        except RuntimeError:
            pass  # the loop has ended

    def _interrupt(self) -> None:
        stop = self._session.stop
        for future in list(self._waits):
            if not future.done() and stop is not None:
                future.set_exception(stop)
        if self._main is not None and not self._main.done() and not self._waits:
            self._main.cancel()


_installed: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()


def _install(loop: asyncio.AbstractEventLoop) -> None:
    """Give tasks that a run makes a scope of their own; all others are made as before."""
    if loop in _installed:
        return
    before = loop.get_task_factory()
    _installed[loop] = before

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        scope: Scope | None = current.get()
        supervisor = None if scope is None or scope.body is not None else scope.session.supervisor
        if scope is not None and supervisor is not None:
            context = options.pop("context", None) or contextvars.copy_context()
            context.run(current.set, scope.branch())
            options["context"] = context
        if before is not None:
            task = before(loop, coro, **options)
        else:
            task = asyncio.Task(coro, loop=loop, **options)
        if supervisor is not None and isinstance(task, asyncio.Task):
            supervisor.adopt(task, asyncio.current_task(loop))
        return task

    loop.set_task_factory(make)
