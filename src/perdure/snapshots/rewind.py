"""Rewinding runs: a run's rows go back to what a snapshot sees, and the process that had it is fenced.

The rows come from the past, number by number: the run stays the same one, with the same idempotency keys. So an effect
that ran since, and runs again, reaches its receiver under the same key. Runs that were made since are left alone,
unless a run that goes back has started them, or a restore has put them back: those are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.errors import UsageError
from perdure.runs.calls.state import thread_name
from perdure.runs.journal.entries import INTENT
from perdure.runs.journal.rows import FINISHED, NEVER, TASK
from perdure.snapshots.diff import MOVING, RUN_TABLES, SnapshotChange
from perdure.snapshots.rows import SnapshotRow
from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Program, Sql, Statement
from perdure.transfers.run_rows import drop_run

_FENCE_JUMP = 10_000  # of a run that is gone: its owners since are not known
_THEN = "p.tenant = :tenant AND p.stamp <= :s AND p.died > :s"
_LIVE = Sql("SELECT run, parent, root, status, created_at FROM run WHERE tenant = :tenant AND id = :id")
_PAST = Sql(f"SELECT p.run, p.parent, p.root, p.status, p.created_at FROM run_past p WHERE p.id = :id AND {_THEN}")
_EFFECT = Sql(
    f"""SELECT 1 FROM journal WHERE tenant = :tenant AND run = :run AND kind = {INTENT} AND stamp > :s LIMIT 1"""
)
_LOCK = Sql("SELECT fence FROM run WHERE tenant = :tenant AND run = :run {for_update}")
_SHARED = Sql(
    """SELECT f.id FROM run f WHERE f.tenant = :tenant AND f.origin = :run AND EXISTS (SELECT 1 FROM journal j
        WHERE j.tenant = f.tenant AND j.run = f.origin AND j.seq <= f.origin_seq AND j.stamp > :s)"""
)
_FENCE = Sql(
    """UPDATE run SET fence = coalesce(CAST(:fence AS bigint), fence) + :jump, owner = NULL, lease_until = 0,
        wakeup_pending = 0, changed_at = {now} WHERE tenant = :tenant AND run = :run"""
)
_QUEUE = Sql(
    f"""UPDATE run SET status = 'queued', wake_at = 0, waiting = NULL
    WHERE tenant = :tenant AND run = :run AND status IN {MOVING}"""
)
_BLOBS = Sql(
    f"""INSERT INTO blob (tenant, hash, body) SELECT p.tenant, p.hash, p.body FROM blob_past p
    WHERE {_THEN} AND p.hash IN (SELECT p.hash FROM run_blob_past p WHERE {_THEN} AND p.run = :run)
        AND NOT EXISTS (SELECT 1 FROM blob b WHERE b.tenant = p.tenant AND b.hash = p.hash)"""
)
_IS_TASK = f"function LIKE '{TASK}%'"
_KEEP_TASKS = (
    # A graph's task is resumed when its graph is run again.
    Sql(
        f"""UPDATE run SET status = 'waiting', wake_at = {NEVER}, owner = NULL
        WHERE tenant = :tenant AND root = :old AND {_IS_TASK} AND status = 'running'"""
    ),
    Sql(
        f"""UPDATE run SET root = :new, fence = fence + 1, lease_until = 0
        WHERE tenant = :tenant AND root = :old AND {_IS_TASK}"""
    ),
)
_LOST_TASKS = Sql(
    f"""SELECT p.run FROM run_past p WHERE {_THEN} AND p.root = :old AND p.{_IS_TASK} AND NOT EXISTS (
        SELECT 1 FROM run r WHERE r.tenant = p.tenant AND (r.run = p.run OR r.id = p.id))"""
)
_TASK_EFFECTS = Sql(
    f"""SELECT DISTINCT t.name FROM run r JOIN thread t ON t.tenant = r.tenant AND t.thread = r.root
    WHERE r.tenant = :tenant AND r.stamp > :s AND r.created_at > :taken_at AND r.{_IS_TASK} AND EXISTS (
        SELECT 1 FROM journal j WHERE j.tenant = r.tenant AND j.run = r.run AND j.kind = {INTENT})"""
)


class ChangedRun(NamedTuple):
    """A run that goes back: it has changed, was removed, or was added since."""

    run: int
    id: str
    kind: str
    parent: int | None
    root: int  # the run at the top of the family

    @property
    def state(self) -> str:
        """The thread that holds its state."""
        return thread_name(self.id)


def runs_of(
    tenant: int, snapshot: SnapshotRow, changes: Sequence[SnapshotChange], same_keys: bool
) -> Program[dict[str, ChangedRun]]:
    """The runs that go back, by their ids. Raises UsageError if effects ran since."""
    s, found = snapshot.epoch, dict[int, ChangedRun]()
    effects: set[int] = set()  # that ran since, or may have
    rows: list[tuple[Any, ...]] = []
    for change in changes:
        if change.what == "run":
            live, past = yield Batch(_LIVE(tenant=tenant, id=change.name), _PAST(tenant=tenant, id=change.name, s=s))
            if live and past and live[0][0] != past[0][0]:
                raise UsageError(f"run {change.name!r} was deleted and made again since the snapshot: delete it first")
            rows += [(*row, change) for row in live or past]
    for run, parent, root, status, created_at, change in sorted(rows, key=lambda row: row[0]):
        was_deleted = change.kind == "added" and created_at <= snapshot.taken_at  # and was put back by a restore
        if change.kind == "added" and parent not in found and not was_deleted:
            continue
        found[run] = ChangedRun(run, change.name, change.kind, parent, root)
        if was_deleted:
            continue  # what it did was known when it was deleted
        [effect] = yield Batch(_EFFECT(tenant=tenant, run=run, s=s))
        if effect or (change.kind == "removed" and status not in FINISHED):  # what a deleted one did is not known
            effects.add(run)
    if effects and not same_keys:
        names = ", ".join(sorted(found[run].id for run in effects)[:5])
        raise UsageError(
            f"runs had effects since the snapshot {snapshot.name!r} was taken, or were deleted unfinished ({names}): "
            'rewound, they would run them again. Nothing was restored; keys="same" lets effects run again under the '
            "same idempotency keys"
        )
    for run in sorted(effects, reverse=True):  # made again, it would have other keys: it stays, with those above it
        while run in found and found[run].kind == "added":
            run = found.pop(run).parent or 0
    return {run.id: run for run in found.values()}


def refuse_effects(tenant: int, snapshot: SnapshotRow, changes: Sequence[SnapshotChange]) -> Program[None]:
    """Raise UsageError if graphs that go back had effects in tasks that were made since: these would be others."""
    about = {"tenant": tenant, "s": snapshot.epoch, "taken_at": snapshot.taken_at}
    [found] = yield Batch(_TASK_EFFECTS(**about), last=True)
    back = {change.name for change in changes if change.what == "thread" and change.kind != "delete"}
    if names := sorted(back & {name for (name,) in found}):
        raise UsageError(
            f"tasks of graphs had effects since the snapshot {snapshot.name!r} was taken ({', '.join(names[:5])}): set "
            'back, they would run them again, under new idempotency keys. Nothing was restored; keys="new" allows that'
        )


def rewind(tenant: int, runs: Sequence[ChangedRun], s: int, now: int) -> Program[None]:
    """Take the runs of a family back. They are locked first, in the order of all writers."""
    locked = yield Batch(*(_LOCK(tenant=tenant, run=run.run) for run in runs))
    for run, fences in zip(runs, locked, strict=True):
        this = {"tenant": tenant, "run": run.run}
        [shared] = yield Batch(_SHARED(**this, s=s))
        if shared:
            raise UsageError(f"run {run.id!r} was not rewound: its fork {shared[0][0]!r} shares what came later")
        yield Batch(*rows_back(["archived"], s, tenant=tenant, kind="run", name=run.id))
        if run.kind == "added":
            yield Batch(*drop_run(tenant, run.run))
            continue
        fence = {"fence": fences[0][0], "jump": 1} if fences else {"fence": None, "jump": _FENCE_JUMP}
        yield Batch(*_run_back(tenant, run.run, s), _FENCE(**this, **fence, now=now), _QUEUE(**this))


def rows_back(tables: Sequence[str], s: int, **key: Any) -> list[Statement]:
    """Let tables have the rows with a key that they had."""
    these = " AND ".join(f"{column} = :{column}" for column in key)
    texts = [f"DELETE FROM {table} WHERE stamp > :s AND {these}" for table in tables]
    for table in tables:
        columns = ", ".join(("tenant", *owned_tables()[table].columns))
        then = f"SELECT {columns} FROM {table}_past WHERE stamp <= :s AND died > :s AND {these}"
        texts.append(f"INSERT INTO {table} ({columns}) {then}")
    return [Sql(text)(**key, s=s) for text in texts]


def deployment_back(tenant: int, function: str, s: int) -> Program[None]:
    """Which version new runs of a function get is what it was."""
    yield Batch(*rows_back(["deployment"], s, tenant=tenant, function=function))


def _run_back(tenant: int, run: int, s: int) -> list[Statement]:
    this, tables = {"tenant": tenant, "run": run}, ["run", *(table.name for table in RUN_TABLES)]
    return [_BLOBS(**this, s=s), *rows_back(tables, s, **this)]


def keep_tasks(tenant: int, old: set[int], new: int, s: int) -> Program[None]:
    """The tasks of a graph stay with their thread, which has a new number, or come back with it; the process that runs
    one is fenced. What they did stands."""
    for number in sorted(old):
        [found] = yield Batch(_LOST_TASKS(tenant=tenant, old=number, s=s))
        for (run,) in found:
            yield Batch(*_run_back(tenant, run, s))
        yield Batch(*(sql(tenant=tenant, old=number, new=new) for sql in _KEEP_TASKS))
