"""`store.restore(at=…)`: threads and memory go back to an instant that no snapshot was taken at.

As with a snapshot, another snapshot is taken first, and after a kill the same call finishes it. A thread that is still
there gets its old state as a new head, whatever saved it: what came since stays in its history.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.errors import UsageError
from perdure.log import gc
from perdure.log.reading import read_thread_state
from perdure.log.thread_table import THREAD_COLUMNS, THREAD_ENCRYPTED, ThreadRow, thread_row
from perdure.memory.flows import write_versions
from perdure.memory.labels import labels_of, unescaped
from perdure.memory.rows import NewVersion
from perdure.runs.calls.state import thread_name
from perdure.runs.journal.entries import INTENT
from perdure.snapshots import diff
from perdure.snapshots.cutting import head_at, later_entries
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.instants import Instant
from perdure.snapshots.restore import ACTIONS, Place, RestoreChange, RestoreScope, SnapshotRestore, begin_undo, item_at
from perdure.snapshots.rows import SnapshotRow, finish_undo
from perdure.storage.program import Driver, Sql, drive, fetch, read, write
from perdure.threads.context import Cursor
from perdure.threads.flows import base_of
from perdure.threads.rollback import rollback
from perdure.threads.save_engine import save
from perdure.threads.saves import Save
from perdure.transfers.run_rows import read_tasks

if TYPE_CHECKING:
    from perdure.snapshots.store import SnapshotStore

_THREADS = Sql(
    f"""SELECT {", ".join(THREAD_COLUMNS)} FROM thread WHERE tenant = :tenant AND updated_at >= :since
        AND substr(name, 1, {len(thread_name(""))}) <> '{thread_name("")}' ORDER BY name""",
    opens=THREAD_ENCRYPTED,
    tolerant=True,
)
_PLACES = Sql(
    """SELECT DISTINCT s.path, i.key FROM memory_item i
    JOIN memory_space s ON s.tenant = i.tenant AND s.space = i.space
    WHERE i.tenant = :tenant AND (i.at > :at OR i.ended_at > :at) ORDER BY s.path, i.key"""
)
_LABELLED = Sql("SELECT 1 FROM label WHERE tenant = :tenant AND thread = :thread LIMIT 1")
_Items = dict[Place, tuple[Any, Any, NewVersion]]  # the contents of items now and then, and the versions that they get
_Threads = dict[str, tuple[ThreadRow | None, ThreadRow | None, int | None]]  # a thread now, then, and its head then


def restore_at(snapshots: SnapshotStore, instant: Instant, scope: RestoreScope, *, dry_run: bool) -> SnapshotRestore:
    """Plan what goes back to an instant, and do it unless it is a `dry_run`. Return the changes."""
    if scope.runs is not None:
        raise UsageError('restore(at=…, runs="rewind"): runs go back to a snapshot, not to an instant; leave runs= out')
    ctx, stores = snapshots._context, (snapshots._whole, instant)
    tenant = drive(ctx.driver, ctx.tenant()) or 0
    drive(ctx.driver, read(partial(scope.check, tenant)))
    threads = _threads(ctx.driver, instant, tenant, scope)
    for name, (_, then, _) in threads.items():
        if then is not None and scope.keys != "new":
            _refuse_effects(ctx.driver, instant, tenant, name, then)
    items = _items(ctx.driver, instant, tenant, ctx.clock_us(), scope)
    plan = [
        RestoreChange("thread", _action(now, then if head else None), name, (), stores)
        for name, (now, then, head) in threads.items()
    ]
    plan += [
        RestoreChange("item", _action(now, then), unescaped(key), labels_of(path), stores)
        for (path, key), (now, then, _) in items.items()
    ]
    shown = f"{instant.when:%Y-%m-%d %H:%M:%S.%f%z}"
    row = SnapshotRow(shown, 0, f"at {instant._at}", instant._at, 0, None, "{}", None)  # tells its undo from others
    if dry_run or not plan:
        return SnapshotRestore(shown, tuple(plan), None)
    undo = drive(ctx.driver, begin_undo(snapshots, Snapshot(snapshots._whole, row), scope, tenant, plan))
    assert undo is not None
    for name, (now, then, head) in threads.items():
        _thread_back(snapshots, instant, tenant, name, now, then, head)
    for path in dict.fromkeys(path for path, _ in items):
        versions = [version for (at, _), (_, _, version) in items.items() if at == path]
        drive(ctx.driver, write_versions(ctx, path, versions, ctx.clock_us()))
    drive(ctx.driver, write(partial(finish_undo, undo._row, f"before {shown} was restored")))
    return SnapshotRestore(shown, tuple(plan), undo)


def _action(now: object, then: object) -> Any:
    return ACTIONS["added" if then is None else "removed" if now is None else "changed"]


# --- threads


def _threads(driver: Driver, instant: Instant, tenant: int, scope: RestoreScope) -> _Threads:
    """Return the threads that go back."""
    since = instant._at - instant._at % 1000  # ids have milliseconds
    now = _rows(driver, tenant, since)
    then = now
    if instant.snapshot is not None:
        then = {
            name: row
            for name, row in _rows(instant._context.driver, tenant, 0).items()
            if row.created_at <= instant._at
        }
        now |= {name: row for name, row in _rows(driver, tenant, 0).items() if name in then}
    back: _Threads = {}
    if scope.has(diff.SnapshotChange("thread", "changed", "")) or scope.threads:
        drive(instant._context.driver, instant.complete("thread"))
    for name in sorted(now | then):
        new, old = now.get(name), then.get(name)
        old = None if old is None or old.created_at > instant._at else old
        if not scope.has(diff.SnapshotChange("thread", "changed", name)):
            continue
        head = None
        if old is not None:
            head = drive(instant._context.driver, read(partial(head_at, tenant, old, instant._at)))
        is_same = new is not None and old is not None and (new.thread, new.head) == (old.thread, head)
        if not is_same and (new or head):
            back[name] = new, old, head
    return back


def _rows(driver: Driver, tenant: int, since: int) -> dict[str, ThreadRow]:
    return {row.name: row for row in map(thread_row, drive(driver, fetch(_THREADS, tenant=tenant, since=since)))}


def _refuse_effects(driver: Driver, instant: Instant, tenant: int, name: str, then: ThreadRow) -> None:
    """Raise UsageError if nodes of a graph had effects since: its thread would have them again."""
    for task in drive(driver, read(partial(read_tasks, tenant, then.thread))):
        if any(kind == INTENT for kind, _ in later_entries(task, instant._at)):
            raise UsageError(
                f"tasks of the graph of thread {name!r} had effects since {instant.when}: set back, it would have them "
                'again. Nothing was restored; keys="new" lets them run again under new idempotency keys'
            )


def _thread_back(
    snapshots: SnapshotStore,
    instant: Instant,
    tenant: int,
    name: str,
    now: ThreadRow | None,
    then: ThreadRow | None,
    head: int | None,
) -> None:
    ctx = snapshots._context
    is_there = now is not None and then is not None and head is not None and now.thread == then.thread
    if now is not None and not is_there:
        drive(ctx.driver, gc.delete(tenant, name, now.thread, force=True))
        ctx.cache.forget(tenant, now.tree)
    if head is None:
        return
    if not is_there:
        instant.give_thread(name, ctx)
        return
    assert now is not None
    note = f"restored as of {instant.when:%Y-%m-%d %H:%M:%S%z}"
    cursor = Cursor(name)
    cursor.resolve(now.thread, now.tree)
    if drive(ctx.driver, fetch(_LABELLED, tenant=tenant, thread=now.thread)):
        drive(ctx.driver, rollback(ctx, cursor, head, note))
        return
    _, old = drive(instant._context.driver, read(partial(read_thread_state, tenant, name, None, head)))
    row, current = drive(ctx.driver, read(partial(read_thread_state, tenant, name, now.thread, None)))
    assert old is not None
    assert current is not None
    ctx.cache.put((tenant, row.tree, row.head or 0), base_of(current, row))
    drive(ctx.driver, save(Save(ctx, cursor, note, expect=row.head, text=old.data, kind="restore")))


# --- memory


def _items(driver: Driver, instant: Instant, tenant: int, now: int, scope: RestoreScope) -> _Items:
    """Return the items that go back."""
    if scope.namespaces or scope.has(diff.SnapshotChange("item", "changed", "")):
        drive(instant._context.driver, instant.complete("memory_item"))
    places = [
        (path, key)
        for path, key in drive(driver, fetch(_PLACES, tenant=tenant, at=instant._at))
        if scope.has(diff.SnapshotChange("item", "changed", unescaped(key), labels_of(path)))
    ]
    items: _Items = {}
    for place in places:
        new, _ = drive(driver, read(partial(item_at, tenant, now, place)))
        old, version = drive(instant._context.driver, read(partial(item_at, tenant, now, place, then=instant._at)))
        if new != old:
            items[place] = new, old, version
    return items
