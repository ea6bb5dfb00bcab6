"""Fencing the past: what a store is told when it continues an earlier point in time.

Processes that used the original may still run, with handles, leases and caches of a time that did not happen here.
Nothing of theirs may fit by accident:

    runs that were running     are queued again, without an owner
    fences of unfinished runs  jump, so that no fence that was given out after the backup is valid
    generations of threads     jump, so that no difference made against a later arrangement is accepted
    numbers                    jump, so that none that was given out after the backup is given out again
    the era                    grows by one

The store's id stays: idempotency keys are made from it, and an effect that ran after the backup and runs again must
reach its receiver with the same key.
"""

from __future__ import annotations

import orjson

from perdure.runs.journal.rows import NEVER, TASK
from perdure.storage.program import Batch, Program, Sql

_JUMP = 1 << 20
_FENCE_JUMP = 10_000  # smaller: users see it, as the number of attempts
_FINISHED = "('done', 'failed', 'cancelled', 'undone', 'exported')"
# A graph's task is resumed when its graph is run again.
_TASKS = Sql(
    f"""UPDATE run SET status = 'waiting', owner = NULL, lease_until = 0, wakeup_pending = 0, wake_at = {NEVER}
    WHERE status = 'running' AND function LIKE '{TASK}%' RETURNING run"""
)
_RUNNING = Sql(
    """UPDATE run SET status = 'queued', owner = NULL, lease_until = 0, wakeup_pending = 0, wake_at = 0, waiting = NULL
    WHERE status = 'running' RETURNING run"""
)
_FENCES = Sql(f"UPDATE run SET fence = fence + {_FENCE_JUMP} WHERE status NOT IN {_FINISHED}")
_GENERATIONS = Sql(f"UPDATE thread SET generation = generation + {_JUMP}")
_NUMBERS = Sql(
    sqlite=f"UPDATE counter SET number = number + {_JUMP}",
    postgres=f"SELECT setval('number', nextval('number') + {_JUMP})",
)
_UNMARK = Sql("DELETE FROM meta WHERE key IN ('backup', 'restored', 'replica')")  # first: a replica takes no writes
_ERA = Sql(
    """INSERT INTO meta (key, value) VALUES ('era', '1')
    ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(meta.value AS bigint) + 1 AS text)"""
)
_MARK = Sql("INSERT INTO meta (key, value) VALUES ('restored', :value)")
_RESTORED = Sql("SELECT value FROM meta WHERE key = 'restored'")


def fence_old_processes(backup: str, at: int) -> Program[int]:
    """Do all that, in one transaction, and remember which backup the store continues. How many runs were queued again.
    If it was done for this backup and moment before, nothing is done."""
    [done] = yield Batch(_RESTORED(tenant=None))
    if done and orjson.loads(done[0][0]).get("at") == at:
        return 0
    _, tasks, running, *_ = yield Batch(
        *(sql(tenant=None) for sql in (_UNMARK, _TASKS, _RUNNING, _FENCES, _GENERATIONS, _NUMBERS, _ERA)),
        _MARK(tenant=None, value=orjson.dumps({"backup": backup, "at": at}).decode()),
    )
    return len(tasks) + len(running)
