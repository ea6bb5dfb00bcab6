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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import Conflict, NotFound, UsageError
from perdure.log import gc
from perdure.log.reading import read_live
from perdure.log.records import Record
from perdure.log.thread_table import ThreadRow, metadata_of, thread_or_stub
from perdure.memory import flows as memory
from perdure.memory.labels import check_key, path_of
from perdure.memory.rows import CARRIED, DELETED, ItemRow, NewVersion, read_keys
from perdure.snapshots import diff, rewind, rows
from perdure.snapshots.diff import SnapshotChange, ThreadAt
from perdure.storage.program import Batch, ConstraintFailed, Flow, Program, Rows, read, write, write_repair
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.flows import base_of
from perdure.threads.saves import ATTEMPTS, Moved, Save, Saving
from perdure.transfers.threads import add_threads, read_threads

if TYPE_CHECKING:
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.store import SnapshotStore

T = TypeVar("T")
Undone = Callable[[], Flow[None]]  # brings one thing back
_HEADS = 50  # or versions, written in one transaction
_ACTIONS: Mapping[str, Any] = {"removed": "bring back", "changed": "set back", "added": "delete"}


@dataclass(frozen=True, slots=True)
class SnapshotRestore:
    """What a restore did, or would do if it is a dry run: `str(change)` is "bring back thread support-7"."""

    snapshot: str
    changes: tuple[SnapshotChange, ...]
    _undo: Snapshot | None = field(repr=False)

    @property
    def undo(self) -> Snapshot:
        """The store as it was before: restoring it undoes this restore. Raises UsageError if nothing was restored."""
        if self._undo is None:
            raise UsageError("nothing was restored: there is nothing to undo")
        return self._undo

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or f"nothing has changed since {self.snapshot}"


@dataclass(frozen=True, slots=True)
class RestoreScope:
    """What is to be brought back. None for both: all threads and all of memory."""

    threads: Sequence[str] | None  # patterns
    namespaces: Sequence[tuple[str, ...]] | None
    runs: bool
    keys: str | None

    def has(self, change: SnapshotChange) -> bool:
        everything = self.threads is None and self.namespaces is None
        if change.what == "run":
            return self.runs
        if change.what == "deployment":
            return everything
        if change.what == "thread":
            return everything or any(diff.matches(change.name, pattern) for pattern in self.threads or ())
        return everything or any(change.namespace[: len(name)] == name for name in self.namespaces or ())


def wanted_of(threads: Any, namespaces: Any, runs: str | None, keys: str | None) -> RestoreScope:
    """Raises UsageError."""
    if isinstance(threads, str):
        raise UsageError(f"restore(threads={threads!r}): a list of names or patterns, such as [{threads!r}]")
    if isinstance(namespaces, str) or any(isinstance(labels, str) for labels in namespaces or ()):
        raise UsageError('restore(namespaces=…): a list of namespaces, such as [("users", "alice")]')
    if runs not in (None, "rewind"):
        raise UsageError(f'restore(runs={runs!r}): None leaves runs alone, "rewind" takes them back')
    if keys not in (None, "same", "new") or (keys == "same" and not runs):
        raise UsageError('restore(keys=…): "same", together with runs="rewind", or "new"')
    return RestoreScope(threads, namespaces and [tuple(each) for each in namespaces], runs is not None, keys)


def restore(store: SnapshotStore, snap: Snapshot, wanted: RestoreScope, *, dry_run: bool) -> Flow[SnapshotRestore]:
    """See `store.restore`."""
    tenant = (yield from store._context.tenant()) or 0  # 0: nothing was ever written for it
    rollback = _Rollback(store._context, snap, tenant)
    times = (snap._row.taken_at, store._context.clock_us())
    kept = partial(rows.kept, partial(diff.candidates, tenant, snap._row.epoch, diff.NOW, times), snap._row.token)
    found = [change for change, _ in (yield from read(kept)) if wanted.has(change)]
    rollback.runs = yield from read(partial(rewind.runs_of, tenant, snap._row, found, wanted.keys is not None))
    yield from rollback.read_items([_place(change) for change in found if change.what == "item"])
    plan: list[tuple[SnapshotChange, Undone]] = []
    for change in found:
        undone = yield from rollback.find(change)
        if undone is not None:
            states = partial(diff.states_of, store, snap.store)
            plan.append((replace(change, kind=_ACTIONS[change.kind], _states=states), undone))
    if wanted.keys != "new":
        yield from read(partial(rewind.refuse_effects, tenant, snap._row, [change for change, _ in plan]))
    undo = None if dry_run else (yield from _undo(store, snap, wanted, bool(plan)))
    if undo is not None:
        for _, undone in plan:
            yield from undone()
        yield from rollback.finish()
        yield from write(partial(rows.set_note, undo.name, f"before {snap.name} was restored"))
    return SnapshotRestore(snap.name, tuple(change for change, _ in plan), undo)


