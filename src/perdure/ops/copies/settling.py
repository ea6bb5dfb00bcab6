"""What a restored store is told about its past: it goes on from an earlier point, and somebody may not know that.

Processes that used the store before may still be there, with handles, leases and caches of a time that did not happen
here. Nothing of theirs may fit by accident:

    runs that were running    are queued again: whoever ran them does not own them here
    fences of unfinished runs jump, so that no fence that was given out after the backup is valid
    generations of threads    jump, so that no difference made against a later arrangement is taken
    numbers                   jump, so that none that was given out after the backup is given out again
    the era                   grows by one

Until the restore has come to its end the store also says that it has not (`restoring` in `meta`): so the same restore,
run again after a fault or a kill, takes up what is there instead of refusing it.

The store's id stays: idempotency keys are made of it, and an effect that was done after the backup, and is done again
now, must reach its receiver with the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from perdure.runs.journal.rows import NEVER, TASK

JUMP = 1 << 20
FENCE_JUMP = 10_000  # smaller: people see it, as the number of attempts
_FINISHED = "('done', 'failed', 'cancelled', 'rolled_back', 'exported')"
# A graph's task goes on when its graph is run again.
_TASKS = f"""UPDATE run SET status = 'waiting', owner = NULL, lease_until = 0, wakeup_pending = 0, wake_at = {NEVER}
    WHERE status = 'running' AND function LIKE '{TASK}%'"""
_RUNNING = """UPDATE run SET status = 'queued', owner = NULL, lease_until = 0,
    wakeup_pending = 0, wake_at = 0, waiting = NULL
    WHERE status = 'running'"""
_FENCES = f"UPDATE run SET fence = fence + {FENCE_JUMP} WHERE status NOT IN {_FINISHED}"
_GENERATIONS = f"UPDATE thread SET generation = generation + {JUMP}"
_UNMARK = "DELETE FROM meta WHERE key IN ('backup', 'restored', 'restoring')"
_ERA = """INSERT INTO meta (key, value) VALUES ('era', '1')
    ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(meta.value AS bigint) + 1 AS text)"""
FORGET = "DELETE FROM meta WHERE key = 'restoring'"

Execute = Callable[..., Any]


class Loaded(NamedTuple):
    """What was loaded: of which backup, how many runs were queued again, how many rows each table got."""

    backup: str
    requeued: int
    rows: dict[str, int]


def settle(execute: Execute, backup: str, at: int, changes: Callable[[], int], mark: str, *, has_runs: bool) -> int:
    """Run all that inside the caller's transaction. `changes`: how many rows the last statement changed; `mark`: how a
    parameter is written. How many runs were queued again."""
    requeued = 0
    if has_runs:
        for text in (_TASKS, _RUNNING):
            execute(text)
            requeued += changes()
        execute(_FENCES)
    execute(_GENERATIONS)
    execute(_UNMARK)
    execute(_ERA)
    told = orjson.dumps({"backup": backup, "at": at}).decode()
    execute(f"INSERT INTO meta (key, value) VALUES ('restored', {mark})", (told,))
    return requeued


def remember(execute: Execute, loaded: Loaded, mark: str) -> None:
    """Say in the store, inside the same transaction, that its restore is under way."""
    execute(f"INSERT INTO meta (key, value) VALUES ('restoring', {mark})", (orjson.dumps(loaded._asdict()).decode(),))


def taken_up(execute: Execute, backup: str) -> Loaded | None:
    """What a restore of this backup that did not come to its end has loaded; None if there was none, or somebody has
    used the store since. A store's own file is a backup without an id: it cannot be told from another one."""
    found = list(execute("SELECT value FROM meta WHERE key = 'restoring'"))
    if not found or not backup:
        return None
    loaded = Loaded(**orjson.loads(found[0][0]))
    if loaded.backup != backup:
        return None
    counts = {table: next(iter(execute(f'SELECT count(*) FROM "{table}"')))[0] for table in loaded.rows}
    return loaded if counts == loaded.rows else None
