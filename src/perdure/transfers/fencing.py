"""Invalidate leases, fences and generations in a store that continues an earlier point in time.

Processes that used the original may still run, with leases and caches newer than the backup. Runs are queued again, and
fences, generations and numbers jump, so that none issued after the backup is valid. The store's id stays: an effect
that ran after the backup and runs again must reach its receiver with the same key.
"""

from __future__ import annotations

import orjson

from perdure.runs.journal.rows import NEVER, TASK
from perdure.storage.program import Batch, Program, Sql, Statement

_JUMP = 1 << 20
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
_FENCES = Sql(f"UPDATE run SET fence = fence + {_JUMP} WHERE status NOT IN {_FINISHED}")
_GENERATIONS = Sql(f"UPDATE thread SET generation = generation + {_JUMP}")
_NUMBERS = Sql(
    sqlite=f"UPDATE counter SET number = number + {_JUMP}",
    postgres=f"SELECT setval('number', nextval('number') + {_JUMP})",
)
_UNPREPARE = Sql("DELETE FROM prepared")  # what other stores decide concerns the original
_UNMARK = Sql("DELETE FROM meta WHERE key IN ('backup', 'restored', 'replica')")  # first: a replica refuses writes
_ERA = Sql(
    """INSERT INTO meta (key, value) VALUES ('era', '1')
    ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(meta.value AS bigint) + 1 AS text)"""
)
_MARK = Sql(
    "INSERT INTO meta (key, value) VALUES ('restored', :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_RESTORED = Sql("SELECT value FROM meta WHERE key = 'restored'")


def fence_old_processes(backup: str, at: int) -> Program[int]:
    """Invalidate the state of old processes, and record which backup the store continues.

    Return how many runs were queued again. They are recorded until `end_restore`.
    """
    _, tasks, running, *_ = yield Batch(
        *(sql(tenant=None) for sql in (_UNMARK, _TASKS, _RUNNING, _FENCES, _GENERATIONS, _NUMBERS, _ERA, _UNPREPARE))
    )
    requeued = len(tasks) + len(running)
    yield Batch(_mark(backup=backup, at=at, requeued=requeued))
    return requeued


def unfinished_restore(backup: str) -> Program[int | None]:
    """Return how many runs a restore of this backup queued again, if it was killed before `end_restore`; else None."""
    [rows] = yield Batch(_RESTORED(tenant=None), last=True)
    mark = orjson.loads(rows[0][0]) if rows else {}
    return mark.get("requeued") if mark.get("backup") == backup else None


def end_restore(backup: str, at: int) -> Program[None]:
    """Record that a restored store was verified. From now on a restore into it is refused."""
    yield Batch(_mark(backup=backup, at=at), last=True)


def _mark(**value: str | int) -> Statement:
    return _MARK(tenant=None, value=orjson.dumps(value).decode())
