"""Resuming threads whose tasks have got an answer: which threads are due, and one process at a time that resumes each.

A resumption is a run (`runs/engine/thread_answers.py`). While a process has it, the thread is that process's: the run
counts as its open task, so another process that wants to write to the thread is refused, as in `rows.py`. If the
process dies, another one claims the resumption, and the tasks find the same answers.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import orjson

from perdure.errors import Conflict, LeaseLost
from perdure.log.tables import THREAD_METADATA
from perdure.log.task_questions import answered_in, questions_in, tasks_of
from perdure.log.thread_table import find_thread
from perdure.runs.engine.execute import PASSING
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.thread_answers import GRAPH, RESUMPTION, TASKS_QUEUE, resumption
from perdure.runs.execution.execution import Execution
from perdure.runs.journal.rows import NEVER, WAITS, FenceToken
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, read, write
from perdure.tasks import rows
from perdure.threads.context import StoreContext

_DUE_MAX = 1000
_AGAIN_US = 5_000_000  # a pause before a thread that another process was at is resumed
_PASSING = (*PASSING, LeaseLost, Conflict)
_IS_DUE = f"queue = '{TASKS_QUEUE}' AND status = 'waiting' AND wake_at <= {{now}}"
# Tasks that an answer or a verdict has woken, and resumptions whose process may have died.
_DUE = Sql(
    f"""SELECT t.thread, t.metadata, t.name, r.owner, r.status = 'waiting' OR r.lease_until <= {{now}}
    FROM run r JOIN thread t ON t.tenant = r.tenant AND t.thread = r.root
    WHERE r.tenant = :tenant AND ({_IS_DUE} OR r.status = 'running' AND r.function = '{RESUMPTION}')
    LIMIT {_DUE_MAX}""",
    opens={1: THREAD_METADATA.at(0)},
)
_OF_THREAD = "tenant = :tenant AND root = :thread"
_WOKEN = Sql(f"SELECT function FROM run WHERE {_OF_THREAD} AND {_IS_DUE}")
_LEFT = Sql(f"SELECT 1 FROM run WHERE {_OF_THREAD} AND function = '{RESUMPTION}' AND status = 'running'")
# The claim takes the wakes: a graph that fails is not resumed again until there is another answer.
_TAKE_WAKES = Sql(f"UPDATE run SET wake_at = {NEVER} WHERE {_OF_THREAD} AND {_IS_DUE}")
_DONE = Sql(
    f"""UPDATE run SET status = 'done', wake_at = 0, waiting = NULL WHERE {_OF_THREAD} AND {_IS_DUE}
    AND function = '{RESUMPTION}'"""
)
_END = Sql(
    """UPDATE run SET owner = NULL, changed_at = {now}, keep_until = NULL, waiting = :waiting,
        status = CASE WHEN wakeup_pending = 1 THEN 'waiting' ELSE :status END,
        wake_at = CASE WHEN wakeup_pending = 1 THEN 0 ELSE CAST(:wake_at AS bigint) END, wakeup_pending = 0
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'""",
    seals=WAITS,
)


class Resumption(NamedTuple):
    """A thread that this process is to resume."""

    thread: str
    execution: Execution


class _NotDue(Exception):
    """Every answer was taken. Raised to roll back a claim."""


def due(ctx: StoreContext) -> Flow[dict[str, dict[str, Any]]]:
    """Return the threads that are to be resumed, by name, each with its metadata."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return {}
    rows_ = yield from read(partial(_due, tenant, ctx.clock_us()))
    runtime = runtime_of(ctx)
    return {
        name: orjson.loads(metadata)
        for _, metadata, name, owner, is_free in rows_
        if is_free or (not runtime.owns(owner) and runtime.owner.is_dead(owner))
    }


def _due(tenant: int, now: int) -> Program[Rows]:
    [threads] = yield Batch(_DUE(tenant=tenant, now=now), last=True)
    return threads


def claim(ctx: StoreContext, name: str) -> Flow[Resumption | None]:
    """Claim the resumption of a thread. Return None if nothing is due, or if another process is at the thread."""
    tenant = yield from ctx.ensure_tenant()
    runtime = runtime_of(ctx)
    row = yield from read(partial(find_thread, tenant, name))
    new, now = resumption(ctx, name, row.thread), ctx.clock_us()
    try:
        run = yield from rows.take(
            rows.NewTask(tenant, row.thread, new, partial(_check_due, tenant, name, now)),
            owner=runtime.owner.text,
            lease_us=runtime.lease_us,
            clock_us=ctx.clock_us,
            is_dead=lambda owner: not runtime.owns(owner) and runtime.owner.is_dead(owner),
        )
    except _NotDue:
        yield from write(partial(_drop_wake, tenant, name, now))
        return None
    if run is None:
        return None
    execution = Execution(ctx, tenant, run, is_async=False, lease_us=runtime.lease_us)
    runtime.add(execution, lambda: None)
    return Resumption(name, execution)


def _check_due(tenant: int, name: str, now: int, _head: int | None) -> Generator[Batch, list[Rows], None]:
    if not (yield from _is_due(tenant, name, now)):
        raise _NotDue
    row = yield from find_thread(tenant, name)
    yield Batch(_TAKE_WAKES(tenant=tenant, thread=row.thread, now=now))


def _is_due(tenant: int, name: str, now: int) -> Generator[Batch, list[Rows], bool]:
    """Return whether a thread is to be resumed. The thread's row must be locked."""
    row = yield from find_thread(tenant, name)
    key = {"tenant": tenant, "thread": row.thread}
    woken, left = yield Batch(_WOKEN(**key, now=now), _LEFT(**key))
    if left or any(function != RESUMPTION for (function,) in woken):
        return True
    answered = (
        {one.get("id") for one in questions_in(task)} & {one["id"] for one in answered_in(task)}
        for task in (yield from tasks_of(tenant, row))
    )
    return bool(woken) and any(answered)


def _drop_wake(tenant: int, name: str, now: int) -> Program[None]:
    """End a resumption whose answers were all taken, unless there is another answer by now."""
    row = yield from find_thread(tenant, name, lock=True)
    if not (yield from _is_due(tenant, name, now)):
        yield Batch(_DONE(tenant=tenant, thread=row.thread, now=now), last=True)


def end(resumption: Resumption, error: BaseException | None) -> Flow[None]:
    """End a resumption. If an answer came meanwhile, or the error is one that passes, the thread is due again."""
    execution = resumption.execution
    runtime_of(execution.ctx).remove(execution)
    now = execution.ctx.clock_us()
    wake_at = now + _AGAIN_US if isinstance(error, _PASSING) else NEVER
    if isinstance(error, CancelledError):  # the worker ends
        wake_at = 0
    token: FenceToken = execution.token
    statement = _END(
        **token._asdict(),
        status="done" if error is None else "waiting",
        waiting=None if error is None else GRAPH.as_text(),
        wake_at=0 if error is None else wake_at,
        now=now,
    )
    yield from write(partial(_run, statement))


def _run(statement: Any) -> Program[None]:
    yield Batch(statement, last=True)
