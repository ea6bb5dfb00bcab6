"""`store.restore(…)`: bring back the threads, items, runs and deployments that differ from a snapshot or an instant.

The store first takes a snapshot: restoring that one undoes the restore. Then each thread, item and run comes back whole
or not at all. A plain thread gets a new head, and an item a new version. A thread with labels is replaced. A run is
left alone or rewound (`rewind.py`). What was created since is deleted. After a kill, the same call finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from blake3 import blake3

from perdure.errors import Conflict, Damaged, NotFound, ReadOnlyStore, UsageError
from perdure.log import gc
from perdure.log.reading import read_live
from perdure.log.thread_table import ThreadRow, find_thread, metadata_of, thread_or_stub
from perdure.memory import flows as memory
from perdure.memory.labels import check_key, path_of
from perdure.memory.rows import CARRIED, DELETED, NewVersion, read_keys
from perdure.snapshots import diff, rewind, rows
from perdure.snapshots.cutting import set_back
from perdure.snapshots.diff import SnapshotChange, ThreadAt
from perdure.snapshots.handle import Snapshot, list_snapshots
from perdure.snapshots.points import RestorePoint
from perdure.storage.program import (
    Batch,
    ConstraintFailed,
    Flow,
    Program,
    Sql,
    change,
    read,
    side_by_side,
    write,
    write_repair,
)
from perdure.storage.versions import installed
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.flows import base_of
from perdure.threads.save_engine import ATTEMPTS, Moved, PreparedSave
from perdure.threads.saves import Save
from perdure.transfers.read_ahead import PATIENCE, ReadAhead
from perdure.transfers.threads import add_threads, read_threads

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.instants import Instant
    from perdure.snapshots.store import SnapshotStore

T = TypeVar("T")
Action = Literal["bring back", "set back", "delete"]
ACTIONS: dict[diff.Kind, Action] = {"removed": "bring back", "changed": "set back", "added": "delete"}
Place = tuple[str, str]  # of an item: path and key
Pages = Callable[[], AbstractContextManager[Iterable[Any]]]  # what is stored of a thread, to be written elsewhere
_EXISTING = "SELECT {column} FROM {table}{past} WHERE tenant = :tenant"


@dataclass(frozen=True, slots=True)
class RestoreChange(diff.ComparedStates):
    """What a restore does to a thread, a run, an item of memory, a function's deployment or a schedule."""

    what: diff.Subject
    action: Action
    name: str  # of the thread, the run's id, the item's key, the function
    namespace: tuple[str, ...] = ()  # of an item
    _stores: tuple[Store | Instant, ...] = field(default=(), repr=False, compare=False)  # now, and as it was

    def __str__(self) -> str:
        return f"{self.action} {self.what} {'/'.join((*self.namespace, self.name))}"


