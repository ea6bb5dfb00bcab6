"""Rewinding runs: a run's rows go back to what a snapshot sees, and the process that had it is fenced.

The rows come from the past, number by number: the run stays the same one, with the same idempotency keys. So an effect
that ran since, and runs again, reaches its receiver under the same key. Runs that were made since are left alone,
unless a run that goes back has started them, or a restore has put them back: those are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from perdure.errors import UsageError
from perdure.runs.calls.state import thread_name
from perdure.runs.domain import TABLES
from perdure.runs.journal.entries import INTENT
from perdure.runs.journal.rows import FINISHED, NEVER, TASK, RunRow
from perdure.snapshots.diff import SnapshotChange
from perdure.snapshots.rows import SnapshotRow
from perdure.storage.program import Batch, Flow, Program, Sql, Statement, read
from perdure.transfers.runs import drop_run

if TYPE_CHECKING:
    from perdure.snapshots.handle import Snapshot

_FENCE_JUMP = 10_000  # of a run that is gone: its owners since are not known
_THEN = "p.tenant = :tenant AND p.stamp <= :s AND p.died > :s"
_OF_RUN = f"{_THEN} AND p.run = :run"
_COLUMNS = tuple(RunRow._fields)
_CHANGED = tuple(name for name in _COLUMNS if name not in ("run", "id", "fence"))
_LIVE = Sql("SELECT run, parent, status, function, created_at FROM run WHERE tenant = :tenant AND id = :id")
_PAST = Sql(f"SELECT p.run, p.parent, p.status, p.function, p.created_at FROM run_past p WHERE p.id = :id AND {_THEN}")
_EFFECT = Sql(
    f"""SELECT 1 FROM journal WHERE tenant = :tenant AND run = :run AND kind = {INTENT} AND stamp > :s LIMIT 1"""
)
_LOCK = Sql("SELECT stamp FROM run WHERE tenant = :tenant AND run = :run {for_update}")
_NOT_YET = Sql("SELECT 1 FROM journal WHERE tenant = :tenant AND run = :run AND stamp > :s AND stamp <= :since LIMIT 1")
_SHARED = Sql(
    """SELECT f.id FROM run f WHERE f.tenant = :tenant AND f.origin = :run AND EXISTS (SELECT 1 FROM journal j
        WHERE j.tenant = f.tenant AND j.run = f.origin AND j.seq <= f.origin_seq AND j.stamp > :s)"""
)
_BACK = Sql(
    f"""UPDATE run SET {", ".join(f"{name} = p.{name}" for name in _CHANGED)} FROM run_past p
    WHERE run.tenant = :tenant AND run.run = :run AND {_OF_RUN}"""
)
_AGAIN = Sql(
    f"""INSERT INTO run (tenant, {", ".join(_COLUMNS)})
    SELECT p.tenant, {", ".join(f"p.{name}" for name in _COLUMNS)} FROM run_past p WHERE {_OF_RUN}"""
)
_MOVING = "status IN ('queued', 'running', 'waiting')"
_QUEUE = Sql(
    f"""UPDATE run SET fence = fence + :jump, owner = NULL, lease_until = 0, wakeup_pending = 0, changed_at = {{now}},
        status = CASE WHEN {_MOVING} THEN 'queued' ELSE status END,
        wake_at = CASE WHEN {_MOVING} THEN 0 ELSE wake_at END,
        waiting = CASE WHEN {_MOVING} THEN NULL ELSE waiting END
    WHERE tenant = :tenant AND run = :run"""
)
_BLOBS = Sql(
    f"""INSERT INTO blob (tenant, hash, body) SELECT p.tenant, p.hash, p.body FROM blob_past p
    WHERE {_THEN} AND p.hash IN (SELECT p.hash FROM run_blob_past p WHERE {_OF_RUN})
        AND NOT EXISTS (SELECT 1 FROM blob b WHERE b.tenant = p.tenant AND b.hash = p.hash)"""
)
_TABLES = [table for table in TABLES if "run" in table.key and table.name != "run"]
_DROP = [Sql(f"DELETE FROM {table.name} WHERE tenant = :tenant AND run = :run AND stamp > :s") for table in _TABLES]
_PUT = [
    Sql(
        f"""INSERT INTO {table.name} (tenant, {", ".join(table.columns)})
        SELECT p.tenant, {", ".join(f"p.{name}" for name in table.columns)} FROM {table.name}_past p WHERE {_OF_RUN}"""
    )
    for table in _TABLES
]
# A graph's task is resumed when its graph is run again.
_IS_TASK = f"function LIKE '{TASK}%'"
_KEEP_TASKS = Sql(
    f"""UPDATE run SET root = :new, fence = fence + 1, lease_until = 0,
        owner = CASE status WHEN 'running' THEN NULL ELSE owner END,
        wake_at = CASE status WHEN 'running' THEN {NEVER} ELSE wake_at END,
        status = CASE status WHEN 'running' THEN 'waiting' ELSE status END
    WHERE tenant = :tenant AND root = :old AND {_IS_TASK}"""
)
_LOST_TASKS = Sql(
    f"""SELECT p.run FROM run_past p WHERE {_THEN} AND p.root = :old AND p.{_IS_TASK} AND NOT EXISTS (
        SELECT 1 FROM run r WHERE r.tenant = p.tenant AND (r.run = p.run OR r.id = p.id))"""
)


class ChangedRun(NamedTuple):
    """A run that goes back: it has changed (`live`), was deleted (`gone`), or was started since (`new`)."""

    run: int
    id: str
    how: Literal["live", "gone", "new"]

    @property
    def state(self) -> str:
        """The thread that holds its state."""
        return thread_name(self.id)


def runs_of(snap: Snapshot, changes: Sequence[SnapshotChange], same_keys: bool) -> Flow[dict[str, ChangedRun]]:
    """The runs that go back, by their ids, children before their parents. Raises UsageError if effects ran since."""
    tenant = yield from snap._context.tenant()
    if tenant is None or not changes:
        return {}
    found, effects = yield from read(partial(_find, tenant, snap._row, changes))
    kept = [run for run in found if run.how == "new" and run.run in effects]
    if effects and not same_keys:
        names = ", ".join(sorted(run.id for run in found if run.run in effects)[:5])
        raise UsageError(
            f"runs had effects since the snapshot {snap.name!r} was taken, or were deleted unfinished ({names}): "
            'rewound, they would run them again. Nothing was restored; keys="same" lets effects run again under the '
            "same idempotency keys"
        )
    return {run.id: run for run in sorted(found, reverse=True) if run not in kept}


def _find(
    tenant: int, snapshot: SnapshotRow, changes: Sequence[SnapshotChange]
) -> Program[tuple[list[ChangedRun], set[int]]]:
    """The runs, and which of them had effects since, or may have had."""
    s, taken_at = snapshot.epoch, snapshot.taken_at
    found: list[ChangedRun] = []
    effects: set[int] = set()
    back: set[int | None] = set()
    names = [change.name for change in changes if change.kind != "added"]
    for name in dict.fromkeys([*names, *(change.name for change in changes)]):
        live, past = yield Batch(_LIVE(tenant=tenant, id=name), _PAST(tenant=tenant, id=name, s=s))
        if live and past and live[0][0] != past[0][0]:
            raise UsageError(f"run {name!r} was deleted and made again since the snapshot: delete it first")
        [(run, parent, status, function, created_at)] = live or past
        if function.startswith(TASK):
            continue
        how: Literal["live", "gone", "new"] = "live" if name in names and live else "gone" if past else "new"
        if how == "new" and parent not in back and created_at > taken_at:
            continue  # an older one was put back by a restore
        back.add(run)
        found.append(ChangedRun(run, name, how))
        [effect] = yield Batch(_EFFECT(tenant=tenant, run=run, s=s))
        if effect or (how == "gone" and status not in FINISHED):  # of what ran since and was deleted, nothing is known
            effects.add(run)
    return found, effects


def rewind(
    tenant: int, run: ChangedRun, s: int, since: int | None, now: int
) -> Program[Literal["kept", "rewound", "deleted"]]:
    """Take one run back. `since`: of a restore that was interrupted, when it began: what has gone back is kept."""
    this = {"tenant": tenant, "run": run.run}
    locked, shared = yield Batch(_LOCK(**this), _SHARED(**this, s=s))
    if shared:
        raise UsageError(f"run {run.id!r} was not rewound: its fork {shared[0][0]!r} shares what came later")
    if since is not None and locked and locked[0][0] > since:
        [left] = yield Batch(_NOT_YET(**this, s=s, since=since))
        if not left:
            return "kept"
    if run.how == "new":
        yield Batch(*drop_run(tenant, run.run))
        return "deleted"
    yield Batch((_BACK if locked else _AGAIN)(**this, s=s), *_rows_back(tenant, run.run, s))
    yield Batch(_QUEUE(**this, jump=1 if locked else _FENCE_JUMP, now=now))
    return "rewound"


def _rows_back(tenant: int, run: int, s: int) -> list[Statement]:
    return [sql(tenant=tenant, run=run, s=s) for sql in (*_DROP, _BLOBS, *_PUT)]


def keep_tasks(tenant: int, old: set[int], new: int, s: int, *, lost: bool) -> Program[None]:
    """The tasks of a graph stay with their thread, which has a new number; the process that runs one is fenced. What
    they did stands. `lost`: the thread was deleted, and they with it."""
    for number in sorted(old):
        yield Batch(_KEEP_TASKS(tenant=tenant, old=number, new=new))
        if lost:
            [found] = yield Batch(_LOST_TASKS(tenant=tenant, old=number, s=s))
            for (run,) in found:
                yield Batch(_AGAIN(tenant=tenant, run=run, s=s), *_rows_back(tenant, run, s))
            if found:
                yield Batch(_KEEP_TASKS(tenant=tenant, old=number, new=new))
