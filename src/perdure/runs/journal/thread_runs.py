"""Runs that belong to a thread, in whose tasks their calls were made (`perdure.tasks`): they are deleted with it.

No worker claims, forks or cancels such a run. Its `root` is the number of the thread.
"""

from __future__ import annotations

from functools import partial

from perdure.runs.journal.blobs import drop_loose_blobs
from perdure.runs.journal.rows import TASK
from perdure.storage.program import Batch, Flow, Program, Sql, write

_PAGE = 100
IS_TASK = f"function LIKE '{TASK}%'"
# Locked before what belongs to them is deleted: every writer locks a run before its questions, in the order of runs.
_OF_THREAD = Sql(
    f"""SELECT run FROM run WHERE tenant = :tenant AND root = :thread AND {IS_TASK}
    ORDER BY run LIMIT :limit {{for_update}}"""
)
# Kept long enough, or its thread is gone.
_OVER = Sql(
    f"""SELECT run FROM run r WHERE tenant = :tenant AND {IS_TASK} AND (keep_until <= {{now}} AND status = 'done'
        OR NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.root))
    ORDER BY run LIMIT :limit {{for_update}}"""
)
_DROP = [
    Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND run = :run")
    for table in ("journal", "answer", "ask", "signal", "run_blob", "run_value", "run")
]


def drop_of_thread(tenant: int, thread: int) -> Flow[int]:
    """Remove the runs of a thread that was deleted. Return how many."""
    return _drop_all(tenant, _OF_THREAD, thread=thread)


def sweep(tenant: int, now: int) -> Flow[int]:
    """Remove runs that were kept long enough, and those whose threads are gone. Return how many."""
    return _drop_all(tenant, _OVER, now=now)


def drop_due(tenant: int, now: int) -> Program[int]:
    """Remove what `sweep` removes, inside a transaction that is rolled back. Return how many."""
    total = 0
    while gone := (yield from _drop_some(tenant, _OVER, {"now": now})):
        total += gone
    return total


def _drop_all(tenant: int, which: Sql, **params: int) -> Flow[int]:
    total = 0
    while gone := (yield from write(partial(_drop_some, tenant, which, params))):
        total += gone
    if total:
        yield from drop_loose_blobs(tenant)
    return total


def _drop_some(tenant: int, which: Sql, params: dict[str, int]) -> Program[int]:
    [found] = yield Batch(which(tenant=tenant, limit=_PAGE, **params))
    if found:
        yield Batch(*(sql(tenant=tenant, run=run) for (run,) in found for sql in _DROP))
    return len(found)
