"""Going back to a snapshot: what differs from it is brought back, thread by thread, item by item, run by run.

Each comes back whole or not at all, and what is back already is left alone: the same call finishes a restore that was
killed. The snapshot that is taken first holds the store as it was, so that restoring that one undoes it.

    a plain thread        gets a new head with its state of then: history stays, and old handles branch off
    one with labels       (LangGraph's) is replaced by what the snapshot holds, with its pending writes
    a thread that went    comes back with its history; one that was made since is deleted
    an item of memory     gets a new version with what it was; one that was made since is deleted
    a run                 is left alone, or rewound (`rewind.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from perdure.errors import Conflict, Damaged, UsageError
from perdure.log import gc
from perdure.log.archived import drop_stubs
from perdure.log.reading import Loaded, read_live, read_state
from perdure.log.records import Record
from perdure.log.thread_table import ThreadRow, metadata_of, thread_or_stub
from perdure.memory import flows as memory
from perdure.memory.labels import check_key, path_of
from perdure.memory.rows import CARRIED, DELETED, ItemRow, NewVersion, read_keys
from perdure.snapshots import rewind, rows
from perdure.snapshots.diff import SnapshotChange
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, adrive, drive, either, read, write, write_repair
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.flows import base_of
from perdure.threads.saves import ATTEMPTS, Moved, Save, Saving
from perdure.transfers.threads import add_threads, read_threads, thread_digest

if TYPE_CHECKING:
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.store import SnapshotStore

T = TypeVar("T")
Undone = Callable[[], Flow[None]]  # brings one thing back
ACTIONS = {"removed": "bring back", "changed": "set back", "added": "delete"}  # what a restore does to a change
_HEADS = 50  # appended in one transaction
_LABELLED = Sql(
    """SELECT 1 FROM label WHERE tenant = :tenant AND thread = :thread
    UNION ALL SELECT 1 FROM write WHERE tenant = :tenant AND thread = :thread LIMIT 1"""
)
# Pending writes, and checkpoints beside the head, do not touch the thread's row.
_OF_LINES = Sql(
    " UNION ".join(
        f"""SELECT t.name FROM {table} c JOIN thread t ON t.tenant = c.tenant AND t.thread = c.thread
        WHERE c.tenant = :tenant AND {where}"""
        for name in ("label", "write")
        for table, where in ((name, "c.stamp > :s"), (f"{name}_past", "c.stamp <= :s AND c.died > :s"))
    )
)


@dataclass(frozen=True, slots=True)
class SnapshotRestore:
    """What a restore has brought back, as `diff` names it: `+` was made since then. Of a dry run what it would."""

    snapshot: str
    changes: tuple[SnapshotChange, ...]
    undo: Snapshot | None  # the store as it was before; None for a dry run, or if nothing differed

    def __str__(self) -> str:
        done = [f"{ACTIONS[change.kind]}{str(change)[1:]}" for change in self.changes]
        return "\n".join(done) or f"nothing has changed since {self.snapshot}"


@dataclass(frozen=True, slots=True)
class RestoreScope:
    """What is to be brought back. None for both: all threads and all of memory."""

    threads: Sequence[str] | None  # patterns
    namespaces: Sequence[tuple[str, ...]] | None
    runs: bool
    same_keys: bool

    def has(self, change: SnapshotChange) -> bool:
        everything = self.threads is None and self.namespaces is None
        if change.what == "run":
            return self.runs
        if change.what == "thread":
            return everything or any(fnmatchcase(change.name, pattern) for pattern in self.threads or ())
        return everything or any(change.namespace[: len(name)] == name for name in self.namespaces or ())


def wanted_of(threads: Any, namespaces: Any, runs: str | None, keys: str | None) -> RestoreScope:
    """Raises UsageError."""
    if isinstance(threads, str):
        raise UsageError(f"restore(threads={threads!r}): a list of names or patterns, such as [{threads!r}]")
    if isinstance(namespaces, str) or any(isinstance(labels, str) for labels in namespaces or ()):
        raise UsageError('restore(namespaces=…): a list of namespaces, such as [("users", "alice")]')
    if runs not in (None, "rewind"):
        raise UsageError(f'restore(runs={runs!r}): None leaves runs alone, "rewind" takes them back')
    if keys not in (None, "same") or (keys and not runs):
        raise UsageError('restore(keys=…): "same", together with runs="rewind"')
    return RestoreScope(
        threads, namespaces and [tuple(each) for each in namespaces], runs is not None, keys is not None
    )


def restore(store: SnapshotStore, snap: Snapshot, wanted: RestoreScope, *, dry_run: bool) -> Flow[SnapshotRestore]:
    """See `store.restore`."""
    undo = yield from _unfinished(store, snap)
    going_back = _GoingBack(store._context, snap, undo)
    found = [each for each in (yield from _differences(snap)) if wanted.has(each)]
    going_back.runs = yield from rewind.runs_of(snap, [each for each in found if each.what == "run"], wanted.same_keys)
    plan = yield from _plan(going_back, found)
    if dry_run or not plan:
        if undo is not None and not dry_run:
            yield from write(partial(rows.set_note, undo.name, f"before {snap.name} was restored"))
        return SnapshotRestore(snap.name, tuple(change for change, _ in plan), None if dry_run else undo)
    if undo is None:
        undo = yield from _before(store, snap)
    for _, bring_back in plan:
        yield from bring_back()
    yield from going_back.finish()
    yield from write(partial(rows.set_note, undo.name, f"before {snap.name} was restored"))
    return SnapshotRestore(snap.name, tuple(change for change, _ in plan), undo)


def _differences(snap: Snapshot) -> Flow[list[SnapshotChange]]:
    """What differs from a snapshot, also where only pending writes do."""
    found = yield from snap._diff(None)
    tenant = yield from snap._context.tenant()
    if tenant is None:
        return []
    known = {change.name for change in found if change.what == "thread"}
    [lines] = yield from read(partial(_rows, _OF_LINES(tenant=tenant, s=snap._row.epoch)))
    more = sorted({name for (name,) in lines} - known)
    return found + [snap._change(SnapshotChange("thread", "changed", name)) for name in more]


def _rows(statement: Any) -> Program[list[Rows]]:
    return (yield Batch(statement, last=True))


def _plan(back: _GoingBack, found: Sequence[SnapshotChange]) -> Flow[list[tuple[SnapshotChange, Undone]]]:
    """What is to be done for each change; those that only look like one are left out."""
    plan: list[tuple[SnapshotChange, Undone]] = []
    done: set[str] = set()
    for change in found:
        bring_back: Undone | None
        if change.what == "thread":
            bring_back = None if change.name in done else (yield from back.thread(change.name))
            done.add(change.name)  # deleted and made again, it is there twice
        elif change.what == "item":
            bring_back = yield from back.item(change.namespace, change.name)
        else:
            bring_back = back.run(change.name)
        if bring_back is not None:
            plan.append((change, bring_back))
    return plan


def _unfinished(store: SnapshotStore, snap: Snapshot) -> Flow[Snapshot | None]:
    """What an interrupted restore of this snapshot has taken first."""
    found = yield from store._snapshots()
    return next((one for one in found if one.note == _under_way(snap)), None)


def _before(store: SnapshotStore, snap: Snapshot) -> Flow[Snapshot]:
    taken = {one.name for one in (yield from store._snapshots())}
    name, count = f"before restoring {snap.name}", 1
    while name in taken:
        count += 1
        name = f"before restoring {snap.name}, {count}"
    return (yield from store._snapshot(name, _under_way(snap), None))


def _under_way(snap: Snapshot) -> str:
    """The note of what is taken first, until the restore is finished."""
    return f"{snap.name} is being restored: the same call finishes it"


class _Then(NamedTuple):
    """A thread: its row, its state if it has one, and whether it has labels or pending writes."""

    row: ThreadRow
    state: Loaded | None
    labelled: bool


class _GoingBack:
    """One restore: how each thing comes back."""

    def __init__(self, ctx: StoreContext, snap: Snapshot, undo: Snapshot | None) -> None:
        self._ctx, self._snap = ctx, snap
        self._note = f"restored from snapshot {snap.name}"
        self._past = snap.store._context
        self._since = None if undo is None else undo._row.epoch
        self._heads: list[tuple[int, ThreadRow, Loaded]] = []  # to be appended together
        self.runs: dict[str, rewind.ChangedRun] = {}

    def _then(self, op: Callable[[], Program[T]]) -> Flow[T]:
        """What a program reads at the snapshot."""
        driver = self._past.driver
        return either(lambda: drive(driver, read(op)), lambda: adrive(driver, read(op)))

    # --- threads

    def thread(self, name: str) -> Flow[Undone | None]:
        """How a thread comes back. None: it is as it was."""
        tenant = yield from self._ctx.ensure_tenant()
        then = yield from self._then(partial(_look, tenant, name))
        try:
            now = yield from read(partial(_look, tenant, name))
        except Damaged:  # a reason to go back
            now = yield from read(partial(_look, tenant, name, unread=True))
        if then is None:
            return None if now is None else partial(self._delete, tenant, name)
        if now is None or now.row.thread != then.row.thread or then.labelled or now.labelled or then.state is None:
            if now is not None:
                before = yield from self._then(partial(thread_digest, tenant, name))
                if before == (yield from read(partial(thread_digest, tenant, name))):
                    return None
            return partial(self._replace, tenant, then.row)
        same = now.state is not None and now.state.data == then.state.data
        if same and metadata_of(now.row) == metadata_of(then.row):
            return None
        return partial(self._append, tenant, then.row, then.state)

    def _append(self, tenant: int, then: ThreadRow, state: Loaded) -> Flow[None]:
        """A new head, with others in one transaction: each commit waits for the disk."""
        self._heads.append((tenant, then, state))
        if len(self._heads) == _HEADS:
            yield from self.finish()

    def finish(self) -> Flow[None]:
        """Write the new heads that are left."""
        heads, self._heads = sorted(self._heads, key=lambda head: head[1].thread), []
        savings: list[Saving] = []
        try:
            for head in heads:
                saving = yield from self._prepare(*head)
                savings.append(saving)
            yield from write(partial(_together, savings), solo=True)
        except (Moved, Conflict):  # a thread was written to meanwhile
            for saving in savings:
                saving.drop()
            for head in heads:
                yield from self._append_alone(*head)
        else:
            for saving in savings:
                saving.settle()

    def _append_alone(self, tenant: int, then: ThreadRow, state: Loaded) -> Flow[None]:
        for _ in range(ATTEMPTS):
            saving = yield from self._prepare(tenant, then, state)
            try:
                yield from saving.flow()
            except (Moved, Conflict) as error:
                saving.drop(error if isinstance(error, Moved) else None)
            else:
                saving.settle()
                return
        raise Conflict(f"thread {then.name!r} is saved to without pause: it was not restored; restore again")

    def _prepare(self, tenant: int, then: ThreadRow, state: Loaded) -> Flow[Saving]:
        now, live = yield from read(partial(_row_of, tenant, then))
        if live is not None and live.key == state.record.key:  # it is stored as it was: its text need not be read again
            self._ctx.cache.put((tenant, now.tree, live.id), base_of(state, now.generation))
        old, new = metadata_of(now), metadata_of(then)
        cursor = Cursor(then.name, merge=None if old == new else dict.fromkeys(old) | new)
        cursor.resolve(now.thread, now.tree)
        base = None if live is None else live.id
        again = Save(self._ctx, cursor, self._note, expect=now.head, text=state.data, kind="restore", base=base)
        return (yield from again.prepare())

    def _replace(self, tenant: int, then: ThreadRow) -> Flow[None]:
        pages = yield from self._then(partial(read_all, tenant, then.name))
        put = partial(replace_thread, tenant, then.name, then.thread, pages, self._snap._row.epoch)
        gone = yield from write_repair(put)
        if gone is not None:
            self._ctx.cache.forget(tenant, gone.tree)

    def _delete(self, tenant: int, name: str) -> Flow[None]:
        yield from gc.delete(tenant, name, None, force=True)

    # --- memory

    def item(self, namespace: tuple[str, ...], name: str) -> Flow[Undone | None]:
        """How an item comes back. None: it is as it was, or has expired since."""
        tenant, path, key = (yield from self._ctx.ensure_tenant()), path_of(namespace), check_key(name)
        clock = self._ctx.clock_us()
        [now] = yield from read(partial(read_keys, tenant, [(path, key)], clock))
        [then] = yield from self._then(partial(read_keys, tenant, [(path, key)], clock))
        if then is None:
            gone = NewVersion(key, gone=DELETED)
            return None if now is None else partial(self._put, path, gone)
        if now is not None and _said(now) == _said(then):
            return None
        [[(_, words, model, vec)]] = yield from self._then(partial(_rows, CARRIED(tenant=tenant, id=then.id)))
        new = NewVersion(
            key,
            then.body,
            then.kind,
            words,
            bool(then.pinned),
            valid_from=then.valid_from,
            valid_to=then.valid_to,
            expires=then.expires,
            model=model,
            vec=vec,
        )
        return partial(self._put, path, new)

    def _put(self, path: str, version: NewVersion) -> Flow[None]:
        yield from memory.write_versions(self._ctx, path, [version], self._ctx.clock_us())

    # --- runs

    def run(self, name: str) -> Undone | None:
        found = self.runs.get(name)
        return None if found is None else partial(self._rewind, found)

    def _rewind(self, run: rewind.ChangedRun) -> Flow[None]:
        tenant = yield from self._ctx.ensure_tenant()
        state = yield from self._then(partial(_look, tenant, run.state))
        pages = None if state is None else (yield from self._then(partial(read_all, tenant, run.state)))
        op = partial(rewind.rewind, tenant, run, self._snap._row.epoch, self._since, self._ctx.clock_us())
        yield from write_repair(partial(_with_state, op, tenant, run.state, pages))


def _together(savings: Sequence[Saving]) -> Program[None]:
    for saving in savings:
        yield from saving.program()


def _said(row: ItemRow) -> tuple[Any, ...]:
    return row.body, row.kind, row.pinned, row.valid_from, row.valid_to


def _look(tenant: int, name: str, *, unread: bool = False) -> Program[_Then | None]:
    row = yield from thread_or_stub(tenant, name)
    if row is None:
        return None
    [labelled] = yield Batch(_LABELLED(tenant=tenant, thread=row.thread))
    state = None if unread or labelled or row.head is None else (yield from read_state(tenant, row.tree, row.head))
    return _Then(row, state, bool(labelled))


def _row_of(tenant: int, then: ThreadRow) -> Program[tuple[ThreadRow, Record | None]]:
    """A thread as it is, and the record that was its head, if a difference can be made to it."""
    row = yield from thread_or_stub(tenant, then.name)
    if row is None:
        raise Conflict(f"thread {then.name!r} was deleted meanwhile: restore again")
    return row, (yield from read_live(tenant, row.tree, then.head or 0)) if row.tree == then.tree else None


def read_all(tenant: int, name: str) -> Program[list[Any]]:
    """What a snapshot holds of a thread, for `replace_thread`."""
    pages: list[Any] = []
    yield from read_threads(tenant, [name], pages.append)
    return pages


def replace_thread(tenant: int, name: str, number: int, pages: list[Any], s: int) -> Program[ThreadRow | None]:
    """Put a thread in the place of what has its name now, with its tasks. What was there."""
    row = yield from remove_thread(tenant, name)
    _, numbers = yield from add_threads(tenant, iter(pages), lambda _: None)
    old = {number} if row is None else {number, row.thread}
    yield from rewind.keep_tasks(tenant, old, numbers[number], s, lost=row is None or row.thread != number)
    return row


def remove_thread(tenant: int, name: str) -> Program[ThreadRow | None]:
    """Remove a thread, or its stub, inside another transaction. What it was."""
    found = yield from thread_or_stub(tenant, name)
    if found is None:
        yield from drop_stubs(tenant, "thread", name)
        return None
    row, threads = yield from gc.lock_tree(tenant, name, found.thread)
    yield from gc.remove_threads(tenant, threads, [row])
    return row


def _with_state(
    op: Callable[[], Program[Literal["kept", "rewound", "deleted"]]], tenant: int, name: str, pages: list[Any] | None
) -> Program[None]:
    """A run goes back together with its state."""
    done = yield from op()
    if done == "kept":
        return
    yield from remove_thread(tenant, name)
    if pages is not None:
        yield from add_threads(tenant, iter(pages), lambda _: None)
