"""Rewinding runs: a run's rows go back to what a snapshot sees, and the process that had it is fenced.

An effect that began since has happened, whatever the journal says after the rewind. The past keeps the intents of all
effects since the oldest snapshot (`Table.remembered`). If a run that goes back had one, the caller decides: keys="same"
keeps the incarnation that idempotency keys are derived from, keys="new" makes another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from perdure.errors import NotFound, UsageError
from perdure.runs.calls.state import thread_name
from perdure.runs.journal.entries import INTENT, unpack
from perdure.runs.journal.rows import ARGS_OF, FINISHED, NEVER, SET_ARGS, TASK
from perdure.runs.journal.standing import UNDO
from perdure.runs.schedules import rows as schedules
from perdure.runs.tables import JOURNAL_BODY, PARTS
from perdure.snapshots.cutting import RunThen, cut_in_place, refuse_forks
from perdure.snapshots.diff import MOVING, SnapshotChange, in_batches
from perdure.snapshots.points import NOW, RestorePoint
from perdure.storage.domains import all_tables, versioned_tables
from perdure.storage.program import Batch, Flow, Program, Sql, Statement, fetch
from perdure.storage.versions import installed
from perdure.threads.context import StoreContext
from perdure.transfers.run_rows import drop_run

_TIED = {
    table.ties_runs: Sql(f"SELECT 1 FROM {table.name} WHERE tenant = :tenant LIMIT 1")
    for table in all_tables().values()
    if table.ties_runs
}
_FENCE_JUMP = 10_000  # of a run that is gone: its owners since are not known
_THEN = "p.tenant = :tenant AND p.stamp <= :s AND p.died > :s"
_LIVE = Sql("SELECT run, parent, root, status, created_at FROM run WHERE tenant = :tenant AND id = :id")
_PAST = Sql(f"SELECT p.run, p.parent, p.root, p.status, p.created_at FROM run_past p WHERE p.id = :id AND {_THEN}")
_INTENTS = " UNION ALL ".join(
    f"SELECT 1 FROM {table} j WHERE j.tenant = {{tenant}} AND j.run = {{run}} AND j.kind = {INTENT} AND j.stamp > :s"
    for table in ("journal", "journal_past")
)
_EFFECT = Sql(f"{_INTENTS.format(tenant=':tenant', run=':run')} LIMIT 1")
_INTENTS_SINCE = Sql(
    " UNION ALL ".join(
        f"""SELECT j.run, j.seq, j.kind, j.body FROM {table} j
        WHERE j.tenant = :tenant AND j.run IN {{numbers:runs}} AND j.kind = {INTENT} AND j.stamp > :s"""
        for table in ("journal", "journal_past")
    ),
    opens={3: JOURNAL_BODY.at(0, 1, 2)},
)
# Runs of a family that were made since, and deleted.
_DELETED = Sql(
    """SELECT DISTINCT p.run, p.parent FROM run_past p WHERE p.tenant = :tenant AND p.root = :root AND p.stamp > :s
        AND p.parent IS NOT NULL AND NOT EXISTS (SELECT 1 FROM run r WHERE r.tenant = p.tenant AND r.run = p.run)
    ORDER BY p.run"""
)
_LOCK = Sql("SELECT fence FROM run WHERE tenant = :tenant AND run = :run {for_update}")
_CUT = Sql("SELECT min(seq) FROM journal WHERE tenant = :tenant AND run = :run AND stamp > :s")
_FENCE = Sql(
    """UPDATE run SET fence = coalesce(CAST(:fence AS bigint), fence) + :jump, owner = NULL, lease_until = 0,
        wakeup_pending = 0, changed_at = {now}, reopened_at = {now} WHERE tenant = :tenant AND run = :run"""
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
# Tasks of graphs that had effects since, without those that were there and still are: what they did stands.
_TASKS = f"""FROM (
        SELECT tenant, run, root FROM run WHERE tenant = :tenant AND stamp > :s AND {_IS_TASK}
        UNION SELECT tenant, run, root FROM run_past WHERE tenant = :tenant AND died > :s AND {_IS_TASK}) r
    WHERE EXISTS ({_INTENTS.format(tenant="r.tenant", run="r.run")})
        AND NOT (EXISTS (SELECT 1 FROM run l WHERE l.tenant = r.tenant AND l.run = r.run)
            AND EXISTS (SELECT 1 FROM run_past p WHERE p.run = r.run AND {_THEN}))"""
_TASK_EFFECTS = Sql(
    " UNION ".join(
        f"SELECT name FROM {table} WHERE tenant = :tenant AND thread IN (SELECT r.root {_TASKS})"
        for table in ("thread", "thread_past")
    )
)
_THREAD_EFFECTS = Sql(f"SELECT 1 {_TASKS} AND r.root = :thread LIMIT 1")
_RENEW = Sql("UPDATE run SET incarnation = :incarnation WHERE tenant = :tenant AND run = :run")
_INCARNATION = Sql("SELECT incarnation FROM run WHERE tenant = :tenant AND run = :run")


def refuse_tied_runs(ctx: StoreContext) -> Flow[None]:
    """Raise UsageError if the tenant's runs belong to something that other stores take part in (`Table.ties_runs`)."""
    tenant = yield from ctx.tenant()
    for reason, is_tied in _TIED.items():
        if (yield from fetch(is_tied, tenant=tenant or 0)):
            raise UsageError(f'restore(runs="rewind") is refused: {reason}')


