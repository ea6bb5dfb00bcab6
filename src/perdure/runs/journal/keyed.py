"""Programs that start a run unless another one with its key is open: debounced starts and singletons.

They serve `store.start(key=…, debounce_s=…)` and `store.start(key=…, singleton=…)`.
"""

from __future__ import annotations

from typing import Literal

from perdure.errors import Conflict
from perdure.runs.journal.rows import COLUMNS, NOW, OPEN, RUN_ENCRYPTED, SET_ARGS, NewRun, create
from perdure.runs.run_table import RunRow
from perdure.runs.tables import INPUT
from perdure.storage.program import Batch, Program, Sql

# Two callers with the same key take turns. SQLite has one writer at a time.
_TAKE_TURN = Sql(
    sqlite="SELECT 1",
    postgres="""SELECT pg_advisory_xact_lock(hashtextextended(CAST(:tenant AS text) || ' ' || CAST(:key AS text), 0))
        IS NULL""",
)
_OPEN = Sql(
    f"""SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND key = :key AND status IN {OPEN}
    ORDER BY run {{for_update}}""",
    opens=RUN_ENCRYPTED,
)
_POSTPONE = Sql(
    "UPDATE run SET input = :input, wake_at = :wake_at WHERE tenant = :tenant AND run = :run",
    seals={"input": INPUT},
)


def start_debounced(tenant: int, new: NewRun, window_us: int, now: int) -> Program[RunRow]:
    """Start a run that begins after a window of quiet.

    If a run with the same key has not begun yet, it gets the new arguments, and its window begins anew.
    """
    open_runs, now = yield from _open_runs(tenant, new, now)
    wake_at = now + window_us
    for row in open_runs:
        if row.status == "queued" and row.fence == 0 and row.wake_at > now:
            about = {"tenant": tenant, "run": row.run}
            yield Batch(
                _POSTPONE(**about, id=row.id, function=row.function, input=new.input, wake_at=wake_at),
                SET_ARGS(**about, incarnation=row.incarnation, args=new.args),
                last=True,
            )
            return row
    return (yield from create(tenant, new._replace(wake_at=wake_at), now=now))[0]


def start_single(tenant: int, new: NewRun, mode: Literal["join", "refuse"], now: int) -> Program[RunRow]:
    """Start a run unless one with its key is open: return that one, or raise Conflict."""
    open_runs, now = yield from _open_runs(tenant, new, now)
    if not open_runs:
        return (yield from create(tenant, new, now=now))[0]
    if mode == "refuse":
        raise Conflict(
            f"run {open_runs[0].id!r} of {new.function} is open, and only one may be: wait for it, or cancel it"
        )
    return open_runs[0]


def _open_runs(tenant: int, new: NewRun, now: int) -> Program[tuple[list[RunRow], int]]:
    _, [[now]], rows = yield Batch(
        _TAKE_TURN(tenant=tenant, key=new.key), NOW(now=now), _OPEN(tenant=tenant, key=new.key)
    )
    return [RunRow._make(row) for row in rows], now
