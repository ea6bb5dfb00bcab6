"""`store.at(time)`: threads, runs, questions and memory as of an instant that no snapshot was taken at.

An instant is read from the next snapshot that was taken after it, or else from the store as it is. Memory knows its
versions. A thread or a run is copied into a store in memory at its first use, and what came later is cut off
(`cutting.py`). What was deleted since cannot be shown: a read that could miss something raises HistoryGone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Self

from perdure.errors import HistoryGone, NotFound, UsageError
from perdure.log.removals import known_from
from perdure.log.thread_table import THREAD_COLUMNS, THREAD_ENCRYPTED, find_thread, thread_row, try_thread
from perdure.memory.handle import Memory
from perdure.runs.calls.state import thread_name
from perdure.runs.engine.models import Question
from perdure.runs.handle import Run
from perdure.runs.journal.rows import TASK
from perdure.runs.journal.thread_runs import drop_of_thread
from perdure.runs.run_table import RunInfo
from perdure.snapshots.cutting import check_complete, cut_family, cut_thread, head_at
from perdure.snapshots.handle import Snapshot, list_snapshots
from perdure.storage.program import Flow, Program, Sql, aside, drive, fetch, read, write, write_repair
from perdure.storage.twins import awaited, blocking
from perdure.threads.checks import check_limit, microseconds
from perdure.threads.context import Handle
from perdure.threads.models import ThreadInfo, moment
from perdure.threads.thread import Thread
from perdure.transfers.run_rows import add_runs
from perdure.transfers.runs import copy_states, family_head, read_family
from perdure.transfers.transfer import transfer_some
from perdure.values.durations import parse_duration

if TYPE_CHECKING:
    from perdure.ops.store import Store

Time = datetime | timedelta | str
_THREADS = Sql(
    f"""SELECT {", ".join(THREAD_COLUMNS)} FROM thread WHERE tenant = :tenant AND created_at <= :at
        AND substr(name, 1, {len(thread_name(""))}) <> '{thread_name("")}' ORDER BY name LIMIT :limit""",
    opens=THREAD_ENCRYPTED,
    tolerant=True,
)
# The runs with questions that were asked by then, and are open or were answered since.
_ASKING = Sql(
    f"""SELECT DISTINCT r.id FROM ask a JOIN run r ON r.tenant = a.tenant AND r.run = a.run
    WHERE a.tenant = :tenant AND a.asked_at <= :at AND r.function NOT LIKE '{TASK}%' AND (a.status = 'open'
        OR r.changed_at > :at OR EXISTS (SELECT 1 FROM answer w
            WHERE w.tenant = a.tenant AND w.run = a.run AND w.path = a.path AND w.at > :at))
    ORDER BY r.id"""
)


def instant_us(when: Time, now: int) -> int:
    """Return an instant in microseconds. A text is an ISO time, or how long ago it was: "2h", "2h ago"."""
    if isinstance(when, str):
        ago = parse_duration(when.strip().removesuffix("ago"))
        try:
            when = datetime.fromisoformat(when.strip()) if ago is None else ago
        except ValueError:
            raise UsageError(f'at({when!r}): a time such as "2026-11-17T10:04", "2h ago" or a datetime') from None
    at = now - when // timedelta(microseconds=1) if isinstance(when, timedelta) else microseconds(when, "at")
    if at > now:
        raise UsageError(f"at({moment(at):%Y-%m-%d %H:%M:%S%z}): that is still to come")
    return at


def open_instant(live: Store, when: Time) -> Flow[Instant]:
    """Return an instant of a store, read from the next snapshot after it."""
    at = instant_us(when, live._context.clock_us())
    later = [snapshot for snapshot in (yield from list_snapshots(live)) if snapshot._row.taken_at >= at]
    return Instant(live, at, later[-1] if later else None)


class Instant(Handle):
    """What a store held at an instant, to the millisecond. Read-only. Close it, or use it as a context manager."""

    def __init__(self, live: Store, at: int, snapshot: Snapshot | None) -> None:
        self._live, self._at, self.snapshot = live, at, snapshot
        self._source = live if snapshot is None else snapshot.store
        self._context = self._source._context
        self._copy: Store | None = None  # in memory, with what was asked for so far
        self._view: Store | None = None  # a snapshot of the copy, until more is copied
        self._known: set[str] = set()  # the threads that were copied
        self._copying = threading.RLock()

    def __repr__(self) -> str:
        return f"<Instant {self.when:%Y-%m-%d %H:%M:%S.%f}>"

    @property
    def when(self) -> datetime:
        return moment(self._at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the copies. Handles that came from this instant cannot read any more."""
        with self._copying:
            if self._copy is not None:
                self._copy.close()
            self._copy, self._view, self._known = None, None, set()

    @blocking
    def known_from(self) -> Flow[dict[str, datetime | None]]:
        """Return from when on threads, runs and items are complete: since then none was removed. None: always."""
        tenant = (yield from self._context.tenant()) or 0
        known = yield from read(partial(known_from, tenant))
        names = {"thread": "threads", "run": "runs", "memory_item": "memory"}
        return {name: moment(known[table]) if known[table] else None for table, name in names.items()}

    aknown_from = awaited(known_from)

    @blocking
    def threads(self, *, limit: int | None = 100) -> Flow[list[ThreadInfo]]:
        """List the threads that there were, by name. Their metadata is that of today, which has no history."""
        return self._threads(check_limit(limit))

    athreads = awaited(threads)

    def _threads(self, limit: int | None) -> Flow[list[ThreadInfo]]:
        yield from self.complete("thread")
        tenant = (yield from self._context.tenant()) or 0
        rows = yield from fetch(_THREADS, tenant=tenant, at=self._at, limit=2**62 if limit is None else limit)
        infos = []
        for row in map(thread_row, rows):
            head = yield from read(partial(head_at, tenant, row, self._at))
            infos.append(ThreadInfo.of(row._replace(head=head, updated_at=min(row.updated_at, self._at))))
        return infos

    @blocking
    def thread(self, name: str) -> Flow[Thread]:
        """Return a thread as it was. It is empty if there was none. Raises HistoryGone."""
        tenant = (yield from self._context.tenant()) or 0
        row = yield from read(partial(try_thread, tenant, name))
        if row is None or row.created_at > self._at:
            yield from self.complete("thread")
        elif name not in self._known:
            yield from aside(partial(self._bring_thread, name))
        return self._read_only().thread(name)

    athread = awaited(thread)

    @blocking
    def runs(self, *, limit: int | None = 100) -> Flow[list[RunInfo]]:
        """List the runs that there were, the newest first. Raises HistoryGone."""
        yield from self.complete("run")
        return (yield from aside(partial(self._runs, check_limit(limit))))

    aruns = awaited(runs)

    def _runs(self, limit: int | None) -> list[RunInfo]:
        """List runs. One whose status has changed since is copied: its status is derived from its journal."""
        infos = self._source.runs(until=self.when + timedelta(microseconds=1), limit=limit)
        return [one if one.changed_at <= self.when else self._bring_run(one.id).refresh() for one in infos]

    @blocking
    def get_run(self, id: str) -> Flow[Run]:
        """Return a run as it was, with the steps that were recorded by then. Raises NotFound and HistoryGone.

        The status of a run that has continued since is derived: "waiting" if a question was open, else "queued"."""
        try:
            run = yield from aside(partial(self._bring_run, id))
        except HistoryGone:
            raise
        except NotFound:
            yield from self.complete("run")
            raise
        return run

    aget_run = awaited(get_run)

    @blocking
    def questions(self) -> Flow[list[Question]]:
        """List the questions of runs that were open, the oldest first."""
        yield from self.complete("run")
        tenant = (yield from self._context.tenant()) or 0
        asking = yield from fetch(_ASKING, tenant=tenant, at=self._at)
        for (run,) in asking:
            with suppress(NotFound):  # it was deleted meanwhile
                yield from aside(partial(self._bring_run, run))
        return (yield from aside(lambda: self._read_only().questions()))

    aquestions = awaited(questions)

    def memory(self, *labels: str, raw: bool = False) -> Memory:
        """Return the memory of a namespace as it was known then. Raises HistoryGone."""
        drive(self._context.driver, self.complete("memory_item"))
        return self._source.memory(*labels, raw=raw).as_of(self.when)

    def complete(self, table: str) -> Flow[None]:
        """Raise HistoryGone unless every row of a table that was there then is there still."""
        tenant = (yield from self._context.tenant()) or 0
        here = "the store" if self.snapshot is None else f"snapshot {self.snapshot.name!r}"
        yield from read(partial(check_complete, tenant, table, self._at, here))

    # --- the copies

    def _store(self) -> Store:
        if self._copy is None:
            self._copy = self._live._open(":memory:", tenant=self._context.tenant_name)
            self._copy._context.codec = self._context.codec
            self._copy._context.objects, self._copy._context.values_of = self._context.objects, self._live._context
            self._copy._context.clock_us = lambda: self._at
        return self._copy

    def _read_only(self) -> Store:
        """Return the copies as a store that takes no writes: a snapshot of them."""
        with self._copying:
            if self._view is None:
                self._view = self._store().snapshot().store
            return self._view

    def _bring_thread(self, name: str) -> None:
        with self._copying:
            copy, self._view = self._store(), None
            if name not in self._known:
                transfer_some(self._context, copy._context, [name], (), "", None, move=False)
                self._cut(copy, [name])

    def _cut(self, copy: Store, names: Sequence[str]) -> None:
        tenant = drive(copy._context.driver, copy._context.ensure_tenant())
        for name in names:
            row = drive(copy._context.driver, read(partial(find_thread, tenant, name)))
            copy._run(write(partial(cut_thread, tenant, row, self._at)))
            copy._run(drop_of_thread(tenant, row.thread))  # tasks of graphs continue with the store's thread
            self._known.add(name)

    def _bring_run(self, id: str) -> Run:
        with self._copying:
            copy, source = self._store(), self._context
            with suppress(NotFound):
                copy.get_run(id)
                return self._read_only().get_run(id)
            self._view = None
            head = family_head(source, id)
            tenant = drive(source.driver, source.tenant()) or 0
            family = drive(source.driver, read(partial(read_family, tenant, head.run, None)))
            parts = cut_family(family, self._at)
            ids = [part.row.id for part in parts]
            if id not in ids:
                raise NotFound(f"there was no run {id!r} at {self.when:%Y-%m-%d %H:%M:%S%z}")

            def add() -> Program[None]:
                to = copy._context.known_tenant or 0
                yield from add_runs(to, parts, {part.row.run: {} for part in parts}, lambda _: None)
                yield from copy_states(source, to, ids, lambda _: None)

            copy._run(copy._context.ensure_tenant())
            copy._run(write_repair(add))
            states = [thread_name(each) for each in ids]
            to = copy._context.known_tenant or 0
            self._cut(copy, [name for name in states if copy._run(read(partial(try_thread, to, name))) is not None])
            return self._read_only().get_run(id)