@dataclass(frozen=True, slots=True)
class SnapshotRestore:
    """What a restore did, or would do if it is a dry run: `str(change)` is "bring back thread support-7"."""

    snapshot: str
    changes: tuple[RestoreChange, ...]
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
    """What a restore covers. None for threads and namespaces: all of both. Raises UsageError for bad values."""

    threads: Sequence[str] | None  # patterns
    namespaces: Sequence[Sequence[str]] | None
    runs: str | None
    keys: str | None

    def __post_init__(self) -> None:
        if isinstance(self.threads, str):
            raise UsageError(f"restore(threads={self.threads!r}): a list of names or patterns: [{self.threads!r}]")
        if isinstance(self.namespaces, str) or any(isinstance(each, str) for each in self.namespaces or ()):
            raise UsageError('restore(namespaces=…): a list of namespaces, such as [("users", "alice")]')
        if self.runs not in (None, "rewind"):
            raise UsageError(f'restore(runs={self.runs!r}): None leaves runs alone, "rewind" takes them back')
        if self.keys not in (None, "same", "new") or (self.keys == "same" and not self.runs):
            raise UsageError('restore(keys=…): "same", together with runs="rewind", or "new"')

    @property
    def subjects(self) -> set[diff.Subject]:
        """Which of threads, items and runs it covers, in whole or in part."""
        whole = self.threads is None and self.namespaces is None
        covers: dict[diff.Subject, object] = {
            "thread": whole or self.threads, "item": whole or self.namespaces, "run": self.runs
        }  # fmt: skip
        return {subject for subject, is_covered in covers.items() if is_covered}

    def has(self, change: SnapshotChange) -> bool:
        if change.what == "run":
            return self.runs is not None
        if self.threads is None and self.namespaces is None:
            return True
        if change.what == "thread":
            return any(diff.matches(change.name, pattern) for pattern in self.threads or ())
        return change.what == "item" and any(
            change.namespace[: len(labels)] == tuple(labels) for labels in self.namespaces or ()
        )

    def check(self, tenant: int) -> Program[None]:
        """Raise NotFound for a pattern or a namespace that stands for nothing, now or in a snapshot."""
        pasts = ("", "_past") if (yield from installed()) else ("",)
        names, paths = yield Batch(
            *(
                Sql(" UNION ".join(_EXISTING.format(column=column, table=table, past=past) for past in pasts))(
                    tenant=tenant
                )
                for column, table in (("name", "thread"), ("path", "memory_space"))
            )
        )
        for pattern in self.threads or ():
            if not any(diff.matches(name, pattern) for (name,) in names):
                raise NotFound(f"no thread matches {pattern!r}: nothing was restored")
        for labels in self.namespaces or ():
            if not any(path.startswith(path_of(tuple(labels))) for (path,) in paths):
                raise NotFound(f"there is no namespace {'/'.join(labels)!r}: nothing was restored")

    def __str__(self) -> str:
        return ", ".join([*(self.threads or ()), *map("/".join, self.namespaces or ())]) or "everything"


def restore(
    snapshots: SnapshotStore, point: RestorePoint, scope: RestoreScope, *, dry_run: bool
) -> Flow[SnapshotRestore]:
    """Compare the store with a point, plan the changes, and make them unless it is a `dry_run`. Return them."""
    ctx = snapshots._context
    tenant = (yield from ctx.tenant()) or 0  # 0: nothing was ever written for it
    differences = yield from point.differences(ctx, tenant, scope.subjects)
    chosen = [change for change in differences.changes if scope.has(change)]
    yield from read(partial(scope.check, tenant))
    runs = yield from read(partial(rewind.runs_of, tenant, point, chosen, differences.runs, scope.keys))
    back = _Restorer(ctx, point, tenant, rewind.KeyChoice(scope.keys, ctx.entropy(16)))
    items = yield from back.find_items([_place(change) for change in chosen if change.what == "item"])
    threads = yield from back.find_threads([change.name for change in chosen if change.what == "thread"])

    def kind(one: SnapshotChange) -> diff.Kind | None:
        if one.what == "thread":
            return threads.get(one.name)
        if one.what == "item":
            return items[_place(one)].kind if _place(one) in items else None
        return one.kind if one.what != "run" or one.name in runs else None

    stores = snapshots._whole, point.shown
    going = [(each, action) for each in chosen if (action := kind(each)) is not None]
    plan = [RestoreChange(each.what, ACTIONS[kind], each.name, each.namespace, stores) for each, kind in going]
    if scope.keys != "new":
        yield from rewind.refuse_effects(ctx, tenant, point, {name for name in threads if threads[name] != "added"})
    undo = None if dry_run else (yield from begin_undo(snapshots, point, scope, tenant, plan))
    if undo is not None:
        try:
            for some in diff.in_batches([*threads]):
                yield from back.threads(some)
            yield from back.runs(runs.values())
            yield from back.items(items)
            for name in [one.name for one in plan if one.what == "deployment"]:
                yield from change(*rewind.rows_back(["deployment"], point.epoch, tenant=tenant, function=name))
            for name in [one.name for one in plan if one.what == "schedule"]:
                yield from write(partial(rewind.schedule_back, tenant, name, point.epoch, ctx.clock_us()))
        except ReadOnlyStore:  # a replica: nothing was written
            yield from undo._release()
            raise
        yield from write(partial(rows.finish_undo, undo._row, f"before {point.name} was restored"))
    return SnapshotRestore(point.name, tuple(plan), undo)