class ChangedRun(NamedTuple):
    """A run that goes back: it has changed, was removed, or was added since."""

    run: int
    id: str
    kind: str
    parent: int | None
    root: int  # the run at the top of the family
    was_deleted: bool  # before the snapshot: a restore has brought it back since, and it is removed again

    @property
    def state(self) -> str:
        return thread_name(self.id)


def runs_of(
    tenant: int, point: RestorePoint, changes: Sequence[SnapshotChange], then: Mapping[str, RunThen], keys: str | None
) -> Program[dict[str, ChangedRun]]:
    """Return the runs that go back, by their ids. Raises UsageError without `keys` if they had effects since.

    `then` has what is known of them at an instant."""
    s, changed = point.epoch, dict[int, ChangedRun]()
    effects: set[int] = set()  # the runs that had effects since, or may have had
    rows: list[tuple[Any, ...]] = []
    for change in changes:
        if change.what == "run":
            [live] = yield Batch(_LIVE(tenant=tenant, id=change.name))
            is_new = s == NOW or change.kind == "added"
            [past] = [[]] if is_new else (yield Batch(_PAST(tenant=tenant, id=change.name, s=s)))
            if live and past and live[0][0] != past[0][0]:
                raise UsageError(f"run {change.name!r} was deleted and made again since {point.since}: delete it first")
            was_moved = live and past and live[0][3] == "exported" != past[0][3]  # it continues in another store
            rows += [(*row, change, was_moved) for row in live or past]
    for run, parent, root, status, created_at, change, was_moved in sorted(rows, key=lambda row: row[0]):
        was_deleted = change.kind == "added" and created_at <= point.taken_at  # and was put back by a restore
        if change.kind == "added" and parent not in changed and not was_deleted:
            continue
        changed[run] = ChangedRun(run, change.name, change.kind, parent, root, was_deleted)
        # A deleted run may have been moved before: what it did is not known.
        if was_moved or (change.kind == "removed" and status not in FINISHED):
            effects.add(run)
    effects |= yield from _had_effects(tenant, s, changed)
    parents, undone = {one.run: one.parent for one in then.values()}, set[int]()
    for one in then.values():
        back: int | None = one.run
        while back is not None and back not in changed:  # a child that is gone, or was not there
            back = parents.get(back)
        if back is not None and one.had_effects:
            effects.add(back)
            undone |= {back} if one.had_undone else set()
    if effects and keys is None:
        names = ", ".join(sorted(changed[run].id for run in effects)[:5])
        raise UsageError(
            f"runs had effects since {point.since}, or were moved or deleted unfinished "
            f'({names}): rewound, they would run them again. Nothing was restored; keys="same" lets effects run again '
            'under the same idempotency keys, keys="new" under new ones'
        )
    if keys == "same":
        yield from _refuse_undone(tenant, point, {run: changed[run].id for run in effects}, undone)
    for run in sorted(effects, reverse=True) if keys == "same" else ():  # a child stays, with those above it
        while run in changed and changed[run].kind == "added":
            run = changed.pop(run).parent or 0
    for each in changed.values():
        yield from _refuse_forks(tenant, each, s, then[each.id].cut if each.id in then else None)
    return {run.id: run for run in changed.values()}


