"""Execution of a claimed run in this process, for blocking and async callers and functions.

A sync function runs on the caller's thread, or for an async caller on one of the store's threads. An async function
runs on the running loop, or for a blocking caller on a loop of its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from perdure.runs.engine.claims import Claim
from perdure.runs.engine.execute import execute_run
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution, executing
from perdure.runs.execution.operation import Body, Operation, arun_operation, run_operation
from perdure.runs.execution.scope import current
from perdure.runs.execution.unwinds import Interrupted, wait_in_rounds
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.run_table import RunRow
from perdure.storage.store_threads import threads_of
from perdure.threads.context import StoreContext

T = TypeVar("T")
_INTERRUPTED_S = 5.0  # how long an interrupted caller waits until its run is released


class LocalExecution(Generic[T]):
    """One execution in this process. Subclasses define its operation."""

    def __init__(self, execution: Execution, spec: DurableSpec) -> None:
        self.execution, self.spec = execution, spec

    def run(self) -> T:
        """Drive the operation to its end, blocking."""
        if self.spec.is_async:
            result: T = _on_a_loop(self._run_loop, self.execution.interrupt)
            return result
        # Not a context manager: an interruption during `__enter__` would skip `__exit__`.
        try:
            self._enter()
            # In a copied context: wherever the caller is interrupted, its own context is not left inside the run.
            return contextvars.copy_context().run(run_operation, self.execution.root, self._operation())
        finally:
            self._leave()

    def _run_loop(self) -> T:
        """Drive the operation on a new loop, then leave the run.

        Ctrl-C and SystemExit in a task end the loop without ending its coroutines, so `arun` may not get to leave it.
        """
        import asyncio

        try:
            return asyncio.run(self.arun())
        finally:
            self._leave()

    async def arun(self) -> T:
        """Drive the operation to its end on the running loop."""
        if not self.spec.is_async:
            return await self._on_a_thread()
        from perdure.runs.execution.supervisor import Supervisor

        try:
            self.execution.supervisor = Supervisor(self.execution)
            self._enter()
            return await arun_operation(self.execution.root, self._operation())
        finally:
            self._leave()

    async def _on_a_thread(self) -> T:
        """Drive the operation on one of the store's threads.

        If the calling task is cancelled, the execution is interrupted, because a thread cannot be stopped.
        """
        import asyncio

        context = contextvars.copy_context()
        context.run(current.set, None)
        self._await_thread()
        running = threads_of(self.execution.ctx.driver).submit(partial(context.run, self.run))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            self.execution.interrupt()
            if running.cancelled():  # `run` never began, and will not leave the run
                self._leave()
            raise

    def _operation(self) -> Operation[T]:
        raise NotImplementedError

    def _await_thread(self) -> None:
        """Prepare for waiting until a thread is free."""

    def _enter(self) -> None:
        """Begin the execution."""
        executing.add(self.execution)

    def _leave(self) -> None:
        """End the execution, even if it could not begin. Idempotent."""
        self.execution.alive = False
        executing.discard(self.execution)


class RunExecution(LocalExecution[str]):
    """The execution of a claimed run. It drives the run as far as possible and returns its status."""

    def __init__(
        self,
        ctx: StoreContext,
        tenant: int,
        row: RunRow,
        spec: DurableSpec,
        claim: Claim,
        *,
        args: bytes | None = None,
    ) -> None:
        self._args, self._runtime, self._claim = args, runtime_of(ctx), claim
        context = ctx.seen_from(spec.fn.__module__)
        execution = Execution(context, tenant, row, is_async=spec.is_async, lease_us=self._runtime.lease_us)
        execution.set_clock()
        super().__init__(execution, spec)

    def release(self) -> None:
        """Queue the run again although its code still runs here. The code's writes are refused from then on."""
        self._claim.later_us = 0
        self._runtime.claims.leave(self._claim)

    def _operation(self) -> Operation[str]:
        status = yield from execute_run(self.execution, self.spec, self._args)
        while status == "running":  # a member of a team, which this process keeps for its next message
            self._next_turn()
            status = yield Body(self._turn, is_async=self.spec.is_async)
        self._claim.ended = status != "lost" or self.execution.in_worker  # a worker handles its lost runs itself
        return status

    def _next_turn(self) -> None:
        """Begin a new execution for the next turn of a member, under the same claim."""
        before = self.execution
        assert before.kept is not None
        after = Execution(
            before.ctx, before.tenant, before.kept.row, is_async=before.is_async, lease_us=before.lease_us
        )
        after.kept, after.addresses, after.skew_us = before.kept, before.addresses, before.skew_us
        after.in_worker = before.in_worker
        if self.spec.is_async:
            from perdure.runs.execution.supervisor import Supervisor

            after.supervisor = Supervisor(after)
        executing.add(after)
        self._runtime.add(after, self._leave)
        self.execution = after
        self._runtime.remove(before)
        executing.discard(before)
        before.alive = False
        if before.stop is not None:  # it came in between
            after.halt(before.stop)

    def _turn(self) -> Any:
        operation = execute_run(self.execution, self.spec)
        if self.spec.is_async:
            return arun_operation(self.execution.root, operation)
        return run_operation(self.execution.root, operation)

    def _await_thread(self) -> None:
        self._runtime.add(self.execution, self._leave)  # the lease is already running

    def _enter(self) -> None:
        if not self._runtime.claims.begin(self._claim):
            raise Interrupted("the claim was given up before the run began")
        super()._enter()
        self._runtime.add(self.execution, self._leave)
        if hooks.hook is not None:
            hooks.fault_point("claim", "", self.spec.name, self.execution.row.fence, "after")

    def _leave(self) -> None:
        super()._leave()
        self._runtime.remove(self.execution)
        self._runtime.claims.leave(self._claim)


def _on_a_loop(run_loop: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """Call `run_loop` for a blocking caller, on another thread if a loop already runs on this one.

    If the caller is interrupted while it waits for that thread, `interrupt` is called.
    """
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_loop()
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def body() -> None:
        try:
            results.append(run_loop())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=partial(contextvars.copy_context().run, body), name="perdure-run")
    try:
        thread.start()  # inside the try: it waits until the thread runs, and may be interrupted too
        wait_in_rounds(ended)  # not `join`: an interrupted join marks the thread as ended
    except BaseException:
        interrupt()
        ended.wait(_INTERRUPTED_S)
        raise
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
