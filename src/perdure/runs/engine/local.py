"""Running a claimed run in this process, blocking or async, whatever its function is.

A sync function runs on the caller's thread (for an async caller: on a thread of its own), an async one on the running
loop, or for a blocking caller on a loop of its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from perdure.runs.engine.execute import execute_run
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, arun_operation, run_operation
from perdure.runs.execution.scope import current
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal.rows import RunRow
from perdure.threads.context import StoreContext

T = TypeVar("T")
_INTERRUPTED_S = 5.0  # for a run that was interrupted to be given back


class LocalExecution(Generic[T]):
    """One execution in this process, and the operation that it is for."""

    def __init__(self, execution: Execution, spec: DurableSpec) -> None:
        self.execution, self.spec = execution, spec

    def run(self) -> T:
        """Drive it to its end, blocking."""
        if self.spec.is_async:
            found: T = _on_a_loop(self.arun, self.execution.interrupt)
            return found
        with self._active():
            # A run inside a run's process is not part of it: it has a scope of its own.
            return run_operation(self.execution.root, self._operation())

    async def arun(self) -> T:
        """The same on the running loop."""
        if not self.spec.is_async:
            found: T = await _in_a_thread(self.run, self.execution.interrupt)
            return found
        from perdure.runs.execution.supervisor import Supervisor

        self.execution.supervisor = Supervisor(self.execution)
        with self._active():
            return await arun_operation(self.execution.root, self._operation())

    def _operation(self) -> Operation[T]:
        raise NotImplementedError

    def _active(self) -> AbstractContextManager[None]:
        raise NotImplementedError


class RunExecution(LocalExecution[str]):
    """A claimed run: it is continued as far as it goes. Gives its status then."""

    def __init__(
        self, ctx: StoreContext, tenant: int, row: RunRow, spec: DurableSpec, *, args: bytes | None = None
    ) -> None:
        self._args, self._runtime = args, runtime_of(ctx)
        lease_us = self._runtime.lease_us
        context = ctx.seen_from(spec.fn.__module__)
        super().__init__(Execution(context, tenant, row, is_async=spec.is_async, lease_us=lease_us), spec)
        if ctx.driver.dialect != "sqlite":
            self.execution.skew_us = row.lease_until - lease_us - ctx.clock_us()

    def _operation(self) -> Operation[str]:
        return execute_run(self.execution, self.spec, self._args, self._runtime.keep_us)

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._runtime.add(self.execution)
        try:
            if hooks.hook is not None:
                hooks.fault_point("claim", "", self.spec.name, self.execution.row.fence, "after")
            yield
        finally:
            self.execution.alive = False
            self._runtime.remove(self.execution)


def _on_a_loop(call: Any, interrupt: Callable[[], None]) -> Any:
    """Run a coroutine to its end for a blocking caller, which may be on a loop's thread. `interrupt` is called if the
    caller is interrupted there."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call())
    found: list[Any] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def body() -> None:
        try:
            found.append(asyncio.run(call()))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=partial(contextvars.copy_context().run, body), name="perdure-run")
    try:
        thread.start()  # it waits too: for the thread's first breath
        ended.wait()  # not join: an interrupted one takes the thread for ended
    except BaseException:
        interrupt()
        ended.wait(_INTERRUPTED_S)
        raise
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


async def _in_a_thread(call: Any, interrupt: Callable[[], None]) -> Any:
    """Call a function on a thread. If the task is cancelled, `interrupt` is called: the thread cannot be stopped."""
    import asyncio

    context = contextvars.copy_context()
    context.run(current.set, None)
    try:
        return await asyncio.get_running_loop().run_in_executor(None, partial(context.run, call))
    except asyncio.CancelledError:
        interrupt()
        raise