def _refuse_forks(tenant: int, run: ChangedRun, s: int, cut: int | None) -> Program[None]:
    """Raise UsageError if a fork shares an entry that goes: one since the snapshot, or from `cut` on.

    Of a run that was added since, all entries go."""
    cuts = [1 if run.kind == "added" else cut]
    if s != NOW:
        [[since]] = yield Batch(_CUT(tenant=tenant, run=run.run, s=s))
        cuts += since
    if known := [one for one in cuts if one is not None]:
        yield from refuse_forks(tenant, run.run, run.id, min(known))


def _refuse_undone(tenant: int, point: RestorePoint, runs: Mapping[int, str], known: set[int]) -> Program[None]:
    """Raise UsageError if effects of these runs, with their ids, were undone since: receivers know their keys.

    Of the runs in `known` that is known."""
    undone = {runs[run] for run in known}
    for some in in_batches([] if point.epoch == NOW else [*runs]):
        [intents] = yield Batch(_INTENTS_SINCE(tenant=tenant, runs=orjson.dumps(some).decode(), s=point.epoch))
        undone |= {runs[run] for run, _, _, body in intents if unpack(body).path.startswith(UNDO)}
    if undone:
        names = ", ".join(sorted(undone)[:5])
        raise UsageError(
            f"effects were undone since {point.since} ({names}). Run again under the same "
            'idempotency keys, their receivers would ignore them. Nothing was restored; keys="new" performs them again'
        )


def _had_effects(tenant: int, s: int, runs: Mapping[int, ChangedRun]) -> Program[set[int]]:
    """Return those of these runs that had effects since a snapshot, themselves or in a deleted child."""
    if not (yield from installed()):  # nor has it a snapshot
        return set()
    asked = {run: run for run, one in runs.items() if not one.was_deleted}  # each with the run that goes back for it
    for root in sorted({one.root for one in runs.values()}):
        [deleted] = yield Batch(_DELETED(tenant=tenant, root=root, s=s))
        for run, parent in deleted:
            if parent in asked:
                asked[run] = asked[parent]
    added = {run for run, one in runs.items() if one.kind == "added"}
    effects: set[int] = set()
    for some in in_batches([*asked]):
        answers = yield Batch(*(_EFFECT(tenant=tenant, run=run, s=-1 if run in added else s) for run in some))
        effects |= {asked[run] for run, rows in zip(some, answers, strict=True) if rows}
    return effects


def refuse_effects(ctx: StoreContext, tenant: int, point: RestorePoint, back: set[str]) -> Flow[None]:
    """Raise UsageError if graphs that go back had effects in tasks that were made since: these would be others."""
    had = yield from point.threads_with_effects(ctx, tenant, back)
    if point.row is not None:
        had |= {name for (name,) in (yield from fetch(_TASK_EFFECTS, tenant=tenant, s=point.epoch))}
    if names := sorted(back & had):
        raise UsageError(
            f"tasks of graphs had effects since {point.since}, or may have had ({', '.join(names[:5])}): set back, "
            'they would run them again, under new idempotency keys. Nothing was restored; keys="new" allows that'
        )


class KeyChoice(NamedTuple):
    """Which idempotency keys the runs that go back use: the same, or new ones."""

    choice: str | None  # of the caller of `restore`; None: there was no effect since
    seed: bytes  # random: makes new keys


