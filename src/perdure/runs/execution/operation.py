"""Operations: journaled calls as generators. They yield commands, and are driven blocking or async.

    Transaction   run it in the database
    Body          call the user's function
    Pause         sleep for a short time
    Wait          wait for something that may take days; the run parks if it has nothing else to do
    Await         await something else; a blocking caller cannot, and gets None

So a step, an effect and a question are each written once. Must never happen here: a decision.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.runs.execution.scope import Scope, Unwind, current
from perdure.runs.journal.kinds import CallKind
from perdure.runs.run_table import Waiting
from perdure.storage.program import Transaction
from perdure.storage.store_threads import threads_of

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution

T = TypeVar("T")
NOTHING = Waiting("")


@dataclass(slots=True, repr=False, eq=False)  # not frozen, which would more than double the cost of making one
class Body:
    """A call of the user's function. `call` returns the result, or for an async function an awaitable."""

    call: Callable[[], Any]
    is_async: bool = False


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Pause:
    """A short sleep in this process. `instead_of` is the Wait that a longer one would be."""

    seconds: float
    instead_of: Wait | None = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Wait:
    """A wait for something outside. It looks again at `wake_at` at the latest, in microseconds since 1970."""

    path: str
    what: Waiting = NOTHING
    wake_at: int | None = None
    kind: CallKind | None = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Await:
    """An awaitable to await while other tasks of the run continue."""

    call: Callable[[], Awaitable[Any]]


Command = Transaction | Body | Pause | Wait | Await
Operation = Generator[Command, Any, T]


class Parked(Unwind):
    """The run can only wait. Its code ends here, and starts again from the top later."""

    def __init__(self) -> None:
        super().__init__("the run is parked: it resumes when what it waits for has come")


def run_operation(scope: Scope, operation: Operation[T]) -> T:
    """Drive an operation to its end, blocking. A wait ends this branch."""
    execution = scope.execution
    run = execution.ctx.driver.run
    try:
        want = next(operation)
        while True:
            try:
                if type(want) is Transaction:
                    answer = run(want)
                elif type(want) is Body:
                    answer = _blocking(want)
                elif isinstance(want, Transaction):  # a call, or an append
                    answer = want.perform(execution.ctx.driver)
                elif type(want) is Pause:
                    answer = time.sleep(want.seconds)  # type: ignore[func-returns-value]
                elif type(want) is Await:
                    answer = None
                else:
                    assert isinstance(want, Wait)
                    seconds = execution.policy.wait_s(scope, want)
                    if seconds is None:
                        execution.waits.append(want)
                        scope.stop = Parked()
                        if execution.supervisor is not None:
                            execution.supervisor.park_for(scope.stop)
                        raise scope.stop
                    answer = time.sleep(seconds)  # type: ignore[func-returns-value]
            except BaseException as error:
                want = operation.throw(error)
            else:
                want = operation.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except Exception as error:
        if scope.holds:
            scope.hold(error)
        raise


def _blocking(body: Body) -> Any:
    if not body.is_async:
        return body.call()
    raise TypeError("an async function cannot be called from a blocking one: make the durable function async")


async def arun_operation(scope: Scope, operation: Operation[T]) -> T:
    """Drive an operation to its end on the running event loop. A wait suspends this branch."""
    execution = scope.execution
    driver = execution.ctx.driver
    cancelled: BaseException | None = None
    try:
        want = next(operation)
        while True:
            execution.busy += 1
            try:
                if cancelled is not None:
                    error, cancelled = cancelled, None
                    raise error
                if type(want) is Transaction:
                    answer, cancelled = await _transact(execution, want)
                elif type(want) is Body:
                    answer = await (want.call() if want.is_async else threads_of(driver).call(want.call))
                elif isinstance(want, Transaction):  # a call, or an append
                    answer = await want.aperform(driver)
                elif type(want) is Pause:
                    answer = await execution.loop_sleep(want.seconds)  # type: ignore[func-returns-value]
                elif type(want) is Await:
                    answer = await want.call()
                else:
                    assert isinstance(want, Wait)
                    answer = await _asuspend(scope, want)  # type: ignore[func-returns-value]
            except BaseException as error:
                want = operation.throw(error)
            else:
                want = operation.send(answer)
            finally:
                execution.busy -= 1
    except StopIteration as stop:
        if cancelled is not None:
            raise cancelled from None  # the operation is recorded, but its caller was cancelled
        return stop.value  # type: ignore[no-any-return]
    except Unwind as end:
        while end.waits:
            await execution.suspend(Wait(""))
        raise
    except Exception as error:
        if scope.holds:
            scope.hold(error)
        raise


async def _transact(execution: Execution, want: Transaction) -> tuple[Any, Any]:
    """Run a transaction. Return its answer, and the CancelledError if this task was cancelled during a write.

    It runs outside the run's scope, because tasks that a driver makes do not belong to the run. A write is completed
    even if this task is cancelled, because it must be known what was written. Writes are answered in the order in which
    they began. That is the order of the journal, in which a replay hands out their ends.
    """
    driver = execution.ctx.driver
    if not want.write:
        token = current.set(None)
        try:
            return await driver.arun(want), None
        finally:
            current.reset(token)
    import asyncio

    context = contextvars.copy_context()
    context.run(current.set, None)
    writing = asyncio.Task(driver.arun(want), context=context)
    write = execution.writes.add(writing)
    cancelled: BaseException | None = None
    while not write.is_answered:
        try:
            await write.renewed_future()
        except asyncio.CancelledError as error:
            cancelled = error
    if writing.cancelled():
        raise asyncio.CancelledError
    if cancelled is not None and writing.exception() is not None:
        raise cancelled
    return writing.result(), cancelled


async def _asuspend(scope: Scope, wait: Wait) -> None:
    execution = scope.execution
    seconds = execution.policy.wait_s(scope, wait)
    if seconds is not None:
        await execution.loop_sleep(seconds)
        return
    execution.busy -= 1
    try:
        await execution.suspend(wait)
    finally:
        execution.busy += 1
