"""Runs that stand for tasks of a graph: they hold what the steps and effects of a node have written down.

Such a run has no code of its own: whoever runs the graph runs it, and nobody else claims, forks or cancels it. It is
done when what the task wrote is stored. Its `root` is the number of the graph's thread, so that it goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.errors import UsageError
from holdfast.log.branches import try_thread
from holdfast.runs import rows
from holdfast.runs.retention import drop_loose_blobs
from holdfast.runs.rows import Hold, NewRun, RunRow
from holdfast.storage.program import Batch, Flow, Program, Sql, Statement, read, write

FUNCTION = "langgraph:"  # what the names of their functions begin with; then the node's
QUEUE = "langgraph"  # not one that workers serve, nor one whose limits count them
NEVER = 2**61
_PAGE = 100
_IS_TASK = f"function LIKE '{FUNCTION}%'"
# A task that is done is run again only if somebody goes back to its checkpoint: what it did stands.
_CLAIM = Sql(
    f"""UPDATE run SET status = 'running', owner = :owner, fence = fence + 1, lease_until = {{now}} + :lease,
        nudged = 0, waiting = NULL, changed_at = {{now}}, keep_until = NULL
    WHERE tenant = :tenant AND run = :run AND fence = :fence
        AND (status <> 'running' OR lease_until <= {{now}} OR :dead = 1)
    RETURNING {", ".join(RunRow._fields)}"""
)
_END = Sql(
    """UPDATE run SET status = :status, owner = NULL, waiting = :waiting, wake_at = :wake_at, changed_at = {now},
        keep_until = CASE WHEN CAST(:keep AS bigint) IS NULL THEN NULL ELSE {now} + CAST(:keep AS bigint) END
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'"""
)
_OF_THREAD = Sql(f"SELECT run FROM run WHERE tenant = :tenant AND root = :thread AND {_IS_TASK} LIMIT :limit")
_OVER = Sql(
    f"""SELECT run FROM run WHERE tenant = :tenant AND keep_until <= {{now}} AND status = 'done' AND {_IS_TASK}
    LIMIT :limit"""
)
_STRAYS = Sql(
    f"""SELECT run FROM run r WHERE tenant = :tenant AND {_IS_TASK}
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.root) LIMIT :limit"""
)
_DROP = [
    Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND run = :run")
    for table in ("journal", "answer", "ask", "signal", "run_blob", "run_value", "run")
]


def is_task(function: str) -> bool:
    """Whether a run of this function stands for a task of a graph."""
    return function.startswith(FUNCTION)


def check_no_task(row: RunRow, verb: str) -> None:
    """Raise UsageError for a run that only its graph can go on with."""
    if is_task(row.function):
        raise UsageError(
            f"run {row.id!r} cannot be {verb}: it stands for a task of a LangGraph graph, and goes on when that is run"
        )


def take(
    tenant: int, new: NewRun, *, owner: str, lease: int, now: int, is_dead: Callable[[str], bool]
) -> Program[tuple[RunRow, bool]]:
    """The run of a task: made, or taken over from whoever ran it before. False: its owner may be alive."""
    row, made = yield from rows.create(tenant, new, now=now, owner=owner, lease=lease)
    if made:
        return row, True
    dead = row.owner is not None and is_dead(row.owner)
    [found] = yield Batch(
        _CLAIM(tenant=tenant, run=row.run, fence=row.fence, owner=owner, lease=lease, now=now, dead=int(dead)),
        last=True,
    )
    return (RunRow._make(found[0]), True) if found else (row, False)


def end(hold: Hold, *, done: bool, waiting: str | None, keep_us: int | None, now: int) -> Statement:
    """What says that a task is done, or what it waits for until the graph is run again."""
    return _END(
        **hold._asdict(),
        status="done" if done else "waiting",
        waiting=waiting,
        wake_at=0 if done else NEVER,
        keep=keep_us if done else None,
        now=now,
    )


def number_of(tenant: int, name: str) -> Flow[int | None]:
    """A thread's number, to drop its tasks by when it is gone."""
    row = yield from read(partial(try_thread, tenant, name))
    return None if row is None else row.thread


def drop_of_thread(tenant: int, thread: int | None) -> Flow[int]:
    """Remove the tasks of a thread that was deleted. How many."""
    if thread is None:
        return 0
    return (yield from _drop_all(tenant, _OF_THREAD, thread=thread))


def sweep(tenant: int, now: int) -> Flow[int]:
    """Remove the tasks that were kept long enough, and those whose threads are gone. How many."""
    over = yield from _drop_all(tenant, _OVER, now=now)
    return over + (yield from _drop_all(tenant, _STRAYS))


def _drop_all(tenant: int, which: Sql, **params: int) -> Flow[int]:
    total = 0
    while gone := (yield from write(partial(_drop_some, tenant, which, params))):
        total += gone
        if gone < _PAGE:
            break
    if total:
        yield from drop_loose_blobs(tenant)
    return total


def _drop_some(tenant: int, which: Sql, params: dict[str, int]) -> Program[int]:
    [found] = yield Batch(which(tenant=tenant, limit=_PAGE, **params))
    if found:
        yield Batch(*(sql(tenant=tenant, run=run) for (run,) in found for sql in _DROP), last=True)
    return len(found)