def rewind(
    tenant: int, runs: Sequence[ChangedRun], s: int, now: int, keys: KeyChoice, at: int | None = None
) -> Program[dict[int, int | None]]:
    """Take the runs of a family back. They are locked first, in the order of all writers.

    For an instant (`at`), return the checkpoints that their states had; None where there was none."""
    locked = yield Batch(*(_LOCK(tenant=tenant, run=run.run) for run in runs))
    late = UsageError(f"run {runs[0].id!r} had effects while it was to be rewound: it was left as it is")
    if keys.choice is None and (yield from _had_effects(tenant, s, {run.run: run for run in runs})):
        raise late
    checkpoints: dict[int, int | None] = {}
    # Those that go, first: one that comes back may have the id of one that was made since.
    for run, fences in sorted(zip(runs, locked, strict=True), key=lambda pair: pair[0].kind != "added"):
        key = {"tenant": tenant, "run": run.run}
        yield from _refuse_forks(tenant, run, s, None)
        yield Batch(*rows_back(["archived"], s, tenant=tenant, kind="run", name=run.id))
        if run.kind == "added":
            yield Batch(*drop_run(tenant, run.run))
            continue
        yield Batch(*_run_back(tenant, run.run, s))
        if at is not None:
            had_effects, checkpoints[run.run] = yield from cut_in_place(tenant, run.run, at)
            if had_effects and keys.choice is None:
                raise late
        fence = {"fence": fences[0][0], "jump": 1} if fences else {"fence": None, "jump": _FENCE_JUMP}
        yield Batch(_FENCE(**key, **fence, now=now), _QUEUE(**key))
        if keys.choice == "new":
            yield from renew(tenant, run.run, keys.seed)
    return checkpoints


def renew(tenant: int, run: int, seed: bytes) -> Program[None]:
    """Give a run another incarnation: its next effects have new keys, whatever their place and arguments."""
    [(old,)], args = yield Batch(_INCARNATION(tenant=tenant, run=run), ARGS_OF(tenant=tenant, run=run))
    incarnation = blake3(bytes(old) + seed).digest(16)
    yield Batch(
        _RENEW(tenant=tenant, run=run, incarnation=incarnation),
        *(SET_ARGS(tenant=tenant, run=run, incarnation=incarnation, args=text) for text, _ in args),
    )


def rows_back(tables: Sequence[str], s: int, **key: Any) -> list[Statement]:
    """Replace the rows with a key by those that the snapshot sees."""
    by_key = " AND ".join(f"{column} = :{column}" for column in key)
    texts = [f"DELETE FROM {table} WHERE stamp > :s AND {by_key}" for table in tables]
    for table in tables:
        columns = ", ".join(("tenant", *versioned_tables()[table].names))
        then = f"SELECT {columns} FROM {table}_past WHERE stamp <= :s AND died > :s AND {by_key}"
        texts.append(f"INSERT INTO {table} ({columns}) {then}")
    return [Sql(text)(**key, s=s) for text in texts]


def schedule_back(tenant: int, name: str, s: int, now: int) -> Program[None]:
    """Restore a schedule. It continues from now on: instants that have passed since start nothing again."""
    yield Batch(*rows_back(["schedule"], s, tenant=tenant, name=name))
    try:
        row, _ = yield from schedules.lock(tenant, name, now)
    except NotFound:  # it was declared later
        return
    yield from schedules.place(tenant, name, now, paused=bool(row.paused))


def _run_back(tenant: int, run: int, s: int) -> list[Statement]:
    key, tables = {"tenant": tenant, "run": run}, ["run", *(table.name for table in PARTS)]
    return [_BLOBS(**key, s=s), *rows_back(tables, s, **key)]


def keep_tasks(tenant: int, old: set[int], new: int, s: int, keys: KeyChoice) -> Program[None]:
    """Keep the tasks of a graph with their thread, which has a new number, or bring them back with it.

    The process that runs one is fenced. What they did stands. Raises UsageError if a task had effects meanwhile that
    would be repeated.
    """
    for number in sorted(old):
        [lost] = yield Batch(_LOST_TASKS(tenant=tenant, old=number, s=s))
        for (run,) in lost:
            yield Batch(*_run_back(tenant, run, s))
        yield Batch(*(sql(tenant=tenant, old=number, new=new) for sql in _KEEP_TASKS))
    if keys.choice != "new" and (yield Batch(_THREAD_EFFECTS(tenant=tenant, thread=new, s=s)))[0]:
        raise UsageError("a task of a graph had effects while its thread was to be restored: it was left as it is")
