"""Runs that hold the calls of a thread's tasks (`perdure.tasks`). They are deleted with the thread.

Such a run is never claimed by a worker, forked or cancelled. Its `root` is the number of the thread.
"""

from __future__ import annotations

from functools import partial

from perdure.runs.journal.blobs import drop_loose_blobs
from perdure.runs.journal.rows import TASK
from perdure.runs.run_table import RUN
from perdure.runs.tables import PARTS
from perdure.storage.program import Batch, Flow, Program, Sql, write

_PAGE = 100
IS_TASK = f"function LIKE '{TASK}%'"
# Runs are locked before their rows in other tables are deleted: every writer locks a run before its questions, and
# runs in the order of their numbers.
_OF_THREAD = Sql(
    f"""SELECT run FROM run WHERE tenant = :tenant AND root = :thread AND {IS_TASK}
    ORDER BY run LIMIT :limit {{for_update}}"""
)
# Runs that are past `keep_until`, or whose threads are gone.
_OVER = Sql(
    f"""SELECT run FROM run r WHERE tenant = :tenant AND {IS_TASK} AND (keep_until <= {{now}} AND status = 'done'
        OR NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.root))
    ORDER BY run LIMIT :limit {{for_update}}"""
)
_DROP = [Sql(f"DELETE FROM {table.name} WHERE tenant = :tenant AND run = :run") for table in (*PARTS, RUN)]


def drop_of_thread(tenant: int, thread: int) -> Flow[int]:
    """Remove the runs of a deleted thread. Return how many."""
    return _drop_all(tenant, _OF_THREAD, thread=thread)


def sweep(tenant: int, now: int) -> Flow[int]:
    """Remove finished runs that are past `keep_until`, and runs whose threads are gone. Return how many."""
    return _drop_all(tenant, _OVER, now=now)


def drop_due(tenant: int, now: int) -> Program[int]:
    """Remove the runs that `sweep` removes, inside a transaction that is rolled back. Return how many."""
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
    [dropped] = yield Batch(which(tenant=tenant, limit=_PAGE, **params))
    if dropped:
        yield Batch(*(sql(tenant=tenant, run=run) for (run,) in dropped for sql in _DROP))
    return len(dropped)
