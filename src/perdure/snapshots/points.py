"""What a restore goes back to: a snapshot, or an instant, which is a snapshot or the store without what came later.

A point says what may differ from the store, and what threads and runs were. `restore.py` does the same with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from perdure.log.removals import known_from
from perdure.log.thread_table import thread_or_stub
from perdure.memory.labels import labels_of, unescaped
from perdure.runs.calls.state import thread_name
from perdure.runs.journal.entries import INTENT
from perdure.snapshots import diff
from perdure.snapshots.cutting import (
    BESIDE,
    RunThen,
    check_complete,
    first_after,
    later_entries,
    run_now,
    runs_then,
)
from perdure.snapshots.diff import SnapshotChange, ThreadAt
from perdure.snapshots.rows import SnapshotRow
from perdure.storage.program import Batch, Flow, Program, Sql, read
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.transfers.run_rows import read_tasks

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.instants import Instant

NOW = 2**62  # an epoch later than all: it sees the rows of the store, and none of the past
_TABLES: dict[diff.Subject, str] = {"thread": "thread", "item": "memory_item", "run": "run"}
_THREADS = Sql(
    f"""SELECT name FROM thread t WHERE tenant = :tenant AND (updated_at >= :since OR {BESIDE})
        AND substr(name, 1, {len(thread_name(""))}) <> '{thread_name("")}'"""
)
_PLACES = Sql(
    """SELECT DISTINCT s.path, i.key FROM memory_item i
    JOIN memory_space s ON s.tenant = i.tenant AND s.space = i.space
    WHERE i.tenant = :tenant AND (i.at > :at OR i.ended_at > :at)"""
)


class Differences(NamedTuple):
    """What may differ between a point and the store. Contents of threads and items are not compared yet."""

    changes: list[SnapshotChange]
    runs: dict[str, RunThen]  # of an instant: the runs that may differ


@dataclass(frozen=True)
class RestorePoint:
    """A snapshot; or an instant, which is read from the next snapshot after it, or else from the store as it is."""

    name: str  # as messages show it
    since: str  # … as the time after which something happened
    token: str  # tells a restore of it from others
    taken_at: int
    row: SnapshotRow | None  # the snapshot that is read; None: the store
    past: StoreContext  # reads it
    shown: Store | Instant  # as users read it
    at: int | None  # of an instant: what came later is left out

    @classmethod
    def of_snapshot(cls, row: SnapshotRow, store: Store) -> RestorePoint:
        since = f"the snapshot {row.name!r} was taken"
        return cls(row.name, since, row.token, row.taken_at, row, store._context, store, None)

    @classmethod
    def of_instant(cls, instant: Instant) -> RestorePoint:
        at, row = instant._at, None if instant.snapshot is None else instant.snapshot._row
        name = f"{moment(at):%Y-%m-%d %H:%M:%S.%f%z}"
        return cls(name, name, f"at {at}", at, row, instant._context, instant, at)

    @property
    def epoch(self) -> int:
        return NOW if self.row is None else self.row.epoch

    def differences(self, ctx: StoreContext, tenant: int, subjects: set[diff.Subject]) -> Flow[Differences]:
        """Return what may differ from the store. Of an instant: threads, items and runs, if they are `subjects`.

        Raises HistoryGone if an instant is not on record."""
        changes: list[SnapshotChange] = []
        if self.row is not None:
            changes, _ = yield from read(partial(diff.changed_rows, tenant, self.row, None, ctx.clock_us()))
        if self.at is None:
            return Differences(changes, {})
        ids = [change.name for change in changes if change.what == "run"] if "run" in subjects else []
        later, then = yield from diff.read_at(self.past, partial(self._later, tenant, self.at, subjects, ids))
        now = yield from read(partial(_runs_now, tenant, sorted({*ids, *then})))
        for id, content in now.items():
            old = then[id].content if id in then else None
            if old != content:
                later.append(SnapshotChange("run", diff.kind_of(old, content), id))
        later += [change for change in changes if change.what in subjects and change.what != "run"]
        each = {(diff.ORDER.index(one.what), one.namespace, one.name): one for one in later}
        return Differences([each[place] for place in sorted(each)], then)

    def _later(
        self, tenant: int, at: int, subjects: set[diff.Subject], ids: list[str]
    ) -> Program[tuple[list[SnapshotChange], dict[str, RunThen]]]:
        here = "the store" if self.row is None else f"snapshot {self.row.name!r}"
        for subject in subjects:
            yield from check_complete(tenant, _TABLES[subject], at, here)
        later: list[SnapshotChange] = []
        then: dict[str, RunThen] = {}
        if "thread" in subjects:
            since = at - at % 1000  # ids have milliseconds
            [names] = yield Batch(_THREADS(tenant=tenant, since=since, at=at, cut=first_after(at)))
            later += [SnapshotChange("thread", "changed", name) for (name,) in names]
        if "item" in subjects:
            [places] = yield Batch(_PLACES(tenant=tenant, at=at))
            later += [SnapshotChange("item", "changed", unescaped(key), labels_of(path)) for path, key in places]
        if "run" in subjects:
            then = yield from runs_then(tenant, at, ids)
        return later, then

    def threads(
        self, ctx: StoreContext, tenant: int, names: Sequence[str]
    ) -> Flow[list[tuple[ThreadAt | None, ThreadAt | None]]]:
        """Return threads as they were, and as they are."""
        look = partial(diff.thread_at, tenant, by_head=self.at is not None)
        return diff.both_times(self.past, ctx, names, partial(look, at=self.at), partial(look, since=self.at))

    def threads_with_effects(self, ctx: StoreContext, tenant: int, names: Iterable[str]) -> Flow[set[str]]:
        """Return those of an instant's threads whose tasks that were made since had effects, or may have had."""
        if self.at is None:
            return set()
        known = (yield from diff.read_at(self.past, partial(known_from, tenant)))["run"]
        op = partial(_had_effects, tenant, list(names), self.at)
        before = yield from diff.read_at(self.past, partial(op, was_removed=known > self.at))
        return before | (yield from read(op))


def _runs_now(tenant: int, ids: list[str]) -> Program[dict[str, bytes | None]]:
    now = {}
    for id in ids:
        now[id] = yield from run_now(tenant, id)
    return now


def _had_effects(tenant: int, names: list[str], at: int, was_removed: bool = False) -> Program[set[str]]:
    """Return the threads whose later tasks had effects. If runs were removed since, they may have been of any graph."""
    had: set[str] = set()
    for name in names:
        row = yield from thread_or_stub(tenant, name)
        if row is not None and was_removed and (yield Batch(diff.LABELLED(tenant=tenant, thread=row.thread)))[0]:
            had.add(name)
        for task in [] if row is None else (yield from read_tasks(tenant, row.thread)):
            if task.row.created_at > at and any(kind == INTENT for kind, _ in later_entries(task, at)):
                had.add(name)
    return had
