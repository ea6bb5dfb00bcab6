"""`perdure.continue_as_new()`: a run starts over with new arguments, and what its journal had goes."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.runs.journal import values
from perdure.runs.journal.rows import SET_ARGS, FenceToken
from perdure.runs.tables import OF_JOURNAL, OF_VALUE
from perdure.storage.program import Batch, Program, Sql

_RENEWED_START = Sql(
    """UPDATE run SET status = 'queued', owner = NULL, wake_at = 0, waiting = NULL,
        wakeup_pending = 0, entries = 0, digest = 0,
        since = CAST(:since AS bigint), seq = CAST(:since AS bigint),
        incarnation = :incarnation, changed_at = {now}
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING run"""
)
# Old answers must go, because a question of the next round may have the same path.
_NOT_SHARED = "AND NOT EXISTS (SELECT 1 FROM run WHERE tenant = :tenant AND origin = :run)"  # a fork needs its rows
_DROP_ROUND = [
    Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND run = :run {where}")
    for table, where in (
        ("answer", ""),
        ("ask", ""),
        ("journal", _NOT_SHARED),
        ("run_blob", _NOT_SHARED),
        ("run_external", f"AND kind = '{OF_JOURNAL}' {_NOT_SHARED}"),
    )
]


def start_over(
    token: FenceToken, *, since: int, args: bytes, keys: Sequence[bytes], incarnation: bytes, now: int
) -> Program[bool]:
    """Restart a run for continue_as_new, with new arguments and an empty journal. Return False if the fence has moved.

    The numbers of new rows are above `since`. The arguments refer to the large values of `keys`, as the journal does.
    """
    tenant, run, _ = token
    [rows] = yield Batch(_RENEWED_START(**token._asdict(), since=since, incarnation=incarnation, now=now))
    if not rows:
        return False
    yield Batch(
        *(drop(tenant=tenant, run=run) for drop in _DROP_ROUND),
        values.DROP(tenant=tenant, run=run, kind=OF_VALUE),
        *(values.use(tenant, run, OF_VALUE, key) for key in keys),
        SET_ARGS(tenant=tenant, run=run, incarnation=incarnation, args=args),
        last=True,
    )
    return True