def begin_undo(
    snapshots: SnapshotStore, point: RestorePoint, scope: RestoreScope, tenant: int, plan: Sequence[RestoreChange]
) -> Flow[Snapshot | None]:
    """Return the snapshot that undoes a restore, or None if there is nothing to undo.

    If the same call was interrupted before, it is the snapshot that call took. But if one of the planned changes was
    written after that, the old snapshot lacks it: it is marked as finished, and a new one is taken.
    """
    ctx = snapshots._context
    call = blake3(f"{point.token} {tenant} {scope}".encode()).hexdigest()  # by token: a name can be used again
    for begun in (yield from list_snapshots(snapshots._whole)):
        if begun.manifest.get("restores") != call:
            continue
        since, _ = yield from read(partial(diff.changed_rows, tenant, begun._row, None, ctx.clock_us()))
        written = {(change.what, change.namespace, change.name) for change in since}
        if not any((change.what, change.namespace, change.name) in written for change in plan):
            return begun
        yield from write(partial(rows.finish_undo, begun._row, f"before {point.name} was restored, in part"))
    if not plan:
        return None
    note = f"{point.name} is being restored ({scope} of tenant {ctx.tenant_name}): the same call finishes it"
    return (yield from snapshots._snapshot("undo", note, None, numbered=True, restores=call))


class BackItem(NamedTuple):
    kind: diff.Kind
    version: NewVersion  # that it gets


