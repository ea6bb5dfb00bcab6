"""Running a claimed run in this process, blocking or async, whatever its function is.

A sync function runs on the caller's thread (for an async caller: on a thread of its own), an async one on the running
loop, or for a blocking caller on a loop of its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.runs.engine.execute import execute_run
from perdure.runs.engine.runtime import Runtime
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import arun_operation, run_operation
from perdure.runs.execution.scope import current
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal.rows import RunRow
from perdure.threads.context import Context

_INTERRUPTED_S = 5.0  # for a run that was interrupted to be given back


class Job:
    """A claimed run, and what it takes to run it."""

    def __init__(
        self,
        ctx: Context,
        runtime: Runtime,
        tenant: int,
        row: RunRow,
        spec: DurableSpec,
        *,
        lease_us: int,
        args: bytes | None = None,
        keep_us: int | None = None,
    ) -> None:
        self.spec = spec
        self.args = args
        self.keep_us = keep_us
        self.runtime = runtime
        self.execution = Execution(
            ctx.seen_from(spec.fn.__module__), tenant, row, is_async=spec.is_async, lease_us=lease_us
        )
        self.execution.set_clock()

    def run(self) -> str:
        """Go on with it as far as it goes, blocking. Gives its status then."""
        if self.spec.is_async:
            status: str = _on_a_loop(self.arun, self.execution.interrupt)
            return status
        execution = self.execution
        self._begin()
        try:
            # A run inside a run's process is not part of it: it has a scope of its own.
            return run_operation(execution.root, execute_run(execution, self.spec, self.args, self.keep_us))
        finally:
            self._end()

    async def arun(self) -> str:
        """The same on the running loop."""
        if not self.spec.is_async:
            status: str = await _in_a_thread(self.run, self.execution.interrupt)
            return status
        from perdure.runs.execution.tasks import Supervisor

        execution = self.execution
        execution.supervisor = Supervisor(execution)
        self._begin()
        try:
            return await arun_operation(execution.root, execute_run(execution, self.spec, self.args, self.keep_us))
        finally:
            self._end()

    def _begin(self) -> None:
        self.runtime.add(self.execution)
        if hooks.hook is not None:
            hooks.fault_point("claim", "", self.spec.name, self.execution.row.fence, "after")

    def _end(self) -> None:
        self.execution.alive = False
        self.runtime.remove(self.execution)


def _on_a_loop(call: Any, interrupt: Callable[[], None] | None = None) -> Any:
    """Run a coroutine to its end for a blocking caller, who may himself be on a loop's thread. `interrupt` is called if
    he is interrupted there."""
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
        if interrupt is not None:
            interrupt()
            ended.wait(_INTERRUPTED_S)
        raise
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


async def _in_a_thread(call: Any, interrupt: Callable[[], None] | None = None) -> Any:
    """Call a function on a thread. If the task is cancelled, `interrupt` is called: the thread cannot be stopped."""
    import asyncio

    context = contextvars.copy_context()
    context.run(current.set, None)
    try:
        return await asyncio.get_running_loop().run_in_executor(None, partial(context.run, call))
    except asyncio.CancelledError:
        if interrupt is not None:
            interrupt()
        raise