def _undo(store: SnapshotStore, snap: Snapshot, wanted: RestoreScope, needed: bool) -> Flow[Snapshot | None]:
    """The store as it was before: what the same call took, if it was interrupted, or a new snapshot, if one is needed.
    Until the restore is finished, its note says what it is for."""
    some = [*(wanted.threads or ()), *("/".join(labels) for labels in wanted.namespaces or ())]
    where = f"{', '.join(some) or 'everything'} of tenant {store._context.tenant_name}"
    note = f"{snap.name} is being restored ({where}): the same call finishes it"
    found = yield from store._snapshots()
    begun = next((one for one in found if one.note == note), None)
    if begun is not None or not needed:
        return begun
    names = {one.name for one in found}
    free = (name for number in count(1) if (name := f"undo-{number}") not in names)
    for _ in range(ATTEMPTS):
        try:
            return (yield from store._snapshot(next(free), note, None))
        except UsageError as error:  # another restore took the name this moment
            taken = error
    raise taken


class _Rollback:
    """One restore: how each thing comes back."""

    def __init__(self, ctx: StoreContext, snap: Snapshot, tenant: int) -> None:
        self._ctx, self._tenant = ctx, tenant
        self._note = f"restored from snapshot {snap.name}"
        self._past, self._s = snap.store._context, snap._row.epoch
        self._heads: list[ThreadAt] = []  # to be appended together
        self._versions: dict[str, list[NewVersion]] = {}  # the same, by path
        self.items: dict[tuple[str, str], NewVersion] = {}
        self.runs: dict[str, rewind.ChangedRun] = {}

    def find(self, change: SnapshotChange) -> Flow[Undone | None]:
        """How something comes back. None: it is as it was, or stays."""
        if change.what == "thread":
            return (yield from self._thread(change.name))
        if change.what == "item":
            version = self.items.get(_place(change))
            return None if version is None else partial(self._put, path_of(change.namespace), version)
        if change.what == "deployment":
            return partial(write, partial(rewind.deployment_back, self._tenant, change.name, self._s))
        run = self.runs.get(change.name)
        return None if run is None else partial(self._rewind, run)

    def _then(self, op: Callable[..., Program[T]], *args: Any) -> Flow[T]:
        """What a program reads at the snapshot."""
        return diff.read_at(self._past, partial(op, self._tenant, *args))

    # --- threads

    def _thread(self, name: str) -> Flow[Undone | None]:
        then, same, whole = yield from diff.compare_thread(self._past, self._ctx, self._tenant, name)
        if same:
            return None
        if then is None:
            return partial(self._delete, name)
        return partial(self._replace if whole or then.state is None else self._append, then)

    def _append(self, then: ThreadAt) -> Flow[None]:
        """A new head, with others in one transaction: each commit waits for the disk."""
        self._heads.append(then)
        if len(self._heads) == _HEADS:
            yield from self.finish()

    def finish(self) -> Flow[None]:
        """Write the new heads and versions that are left."""
        for path in list(self._versions):
            yield from self._put_all(path)
        heads, self._heads = sorted(self._heads, key=lambda head: head.row.thread), []
        if not (yield from self._write(heads)):
            for head in heads:
                for _ in range(ATTEMPTS):
                    if (yield from self._write([head])):
                        break
                else:
                    raise Conflict(f"thread {head.row.name!r} is saved to without pause: restore again")

    def _write(self, heads: Sequence[ThreadAt]) -> Flow[bool]:
        """False: a thread was written to meanwhile, and nothing was done."""
        savings: list[Saving] = []
        try:
            for head in heads:
                saving = yield from self._prepare(head)
                savings.append(saving)
            yield from write(partial(_together, savings), solo=True)
        except (Moved, Conflict) as error:
            for saving in savings:
                saving.drop(error if isinstance(error, Moved) else None)
            return False
        for saving in savings:
            saving.settle()
        return True

    def _prepare(self, head: ThreadAt) -> Flow[Saving]:
        then, state = head.row, head.state
        assert state is not None
        now, live = yield from read(partial(_row_of, self._tenant, then))
        if live is not None and live.key == state.record.key:  # it is stored as it was: its text need not be read again
            self._ctx.cache.put((self._tenant, now.tree, live.id), base_of(state, now.generation))
        old, new = metadata_of(now), metadata_of(then)
        cursor = Cursor(then.name, merge=None if old == new else dict.fromkeys(old) | new)
        cursor.resolve(now.thread, now.tree)
        base = None if live is None else live.id
        again = Save(self._ctx, cursor, self._note, expect=now.head, text=state.data, kind="restore", base=base)
        return (yield from again.prepare())

    def _replace(self, then: ThreadAt) -> Flow[None]:
        pages = yield from self._then(read_all, then.row.name)
        gone = yield from _commit(partial(replace_thread, self._tenant, then.row, pages, self._s))
        if gone is not None:
            self._ctx.cache.forget(self._tenant, gone.tree)

    def _delete(self, name: str) -> Flow[None]:
        gone = yield from _commit(partial(delete_thread, self._tenant, name, self._s))
        if gone is not None:
            yield from gc.tell_domains(self._tenant, [gone.thread])

    # --- memory

    def read_items(self, places: Sequence[tuple[str, str]]) -> Flow[None]:
        """Find the versions that items, by path and key, get. None for one that is as it was, or has expired since."""
        clock = self._ctx.clock_us()
        for some in (places[at : at + _HEADS] for at in range(0, len(places), _HEADS)):
            now = yield from read(partial(read_keys, self._tenant, some, clock))
            then = yield from self._then(read_keys, some, clock)
            differ = [pair for pair in zip(some, now, then, strict=True) if diff.said(pair[1]) != diff.said(pair[2])]
            carried = yield from self._then(_carried, [row.id if row else 0 for _, _, row in differ])
            for (place, _, row), found in zip(differ, carried, strict=True):
                self.items[place] = NewVersion(place[1], gone=DELETED) if row is None else _version(row, *found[0])

    def _put(self, path: str, version: NewVersion) -> Flow[None]:
        """A new version, with others of its namespace in one transaction."""
        self._versions.setdefault(path, []).append(version)
        if len(self._versions[path]) == _HEADS:
            yield from self._put_all(path)

    def _put_all(self, path: str) -> Flow[None]:
        yield from memory.write_versions(self._ctx, path, self._versions.pop(path), self._ctx.clock_us())

    # --- runs

    def _rewind(self, run: rewind.ChangedRun) -> Flow[None]:
        """A run, with those that it started, and their states: with the first of them, all go back."""
        family = [one for one in self.runs.values() if one.root == run.root]
        if run is family[0]:
            states = []
            for one in family:
                pages = yield from self._then(read_all, one.state)
                states.append(pages)
            yield from _commit(partial(rewind_family, self._tenant, family, states, self._s, self._ctx.clock_us()))


