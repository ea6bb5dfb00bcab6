"""Runs that stand for tasks of a graph: they hold what the steps and effects of a node have written down.

Such a run has no code of its own: whoever runs the graph runs it, and nobody else claims, forks or cancels it. It is
done when what the task wrote is stored. Its `root` is the number of the graph's thread, so that it goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.log.branches import try_thread
from holdfast.runs.journal import rows
from holdfast.runs.journal.blobs import drop_loose_blobs
from holdfast.runs.journal.rows import RUN_CELLS, TASK, WAITS, Hold, NewRun, RunRow
from holdfast.storage.program import Batch, Flow, Program, Sql, Statement, read, write

QUEUE = "langgraph"  # not one that workers serve, nor one whose limits count them
_PAGE = 100
_TRIES = 3
IS_TASK = f"function LIKE '{TASK}%'"
# A task that is done is run again only if somebody goes back to its checkpoint: what it did stands.
_CLAIM = Sql(
    f"""UPDATE run SET status = 'running', owner = :owner, fence = fence + 1, lease_until = {{now}} + :lease,
        nudged = 0, waiting = NULL, changed_at = {{now}}, keep_until = NULL
    WHERE tenant = :tenant AND run = :run AND fence = :fence
        AND (status <> 'running' OR lease_until <= {{now}} OR :dead = 1)
    RETURNING {", ".join(RunRow._fields)}""",
    opens=RUN_CELLS,
)
_END = Sql(
    """UPDATE run SET status = :status, owner = NULL, waiting = :waiting, wake_at = :wake_at, changed_at = {now},
        keep_until = CASE WHEN CAST(:keep AS bigint) IS NULL THEN NULL ELSE {now} + CAST(:keep AS bigint) END
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'""",
    seals=WAITS,
)
# Locked before what belongs to them is deleted: every writer locks a run before its questions, in the order of runs.
_OF_THREAD = Sql(
    f"""SELECT run FROM run WHERE tenant = :tenant AND root = :thread AND {IS_TASK}
    ORDER BY run LIMIT :limit {{for_update}}"""
)
_OVER = Sql(
    f"""SELECT run FROM run WHERE tenant = :tenant AND keep_until <= {{now}} AND status = 'done' AND {IS_TASK}
    ORDER BY run LIMIT :limit {{for_update}}"""
)
_STRAYS = Sql(
    f"""SELECT run FROM run r WHERE tenant = :tenant AND {IS_TASK}
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.root)
    ORDER BY run LIMIT :limit {{for_update}}"""
)
_DROP = [
    Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND run = :run")
    for table in ("journal", "answer", "ask", "signal", "run_blob", "run_value", "run")
]


def take(
    tenant: int, new: NewRun, *, owner: str, lease_us: int, clock_us: Callable[[], int], is_dead: Callable[[str], bool]
) -> Flow[RunRow | None]:
    """The run of a task: made, or taken over from whoever ran it before. None: its owner may be alive."""
    for _ in range(_TRIES):
        create = partial(rows.create, tenant, new, now=clock_us(), owner=owner, lease=lease_us)
        row, made = yield from write(create)
        if made:
            return row
        dead = row.owner is not None and is_dead(row.owner)
        params = {"fence": row.fence, "owner": owner, "lease": lease_us, "now": clock_us(), "dead": int(dead)}
        claimed = yield from write(partial(_claim, tenant, row.run, params))
        if claimed is not None:
            return claimed
    return None


def _claim(tenant: int, run: int, params: dict[str, Any]) -> Program[RunRow | None]:
    [found] = yield Batch(_CLAIM(tenant=tenant, run=run, **params), last=True)
    return RunRow._make(found[0]) if found else None


def end(hold: Hold, *, done: bool, waiting: str | None, keep_us: int | None, now: int) -> Statement:
    """What says that a task is done, or what it waits for until the graph is run again."""
    return _END(
        **hold._asdict(),
        status="done" if done else "waiting",
        waiting=waiting,
        wake_at=0 if done else rows.NEVER,
        keep=keep_us if done else None,
        now=now,
    )


def one(statement: Statement) -> Program[None]:
    """A program of one statement."""
    yield Batch(statement, last=True)


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