class _Restorer:
    """Brings threads, items and runs back to what a restore point has."""

    def __init__(self, ctx: StoreContext, point: RestorePoint, tenant: int, keys: rewind.KeyChoice) -> None:
        self._ctx, self._point, self._tenant, self._keys = ctx, point, tenant, keys
        self._past = point.past
        self._note = f"restored from snapshot {point.name}" if point.at is None else f"restored as of {point.name}"

    def _pages(self, name: str) -> Flow[Pages | None]:
        """Return a function that opens the pages of a thread in the past; None if there is no such thread.

        The pages are read while they are written. A store in memory has one connection, so it is read first.
        """
        if (yield from diff.read_at(self._past, partial(thread_or_stub, self._tenant, name))) is None:
            return None
        op = partial(read_threads, self._tenant, [name])
        if self._ctx.driver.capabilities.place is not None:
            return partial(ReadAhead, self._past.driver, op)
        pages: list[Any] = []
        yield from diff.read_at(self._past, partial(op, pages.append))
        return lambda: nullcontext(iter(pages))

    def find_threads(self, names: Sequence[str]) -> Flow[dict[str, diff.Kind]]:
        """Return how threads differ. Raises Damaged if one cannot be read as it was."""
        kinds: dict[str, diff.Kind] = {}
        for some in diff.in_batches(names):
            pairs = yield from self._point.threads(self._ctx, self._tenant, some)
            for name, (then, now) in zip(some, pairs, strict=True):
                if then is not None and isinstance(then.content, Damaged):
                    raise then.content
                if not diff.same_content(then, now):
                    kinds[name] = diff.kind_of(then, now)
        return kinds

    def threads(self, names: Sequence[str], attempt: int = 0) -> Flow[None]:
        """Restore threads. New heads are written in one transaction, because each commit waits for the disk."""
        heads: list[tuple[ThreadAt, ThreadAt]] = []
        pairs = yield from self._point.threads(self._ctx, self._tenant, names)
        for name, (then, now) in zip(names, pairs, strict=True):
            if diff.same_content(then, now):
                continue
            if then and now and then.state and not now.labelled and now.row.thread == then.row.thread:
                heads.append((then, now))
            else:
                yield from self._replace(name, then)
        heads.sort(key=lambda pair: pair[1].row.thread)
        if not heads or (yield from self._append(heads)):
            return
        if attempt == ATTEMPTS:
            raise Conflict(f"thread {names[0]!r} is being saved to by others, and was not restored: restore again")
        for then, _ in heads:
            yield from self.threads([then.row.name], attempt + 1)

    def _append(self, heads: Sequence[tuple[ThreadAt, ThreadAt]]) -> Flow[bool]:
        """Append the new heads. Return False if a thread was written to meanwhile; nothing was done then."""
        savings: list[PreparedSave] = []
        try:
            for then, now in heads:
                saving = yield from self._save(then, now).prepare()
                savings.append(saving)
            yield from write(lambda: side_by_side([saving.program() for saving in savings]), solo=True)
        except (Moved, Conflict, ConstraintFailed) as error:
            for saving in savings:
                saving.drop(error if isinstance(error, Moved) else None)
            if isinstance(error, ConstraintFailed) and error.kind != "unique":
                raise
            return False
        for saving in savings:
            saving.settle()
        return True

    def _save(self, then: ThreadAt, now: ThreadAt) -> Save:
        """Return a save that puts the state of then on the head that was just read."""
        assert then.state is not None
        old, new = metadata_of(now.row), metadata_of(then.row)
        cursor = Cursor(then.row.name, merge=None if old == new else dict.fromkeys(old) | new)
        cursor.resolve(now.row.thread, now.row.tree)
        key = (self._tenant, now.row.tree, now.row.head or 0)
        if now.state is None:  # it is damaged: nothing must be built on it
            self._ctx.cache.drop(key)
        else:
            self._ctx.cache.put(key, base_of(now.state, now.row))
        return Save(self._ctx, cursor, self._note, expect=now.row.head, text=then.state.data, kind="restore")

    def _replace(self, name: str, then: ThreadAt | None) -> Flow[None]:
        """Delete the thread that has a name, and bring back the one that had it."""
        pages = None if then is None else (yield from self._pages(name))
        head = None if then is None or self._point.at is None else (then.row.head, self._point.at)
        gone = yield from _commit(
            partial(replace_thread, self._tenant, name, pages, self._point.epoch, self._keys, head)
        )
        if gone is not None:
            self._ctx.cache.forget(self._tenant, gone.tree)
            if pages is None:
                yield from gc.tell_domains(self._tenant, [gone.thread])

    def find_items(self, places: Sequence[Place]) -> Flow[dict[Place, BackItem]]:
        """Return the versions that items get. Items that are unchanged, or have expired since, get none."""
        back: dict[Place, BackItem] = {}
        look = partial(item_at, self._tenant, self._ctx.clock_us())
        for some in diff.in_batches(places):
            pairs = yield from diff.both_times(self._past, self._ctx, some, partial(look, then=self._point.at), look)
            for place, ((content, version), (now, _)) in zip(some, pairs, strict=True):
                if content != now:
                    back[place] = BackItem(diff.kind_of(content, now), version)
        return back

    def items(self, back: dict[Place, BackItem]) -> Flow[None]:
        for path, places in groupby(back, key=lambda place: place[0]):
            for some in diff.in_batches([back[place].version for place in places]):
                yield from memory.write_versions(self._ctx, path, some, self._ctx.clock_us())

    def runs(self, changed: Iterable[rewind.ChangedRun]) -> Flow[None]:
        """Rewind runs. Each goes back with its children and their states in one transaction."""
        for _, family in groupby(sorted(changed, key=attrgetter("root", "run")), key=attrgetter("root")):
            runs, states = [*family], dict[int, Pages | None]()
            for run in runs:
                if self._point.at is not None and run.kind == "added":
                    states[run.run] = None
                elif self._point.row is not None:  # else the states that it had are where they were
                    states[run.run] = yield from self._pages(run.state)
            now = self._ctx.clock_us()
            yield from _commit(partial(rewind_family, self._tenant, runs, states, self._point, now, self._keys))