def _commit(op: Callable[[], Program[T]]) -> Flow[T]:
    """What another process brings back or deletes at this moment is there, or not, the second time."""
    try:
        return (yield from write_repair(op))
    except (ConstraintFailed, NotFound):
        return (yield from write_repair(op))


def _place(change: SnapshotChange) -> tuple[str, str]:
    """The path and key of an item."""
    return path_of(change.namespace), check_key(change.name)


def _together(savings: Sequence[Saving]) -> Program[None]:
    for saving in savings:
        yield from saving.program()


def _carried(tenant: int, items: Sequence[int]) -> Program[list[Rows]]:
    return (yield Batch(*(CARRIED(tenant=tenant, id=item) for item in items), last=True)) if items else []


def _version(then: ItemRow, _: int, words: bytes | None, model: str | None, vec: bytes | None) -> NewVersion:
    """What an item was, as a version to be written."""
    times = {name: getattr(then, name) for name in ("valid_from", "valid_to", "expires")}
    return NewVersion(then.key, then.body, then.kind, words, bool(then.pinned), **times, model=model, vec=vec)


def _row_of(tenant: int, then: ThreadRow) -> Program[tuple[ThreadRow, Record | None]]:
    """A thread as it is, and the record that was its head, if a difference can be made to it."""
    row = yield from thread_or_stub(tenant, then.name)
    if row is None:
        raise Conflict(f"thread {then.name!r} was deleted meanwhile: restore again")
    return row, (yield from read_live(tenant, row.tree, then.head or 0)) if row.tree == then.tree else None


def read_all(tenant: int, name: str) -> Program[list[Any]]:
    """What a snapshot holds of a thread, for `replace_thread`; empty: nothing."""
    pages: list[Any] = []
    if (yield from thread_or_stub(tenant, name)) is not None:
        yield from read_threads(tenant, [name], pages.append)
    return pages


def replace_thread(tenant: int, then: ThreadRow, pages: list[Any], s: int) -> Program[ThreadRow | None]:
    """Put a thread in the place of what has its name now, with its tasks. What was there."""
    row = yield from delete_thread(tenant, then.name, s)
    _, numbers = yield from add_threads(tenant, iter(pages), lambda _: None)
    old = {then.thread} if row is None else {then.thread, row.thread}
    yield from rewind.keep_tasks(tenant, old, numbers[then.thread], s)
    return row


def delete_thread(tenant: int, name: str, s: int) -> Program[ThreadRow | None]:
    """The same; and if it was archived, it is again."""
    row = yield from remove_thread(tenant, name)
    yield from rewind.stub_back(tenant, "thread", name, s)
    return row


def remove_thread(tenant: int, name: str) -> Program[ThreadRow | None]:
    """Remove a thread inside another transaction. What it was."""
    found = yield from thread_or_stub(tenant, name)
    if found is None:
        return None
    row, threads = yield from gc.lock_tree(tenant, name, found.thread)
    yield from gc.remove_threads(tenant, threads, [row])
    return row


def rewind_family(
    tenant: int, runs: Sequence[rewind.ChangedRun], states: Sequence[list[Any]], s: int, now: int
) -> Program[None]:
    """Take runs back, each with its state."""
    yield from rewind.rewind(tenant, runs, s, now)
    for run, pages in zip(runs, states, strict=True):
        yield from remove_thread(tenant, run.state)
        if pages:
            yield from add_threads(tenant, iter(pages), lambda _: None)
