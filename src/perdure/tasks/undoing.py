"""Undoing the effects of a thread's tasks, newest first, each as a journaled effect of its task's run.

The decision is recorded in every run first, so a task that runs again after it raises RunUndone, and an undo that broke
off continues where it was. What follows for the framework's graph is the adapter's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perdure.errors import NotFound
from perdure.log.thread_table import find_thread
from perdure.runs.calls import saga
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.thread_answers import GRAPH, RESUMPTION
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, Wait, arun_operation, run_operation
from perdure.runs.execution.policy import CallPolicy
from perdure.runs.execution.scope import Scope
from perdure.runs.journal import standing
from perdure.runs.journal.entries import Recorded, completion
from perdure.runs.journal.journal import paths_in, read_whole, read_with_sum
from perdure.runs.journal.rows import COLUMNS, RUN_ENCRYPTED, NewRun
from perdure.runs.journal.thread_runs import IS_TASK
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Flow, Program, Sql, Statement, adrive, drive, read, write
from perdure.tasks import rows
from perdure.tasks.executions import is_any_busy, runs_elsewhere
from perdure.tasks.policy import seconds_to_wait
from perdure.threads.actions import noted
from perdure.threads.context import StoreContext

_TASKS = Sql(
    f"""SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND root = :thread AND {IS_TASK}
    AND function <> '{RESUMPTION}' ORDER BY run""",
    opens=RUN_ENCRYPTED,
)


class UndoPolicy(CallPolicy):
    """The policy of undos: they wait in this process, and raise if a person must decide first."""

    is_run = False

    def wait_s(self, scope: Scope, wait: Wait) -> float:
        """Return how many seconds to wait. Raises InDoubt or RunStuck if a person is needed."""
        return seconds_to_wait(scope, wait, "undo the thread again")


def undo(ctx: StoreContext, thread: str, who: str | None = None) -> int:
    """Undo the effects of a thread's tasks that have an undo. Return how many have been undone.

    Raises NotFound, LeaseLost if another process is at the thread, and InDoubt or RunStuck if a person must act first.
    """
    executions = drive(ctx.driver, _noted(ctx, thread, who, is_async=False))
    try:
        return run_operation(executions[0].root, _undo_all(executions)) if executions else 0
    finally:
        drive(ctx.driver, _release(executions))


async def aundo(ctx: StoreContext, thread: str, who: str | None = None) -> int:
    """`undo`, awaited."""
    executions = await adrive(ctx.driver, _noted(ctx, thread, who, is_async=True))
    try:
        return await arun_operation(executions[0].root, _undo_all(executions)) if executions else 0
    finally:
        await adrive(ctx.driver, _release(executions))


def _undo_all(executions: Sequence[Execution]) -> Operation[int]:
    for execution in executions:
        yield from saga.decide(execution, "undone", None)
    for execution in executions:
        yield from saga.settle_open(execution)
    effects = [
        (_ended_at(execution, intent), number, seq, execution, intent)
        for number, execution in enumerate(executions)
        for seq, intent in standing.undoable(execution.index.calls())
    ]
    for *_, execution, intent in sorted(effects, key=lambda effect: effect[:3], reverse=True):
        yield from saga.undo_effect(execution, intent.entry)
    return len(effects)


def _ended_at(execution: Execution, intent: Recorded) -> int:
    ended = completion(execution.index.at(intent.entry.path))
    return intent.entry.at if ended is None else ended.at


def _noted(ctx: StoreContext, name: str, who: str | None, *, is_async: bool) -> Flow[list[Execution]]:
    return noted(ctx, who, "undo", f"thread {name}", _take(ctx, name, is_async=is_async))


def _take(ctx: StoreContext, name: str, *, is_async: bool) -> Flow[list[Execution]]:
    """Take the runs of the tasks that have something to undo, and the thread's turn."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        raise NotFound(f"there is no thread {name!r} in this store")
    thread, runs = yield from read(partial(_to_undo, tenant, name))
    if is_any_busy(ctx, name):
        raise runs_elsewhere(ctx, name)
    runtime = runtime_of(ctx)
    executions: list[Execution] = []
    for row in runs:
        new = NewRun(row.id, row.function, row.version, b"{}", b"", row.incarnation, row.queue, root=thread)
        taken = yield from rows.take(
            rows.NewTask(tenant, thread, new, _no_check),
            owner=runtime.owner.text,
            lease_us=runtime.lease_us,
            clock_us=ctx.clock_us,
            is_dead=lambda owner: runtime.owns(owner) or runtime.owner.is_dead(owner),
        )
        if taken is None:
            yield from _release(executions)
            raise runs_elsewhere(ctx, name)
        execution = Execution(ctx, tenant, taken, is_async=is_async, lease_us=runtime.lease_us)
        execution.policy, execution.undoing = UndoPolicy(), True
        execution.index.load(*(yield from read(partial(read_with_sum, tenant, taken))))
        execution.set_clock()
        runtime.add(execution, lambda: None)
        executions.append(execution)
    return executions


def _no_check(_head: int | None) -> Program[None]:
    yield from ()


def _to_undo(tenant: int, name: str) -> Program[tuple[int, list[RunRow]]]:
    row = yield from find_thread(tenant, name)
    [tasks] = yield Batch(_TASKS(tenant=tenant, thread=row.thread))
    left = []
    for run in map(RunRow._make, tasks):
        calls = paths_in((yield from read_whole(tenant, run)).entries)
        if standing.open_calls(calls.items()) or standing.undoable(calls.items()):
            left.append(run)
    return row.thread, left


def _release(executions: Sequence[Execution]) -> Flow[None]:
    """End the runs. Those whose undo broke off wait for the next one."""
    for execution in executions:
        runtime_of(execution.ctx).remove(execution)
        calls = execution.index.calls()
        ended = (execution.index.at(f"{standing.UNDO}{intent.entry.path}") for _, intent in standing.undoable(calls))
        is_done = saga.ending(execution) is not None and all(completion(one) is not None for one in ended)
        statement = rows.end(
            execution.token,
            execution.index.total(),
            done=is_done,
            waiting=None if is_done else GRAPH.as_text(),
            now=execution.ctx.clock_us(),
        )
        yield from write(partial(_one, statement))


def _one(statement: Statement) -> Program[None]:
    yield Batch(statement, last=True)
