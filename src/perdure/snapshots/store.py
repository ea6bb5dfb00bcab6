"""The store as far as snapshots go: `store.snapshot(…)` and `store.snapshots()`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from perdure.errors import Busy, NotFound, OpenError, UsageError
from perdure.memory.models import microseconds
from perdure.memory.store import MemoryStore
from perdure.snapshots import rows
from perdure.snapshots.handle import Snapshot
from perdure.storage.domains import owned_tables
from perdure.storage.program import ConstraintFailed, Flow, Program, Progress, read, sleep, write
from perdure.storage.twins import awaited, blocking
from perdure.storage.versions import analyse, install, installed
from perdure.threads.checks import check_name, check_note
from perdure.threads.models import Problem, Report

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.restore import SnapshotRestore

T = TypeVar("T")
_PATIENCE_S = 10.0  # for transactions on PostgreSQL that have changed something and do not end
_PAUSE_S = 0.1  # between attempts: in it the others get their turn


class SnapshotStore(MemoryStore):
    """One database, as one tenant sees it: its threads, runs and memory, now and at its snapshots."""

    @blocking
    def snapshot(
        self, name: str | None = None, *, note: str | None = None, keep_until: datetime | None = None
    ) -> Flow[Snapshot]:
        """Freeze the whole store, all tenants, at this instant. It takes milliseconds, however much is stored: from
        here on the first change of a row keeps the old one, until the snapshot is released or `keep_until` is past.
        Without a name it is snapshot-1, snapshot-2, …"""
        if name is not None and not check_name(name, "snapshot").isprintable():
            raise UsageError(f"a snapshot's name has no control characters: {name!r}")
        until = microseconds(keep_until, "keep_until")
        if until is not None and until <= self._context.clock_us():
            raise UsageError(f"keep_until={keep_until!r} is past: the snapshot would be released at once")
        return self._snapshot(name or "snapshot", check_note(note), until, numbered=name is None)

    asnapshot = awaited(snapshot)

    def _snapshot(
        self, name: str, note: str | None, until: int | None, *, numbered: bool, restores: str | None = None
    ) -> Flow[Snapshot]:
        ctx, tables = self._context, list(owned_tables().values())
        token = ctx.entropy(16).hex()
        taking = partial(rows.take, name, token, note, until, ctx.clock_us, numbered=numbered, restores=restores)
        try:
            if not (yield from read(installed)):
                yield from self._patiently(partial(install, tables, ctx.driver.dialect))
                yield from write(partial(analyse, list(owned_tables())), solo=True)
            return Snapshot(self, (yield from self._patiently(taking)))
        except ConstraintFailed:
            raise UsageError(f"there is a snapshot {name!r} already; choose another name, or release it") from None
        except OpenError as error:
            raise OpenError(
                "a snapshot is of all tenants: take it with an operator role, and the first one as the store's owner "
                f"({error.__cause__ or error})"
            ) from error

    def _patiently(self, work: Callable[[], Program[T]]) -> Flow[T]:
        """A transaction that waits for others, in short attempts."""
        give_up = self._context.ticks() + _PATIENCE_S
        while True:
            try:
                return (yield from write(work, solo=True))
            except Busy:
                if self._context.ticks() > give_up:
                    for process, application, state, seconds in (yield from read(rows.blocker)):
                        raise Busy(
                            f"no snapshot was taken: a transaction that uses this store has been open for {seconds} s "
                            f"(process {process}, {application!r}, {state}); end it, or try again later"
                        ) from None
                    raise
            yield from sleep(_PAUSE_S)

    @blocking
    def snapshots(self) -> Flow[list[Snapshot]]:
        """The snapshots that are kept, the newest first."""
        return self._snapshots()

    asnapshots = awaited(snapshots)

    def _snapshots(self) -> Flow[list[Snapshot]]:
        return [Snapshot(self, row) for row in (yield from read(rows.read_all))]

    @blocking
    def get_snapshot(self, name: str) -> Flow[Snapshot]:
        """A snapshot by its name. Raises NotFound."""
        return self._get_snapshot(name)

    aget_snapshot = awaited(get_snapshot)

    def _get_snapshot(self, name: str) -> Flow[Snapshot]:
        for row in (yield from read(rows.read_all)):
            if row.name == name:
                return Snapshot(self, row)
        raise NotFound(f"there is no snapshot {name!r}; `perdure snapshots` names those that are kept")

    @blocking
    def restore(
        self,
        snapshot: Snapshot | str,
        *,
        threads: Sequence[str] | None = None,
        namespaces: Sequence[Sequence[str]] | None = None,
        runs: Literal["rewind"] | None = None,
        keys: Literal["same", "new"] | None = None,
        dry_run: bool = False,
    ) -> Flow[SnapshotRestore]:
        """Go back to a snapshot, in this tenant: all threads, memory and deployments, or the `threads` whose names
        match a pattern ("support-*") and the `namespaces` with all below them. A snapshot of how it was before is taken
        first, `undo` of the result: restoring that one undoes it. After a crash, the same call finishes it.

        A thread gets its state of then as a new head, and an item of memory as a new version: history stays. A thread
        of an adapter is exactly what it was, with its pending writes. What was made since is deleted, what was deleted
        comes back. Runs are left alone; with `runs="rewind"` those that changed since go back too: they are queued, and
        the process that has one is fenced. If effects ran since, or may have, that is refused: `keys="same"` lets them
        run again under the same idempotency keys, `keys="new"` under new ones. So are threads of an adapter,
        whose tasks get new keys: `keys="new"`.
        `dry_run` says what it would do.
        """
        from perdure.snapshots.restore import RestoreScope, restore

        wanted = RestoreScope(threads, namespaces, runs, keys)
        snap = snapshot if isinstance(snapshot, Snapshot) else (yield from self._get_snapshot(snapshot))
        theirs, ours = snap._context, self._context
        if theirs.driver is not ours.driver:
            raise UsageError("this snapshot belongs to another store: restore it there")
        return (yield from restore(self, Snapshot(self, snap._row), wanted, dry_run=dry_run))

    arestore = awaited(restore)

    def _verify(self, progress: Progress | None) -> Flow[Report]:
        report = yield from super()._verify(progress)
        return replace(report, problems=(*report.problems, *(yield from self._version_problems())))

    def _version_problems(self) -> Flow[list[Problem]]:
        """Return what is wrong with the snapshots, and with what they see of this tenant."""
        tenant = (yield from self._context.tenant()) or 0
        found = yield from read(partial(rows.problems, tenant, list(owned_tables().values())))
        return [Problem("(snapshots)", None, what) for what in found]

    def _open(self, url: str | os.PathLike[str], **options: Any) -> Store:
        """Another store: a sandbox, a transfer's target."""
        raise NotImplementedError
