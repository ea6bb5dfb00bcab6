"""Invalidate leases, fences and generations in a store that continues an earlier point in time.

Processes that used the original may still run. Their handles, leases and caches may be newer than the backup, and none
of them may be valid here:

    runs that were running     are queued again, without an owner
    fences of unfinished runs  jump, so that no fence issued after the backup is valid
    generations of threads     jump, so that no difference to a later arrangement of records is accepted
    numbers                    jump, so that no number issued after the backup is issued again
    the era                    grows by one

The store's id stays, because idempotency keys are derived from it. An effect that ran after the backup and runs again
must reach its receiver with the same key.
"""

from __future__ import annotations

import orjson

from perdure.runs.journal.rows import NEVER, TASK
from perdure.storage.program import Batch, Program, Sql

_JUMP = 1 << 20
_FENCE_JUMP = 10_000  # smaller than _JUMP, because users see the fence as the number of attempts
_FINISHED = "('done', 'failed', 'cancelled', 'undone', 'exported')"
# A graph's task waits instead of being queued: it is resumed when its graph runs again.
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
_UNMARK = Sql("DELETE FROM meta WHERE key IN ('backup', 'restored', 'replica')")  # first: a replica refuses writes
_ERA = Sql(
    """INSERT INTO meta (key, value) VALUES ('era', '1')
    ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(meta.value AS bigint) + 1 AS text)"""
)
_MARK = Sql("INSERT INTO meta (key, value) VALUES ('restored', :value)")
_RESTORED = Sql("SELECT value FROM meta WHERE key = 'restored'")


def fence_old_processes(backup: str, at: int) -> Program[int]:
    """Invalidate the state of old processes, and record which backup the store continues.

    Return how many runs were queued again. Safe to repeat: do nothing and return 0 if it was done at this moment (`at`)
    already.
    """
    [done] = yield Batch(_RESTORED(tenant=None))
    if done and orjson.loads(done[0][0]).get("at") == at:
        return 0
    _, tasks, running, *_ = yield Batch(
        *(sql(tenant=None) for sql in (_UNMARK, _TASKS, _RUNNING, _FENCES, _GENERATIONS, _NUMBERS, _ERA)),
        _MARK(tenant=None, value=orjson.dumps({"backup": backup, "at": at}).decode()),
    )
    return len(tasks) + len(running)
