"""The supervisor of an async run: it runs the function as a task, watches the run's tasks, and parks the run.

The loop's task factory names each task when it is made, so that plain `asyncio.gather` replays correctly. A branch that
waits for something outside is suspended. When every branch waits, the run parks. Parking too early is never wrong: the
run can always start again from its journal. A run whose code waits for something in this process (the network, a timer,
a queue) does not park, and its waiting branches poll.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from perdure.errors import LeaseLost, RunError
from perdure.runs.execution.asyncio_internals import awaited_future, check_asyncio, has_timer, resolved_by
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Parked, Wait
from perdure.runs.execution.replay_order import ReplayOrder
from perdure.runs.execution.scope import Scope, current
from perdure.runs.execution.task_factory import TaskFactory
from perdure.runs.execution.unwinds import Interrupted, Paused, Undo

_LOOK_S = 0.01  # delay after a branch begins to wait, before looking whether all wait
_POLL_S = 0.25  # how often a waiting branch looks for news while others work
_PATIENCE_S = 1.0  # how long a cancelled task may take before it is cancelled again
_END_S = 100.0  # how long cancelled tasks may take to end altogether


class BranchPool(Protocol):
    """A limit on how many tasks work at once. A task that waits for something outside does not count."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def start_another(self) -> bool: ...


