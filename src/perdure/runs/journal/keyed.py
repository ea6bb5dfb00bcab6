"""Programs that start a run unless another one with its key is open: debounced starts and singletons.

They serve `store.start(key=…, debounce_s=…)` and `store.start(key=…, singleton=…)`. The keys of the two are kept apart
by their beginning, and from those of schedules.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from perdure.errors import Conflict, RunMismatch
from perdure.runs.journal import values
from perdure.runs.journal.rows import COLUMNS, NOW, OPEN, RUN_ENCRYPTED, SET_ARGS, NewRun, create, look_up
from perdure.runs.run_table import RunRow
from perdure.runs.tables import INPUT, OF_VALUE
from perdure.storage.program import Batch, Program, Rows, Sql
from perdure.values.external import keys_of

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
    """UPDATE run SET input = :input, wake_at = :wake_at, queue = :queue, priority = :priority
    WHERE tenant = :tenant AND run = :run""",
    seals={"input": INPUT},
)
_SINGLE = "single:"


def start_debounced(tenant: int, new: NewRun, window_us: int, now: int) -> Program[RunRow]:
    """Start a run that begins after a window of quiet.

    If a run with the same key has not begun yet, it gets the new arguments, and its window begins anew.
    """
    new = new._replace(key=f"debounce:{new.key}")
    open_runs, now = yield from _open_runs(tenant, new.key, now)
    wake_at = now + window_us
    for row in open_runs:
        if row.status == "queued" and row.fence == 0 and row.wake_at > now:
            about = {"tenant": tenant, "run": row.run}
            place = {"wake_at": wake_at, "queue": new.queue, "priority": new.priority}
            yield Batch(
                _POSTPONE(**about, id=row.id, function=row.function, input=new.input, **place),
                SET_ARGS(**about, incarnation=row.incarnation, args=new.args),
                values.DROP(**about, kind=OF_VALUE),
                last=not new.values,
            )
            yield from values.refer(**about, kind=OF_VALUE, keys=keys_of(new.values), now=now)
            return row
    return (yield from create(tenant, new._replace(wake_at=wake_at), now=now))[0]


def start_single(tenant: int, new: NewRun, mode: Literal["join", "refuse"], now: int) -> Program[RunRow]:
    """Start a run unless one with its key is open: return that one, or raise Conflict.

    A run with the id of the new one comes first: the same call again returns the same run.
    """
    new = new._replace(key=f"{_SINGLE}{new.key}")
    open_runs, now = yield from _open_runs(tenant, new.key, now)
    if (same := (yield from look_up(tenant, new.id))) is not None:
        check_same_work(same, new)
        return same
    if not open_runs:
        return (yield from create(tenant, new, now=now))[0]
    if mode == "refuse":
        raise _one_is_open(open_runs[0])
    return open_runs[0]


def check_single(tenant: int, row: RunRow) -> Generator[Batch, list[Rows], None]:
    """Raise Conflict if a run is a singleton, and another one with its key is open."""
    if row.key is not None and row.key.startswith(_SINGLE):
        _, others = yield Batch(_TAKE_TURN(tenant=tenant, key=row.key), _OPEN(tenant=tenant, key=row.key))
        if others:
            raise _one_is_open(RunRow._make(others[0]))


def check_same_work(row: RunRow, new: NewRun) -> None:
    """Raise RunMismatch if the id of a new run belongs to a run of another function or with other arguments."""
    if row.function != new.function:
        raise RunMismatch(f"run {new.id!r} is a run of {row.function}, not of {new.function}; choose another id")
    if row.input != new.input:
        raise RunMismatch(
            f"run {new.id!r} was started with other arguments; the same id stands for the same work. Choose another "
            "id, or pass the arguments that it has"
        )


def _one_is_open(row: RunRow) -> Conflict:
    return Conflict(f"run {row.id!r} of {row.function} is open, and only one may be: wait for it, or cancel it")


def _open_runs(tenant: int, key: str | None, now: int) -> Generator[Batch, list[Rows], tuple[list[RunRow], int]]:
    _, [[now]], rows = yield Batch(_TAKE_TURN(tenant=tenant, key=key), NOW(now=now), _OPEN(tenant=tenant, key=key))
    return [RunRow._make(row) for row in rows], now
