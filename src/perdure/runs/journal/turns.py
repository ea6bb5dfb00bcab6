"""Runs with a key that take turns: those of a schedule with overlap="queue"."""

from __future__ import annotations

from perdure.runs.run_table import NEVER, OPEN_STATUSES, RunRow
from perdure.storage.program import Batch, Program, Sql, Statement

# A run that is held back is queued and due never: one with its key is open. The oldest of them begins when none is.
HELD_BACK = f"status = 'queued' AND wake_at = {NEVER}"
_WITH_KEY = f"FROM run WHERE tenant = :tenant AND key = :key AND status IN {OPEN_STATUSES}"
RELEASE_HELD = Sql(
    f"""UPDATE run SET wake_at = 0 WHERE tenant = :tenant AND run = (SELECT min(run) {_WITH_KEY} AND {HELD_BACK})
        AND NOT EXISTS (SELECT 1 {_WITH_KEY} AND NOT ({HELD_BACK}))"""
)
_HOLD_BACK = Sql(
    f"""UPDATE run SET wake_at = {NEVER} WHERE tenant = :tenant AND run = :run AND status = 'queued' AND EXISTS
        (SELECT 1 FROM schedule s WHERE s.tenant = :tenant AND s.name = :schedule AND s.overlap = 'queue')"""
)
_HELD_KEYS = Sql(
    f"""SELECT DISTINCT key FROM run WHERE tenant = :tenant AND key IS NOT NULL AND status IN {OPEN_STATUSES}
        AND {HELD_BACK}"""
)
SCHEDULE_KEY = "schedule:"
OPEN_RUNS = Sql(f"SELECT id {_WITH_KEY} ORDER BY run")
# Locked, so that one of them cannot end unnoticed while another run begins to wait for its end.
OPEN_WITH_KEY = Sql(f"SELECT id {_WITH_KEY} ORDER BY run {{for_share}}")


def release_held(tenant: int, key: str | None) -> list[Statement]:
    """Return the statement that lets the next run with a key begin, after one of them has ended."""
    return [] if key is None else [RELEASE_HELD(tenant=tenant, key=key)]


def release_all(tenant: int) -> Program[None]:
    """Let the next run of each key begin if no other is open: earlier ones may have left the store."""
    [keys] = yield Batch(_HELD_KEYS(tenant=tenant))
    if keys:
        yield Batch(*(RELEASE_HELD(tenant=tenant, key=key) for (key,) in keys), last=True)


def take_turn(tenant: int, row: RunRow) -> list[Statement]:
    """Return the statements that make a run of a schedule which was queued again wait for the runs that are open.

    Only a schedule with overlap="queue" makes its runs take turns.
    """
    if row.key is None or not row.key.startswith(SCHEDULE_KEY):
        return []
    schedule = row.key.removeprefix(SCHEDULE_KEY)
    return [
        _HOLD_BACK(tenant=tenant, run=row.run, schedule=schedule),
        OPEN_WITH_KEY(tenant=tenant, key=row.key),
        *release_held(tenant, row.key),
    ]