def _commit(op: Callable[[], Program[T]]) -> Flow[T]:
    """Write, and retry once if a concurrent restore or delete won."""
    try:
        return (yield from write_repair(op))
    except (ConstraintFailed, NotFound):
        return (yield from write_repair(op))


def _place(change: SnapshotChange) -> tuple[str, str]:
    return path_of(change.namespace), check_key(change.name)


def item_at(tenant: int, now: int, place: Place, *, then: int | None = None) -> Program[tuple[Any, NewVersion]]:
    """Return the content of an item and the version that brings it back, as it is `now` or was known `then`.

    An item that has expired by `now` counts as deleted."""
    [row] = yield from read_keys(tenant, [place], now if then is None else then, then is not None, last=False)
    if row is None or (row.expires is not None and row.expires <= now):
        return None, NewVersion(place[1], gone=DELETED)
    [[(_, words, model, vec)]] = yield Batch(CARRIED(tenant=tenant, id=row.id))
    times = {name: getattr(row, name) for name in ("valid_from", "valid_to", "expires")}
    version = NewVersion(row.key, row.body, row.kind, words, bool(row.pinned), **times, model=model, vec=vec)
    return diff.item_content(row), version


def replace_thread(
    tenant: int,
    name: str,
    pages: Pages | None,
    epoch: int,
    keys: rewind.KeyChoice,
    head: tuple[int | None, int] | None = None,
) -> Program[ThreadRow | None]:
    """Replace the thread of a name by what a snapshot holds of it, with its tasks. Return the row of the one replaced.

    A thread that was archived then is archived again. `head`: an older one that it gets, and the instant of that.
    """
    row = yield from thread_or_stub(tenant, name)
    if row is not None:
        row, threads = yield from gc.lock_tree(tenant, name, row.thread)
        yield from gc.remove_threads(tenant, threads, [row])
    yield Batch(*rewind.rows_back(["archived"], epoch, tenant=tenant, kind="thread", name=name))
    if pages is not None:
        yield Batch(PATIENCE())
        with pages() as queue:
            _, numbers = yield from add_threads(tenant, iter(queue), lambda _: None)
        [(old, new)] = numbers.items()
        yield from rewind.keep_tasks(tenant, {old, old if row is None else row.thread}, new, epoch, keys)
        if head is not None:
            yield from set_back(tenant, (yield from find_thread(tenant, name)), *head)
    return row


def rewind_family(
    tenant: int,
    runs: Sequence[rewind.ChangedRun],
    states: Mapping[int, Pages | None],
    point: RestorePoint,
    now: int,
    keys: rewind.KeyChoice,
) -> Program[None]:
    """Rewind runs, each with its state: that of a snapshot, or, for an instant, the one that its journal names."""
    checkpoints = yield from rewind.rewind(tenant, runs, point.epoch, now, keys, point.at)
    for run in runs:
        if run.run in states:
            yield from replace_thread(tenant, run.state, states[run.run], point.epoch, keys)
        thread = yield from thread_or_stub(tenant, run.state)
        if point.at is None or thread is None or run.run not in checkpoints:
            continue
        checkpoint = checkpoints[run.run]
        if checkpoint is not None and (yield from read_live(tenant, thread.tree, checkpoint)) is not None:
            yield from set_back(tenant, thread, checkpoint, point.at)
        else:  # it had none, or that was pruned: the run saves its next state in a new thread
            yield from replace_thread(tenant, run.state, None, point.epoch, keys)