class Supervisor:
    """The watcher of one async run's tasks."""

    def __init__(self, execution: Execution) -> None:
        check_asyncio()
        self.execution = self._execution = execution
        self.loop = self._loop = asyncio.get_running_loop()
        self.order = ReplayOrder(self)
        self._tasks: set[asyncio.Task[Any]] = set()  # those that have not ended
        self._pools: WeakKeyDictionary[asyncio.Task[Any], BranchPool] = WeakKeyDictionary()
        self._waits: dict[asyncio.Future[None], Wait] = {}
        self._joins: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._polled = self._loop.time()
        self.io_only_in_units = False  # True: a wait that asyncio does not explain is for other tasks of the run
        execution.on_stop = self._stopped

    async def main(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run the durable function to its end, or until the run parks."""
        execution = self._execution
        execution.busy -= 1  # the operation that called this counts as busy, but only waits
        factory = TaskFactory.enter(self._loop)
        task = self.start(call(), execution.root)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if _is_cancelled():  # the caller stopped waiting for the run
                execution.interrupt()
                raise
            if execution.stop is not None:
                raise execution.stop from None
            raise RunError("the durable function ended by asyncio.CancelledError, and was not cancelled") from error
        finally:
            try:
                if not self._loop.is_closed():  # if it is, Python drops this coroutine, and the tasks have ended
                    await self._end()
            finally:
                factory.leave(self._loop)
                execution.busy += 1

    async def _end(self) -> None:
        """End all tasks of the run, because a remaining one could write with a fence that was given back."""
        if self._timer is not None:
            self._timer.cancel()
        execution, loop = self._execution, self._loop
        execution.closing = Parked()  # for branches that continue although they were cancelled
        until, cancelled = loop.time() + _END_S, None
        while left := set(self._tasks):
            self.cancel(left)
            if not execution.acting and loop.time() > until:
                break
            try:
                await asyncio.wait(left, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                execution.interrupt()
                cancelled = error
        execution.closing = None
        if cancelled is not None:
            raise cancelled

    def cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
        """Cancel tasks and return those that were cancelled.

        A cancelled effect would be in doubt. So an effect under way, and the tasks that wait for it, are not cancelled:
        it ends at its deadline at the latest. If this process lost the run, every task is cancelled.
        """
        spared: set[Any] = set()
        if not isinstance(self._execution.stop, LeaseLost | Interrupted):
            spared = self._with_those_who_wait(self._execution.acting)
        chosen = [task for task in tasks if not task.done() and task not in spared]
        for task in chosen:
            task.cancel()
        return chosen

    def _with_those_who_wait(self, tasks: set[Any]) -> set[Any]:
        # Iterate over a copy: threads of sync effects change the set.
        waiting = {task for task in list(tasks) if task is not None and not task.done()}
        while waiting:
            ends = waiting | resolved_by(waiting)
            more = {task for task in self._tasks if awaited_future(task) in ends} - waiting
            if not more:
                break
            waiting |= more
        return waiting

    def start(self, call: Coroutine[Any, Any, Any], scope: Scope, pool: BranchPool | None = None) -> asyncio.Task[Any]:
        """Start a task of the run in a scope that was made for it."""
        context = contextvars.copy_context()
        context.run(current.set, scope)
        task = asyncio.Task(call, loop=self._loop, context=context)
        self.adopt(task, scope)
        if pool is not None:
            self._pools[task] = pool
        return task

    def adopt(self, task: asyncio.Task[Any], scope: Scope | None) -> None:
        """Watch a task until it ends. Its scope ends with it."""
        self._tasks.add(task)
        if scope is not None:
            task.add_done_callback(lambda _: scope.end())
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not log it

    async def join(self, future: asyncio.Future[None]) -> None:
        """Wait for a future that only other tasks of the run resolve."""
        self._joins.add(future)
        self._execution.busy -= 1  # the operation that called this counts as busy, but only waits
        try:
            await future
        finally:
            self._execution.busy += 1
            self._joins.discard(future)

    # --- waiting for something outside

    async def suspend(self, wait: Wait) -> None:
        """Wait until there may be news. Raises Parked if the run has nothing else to do."""
        if self._execution.stop is not None:
            raise self._execution.stop
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits[future] = wait
        self._arm(_LOOK_S)
        task = asyncio.current_task(self._loop)
        pool = None if task is None else self._pools.get(task)
        if pool is not None:
            pool.pause()
        try:
            await future
        finally:
            self._waits.pop(future, None)
            if pool is not None:
                pool.resume()

    def start_another(self) -> bool:
        """Start a branch that a limit holds back: others may wait for its calls. Return False if there is none."""
        return any(pool.start_another() for pool in set(self._pools.values()))

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waits or self._execution.stop is not None:
            return
        if self.is_idle(explained=not self.io_only_in_units):
            now = self._execution.shared_clock_us()
            wake_at = min((wait.wake_at for wait in self._waits.values() if wait.wake_at is not None), default=None)
            if wake_at is None or wake_at - now > self._execution.ctx.linger_s * 1e6:
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
        """Wake every waiting branch to look for news."""
        for future in list(self._waits):
            if not future.done():
                future.set_result(None)

    @property
    def is_parallel(self) -> bool:
        """Whether the run has tasks besides that of its function."""
        return len(self._tasks) > 1

    def is_idle(
        self,
        waiting: Collection[asyncio.Future[None]] = (),
        *,
        but_for_timeouts: bool = False,
        explained: bool = True,
    ) -> bool:
        """Return whether no task of the run can continue until something comes from outside.

        `waiting` are the calls that wait for the run to be idle (replay_order.py). With `but_for_timeouts`, tasks that
        only a timeout can continue count as idle. Unless waits must be `explained`, so do tasks of which asyncio does
        not show that they wait for the run: those of anyio, or of a queue.
        """
        if self._execution.busy > len(waiting) or (not explained and self._execution.acting):
            return False
        ours: set[Any] = {*self._waits, *self._joins, *self._tasks, *waiting}
        others = set()
        for task in self._tasks:
            waiter = awaited_future(task)
            if waiter is None or waiter.done():
                return False  # the task runs, or is about to
            if waiter not in ours:
                others.add(waiter)
        if explained and others and not others <= resolved_by(ours):
            return False  # a task waits for something else in this process
        return but_for_timeouts or not has_timer(self._loop, self._tasks, others)

    # --- stopping

    def _park(self) -> None:
        execution = self._execution
        execution.waits = list(self._waits.values())
        execution.stop = execution.stop or Parked()
        self._wake(execution.stop)
        self._loop.call_later(_LOOK_S * 5, self._interrupt)  # in case the code catches it and waits for something else

    def park_for(self, stop: Parked) -> None:
        """Park the whole run because a sync step must wait and cannot be suspended. The waits of others are kept."""
        execution = self._execution
        # Iterate over a copy: this may be another thread, while the loop runs.
        execution.waits += [wait for wait in list(self._waits.values()) if wait not in execution.waits]
        execution.stop = execution.stop or stop
        self._stopped()

    def _wake(self, stop: BaseException) -> None:
        for future in list(self._waits):
            if not future.done():
                future.set_exception(stop)

    def _stopped(self) -> None:
        """Interrupt the tasks of a run that must stop: cancelled, taken over or paused. Any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._interrupt)
        except RuntimeError:
            pass  # the loop has ended

    def _interrupt(self) -> None:
        stop = self._execution.stop
        if stop is None:
            return
        waiting = {task for task in self._tasks if awaited_future(task) in self._waits}
        self._wake(stop)
        if isinstance(stop, Parked | Paused | Undo) and self._execution.busy > 0:
            self._loop.call_later(_LOOK_S * 5, self._interrupt)  # operations under way may end first
        elif self.cancel(self._tasks - waiting):
            # A framework may catch it, and then wait for a task of its own that was cancelled too.
            self._loop.call_later(_PATIENCE_S, self._interrupt)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
