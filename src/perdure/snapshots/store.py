"""The part of a store (`ops/store.py`) that takes, lists and restores snapshots."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from perdure.errors import Busy, OpenError, UsageError
from perdure.memory.models import microseconds
from perdure.runs.calls.evidence import git_commit
from perdure.snapshots import rows
from perdure.snapshots.handle import Snapshot, find_snapshot, list_snapshots, own_snapshot
from perdure.storage.domains import versioned_tables
from perdure.storage.migrate import newest
from perdure.storage.program import ConstraintFailed, Dialect, Flow, Program, fetch, read, sleep, write
from perdure.storage.twins import awaited, blocking
from perdure.storage.versions import analyse, install, installed
from perdure.threads.actions import noted
from perdure.threads.checks import check_name, check_note
from perdure.threads.context import Handle

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.instants import Instant, Time
    from perdure.snapshots.points import RestorePoint
    from perdure.snapshots.restore import SnapshotRestore

T = TypeVar("T")
_PATIENCE_S = 10.0  # for transactions on PostgreSQL that have changed something and do not end
_PAUSE_S = 0.1  # between attempts: in it the others get their turn


def _made_by(dialect: Dialect) -> dict[str, Any]:
    """Return the versions of the library, the schema, Python and the code in the current folder."""
    made_by = {
        "perdure": str(sys.modules["perdure"].__version__),
        "schema": newest(dialect),
        "python": platform.python_version(),
    }
    commit = git_commit(Path.cwd())
    return made_by if commit is None else {**made_by, "commit": commit}


class SnapshotStore(Handle):
    """The snapshots of a store. A snapshot reads through a whole store."""

    def __init__(self, whole: Store) -> None:
        self._whole, self._context = whole, whole._context

    @blocking
    def snapshot(
        self,
        name: str | None = None,
        *,
        note: str | None = None,
        keep_until: datetime | None = None,
        who: str | None = None,
    ) -> Flow[Snapshot]:
        """Freeze the whole store, all tenants, at this instant. It takes milliseconds, however much is stored.

        From here on the first change of a row keeps the old one, until the snapshot is released or `keep_until` is
        past. Without a name it is snapshot-1, snapshot-2, … `who` is recorded in `ops.actions()`.
        """
        return self.taking(name, note, keep_until, who)

    asnapshot = awaited(snapshot)

    def taking(
        self, name: str | None, note: str | None, keep_until: datetime | None, who: str | None
    ) -> Flow[Snapshot]:
        """Return the flow of `snapshot`, for other flows. Raises UsageError for a wrong name or time."""
        if name is not None and not check_name(name, "snapshot").isprintable():
            raise UsageError(f"a snapshot's name has no control characters: {name!r}")
        until = microseconds(keep_until, "keep_until")
        if until is not None and until <= self._context.clock_us():
            raise UsageError(f"keep_until={keep_until!r} is past: the snapshot would be released at once")
        return self._snapshot(name or "snapshot", check_note(note), until, numbered=name is None, who=who)

    def _snapshot(
        self,
        name: str,
        note: str | None,
        until: int | None,
        *,
        numbered: bool,
        restores: str | None = None,
        who: str | None = None,
    ) -> Flow[Snapshot]:
        ctx, tables = self._context, list(versioned_tables().values())
        token = ctx.entropy(16).hex()
        made_by = _made_by(ctx.driver.dialect)
        taking = partial(rows.take, name, token, note, until, ctx.clock_us, numbered=numbered, restores=restores)
        taking = partial(taking, made_by=made_by)
        try:
            if not (yield from read(installed)):
                yield from self._patiently(partial(install, tables, ctx.driver.dialect))
                yield from write(partial(analyse, list(versioned_tables())), solo=True)
            subject = "snapshot" if numbered else f"snapshot {name}"
            row = yield from noted(ctx, who, "take", subject, self._patiently(taking))
            return Snapshot(self._whole, row)
        except ConstraintFailed:
            raise UsageError(f"there is a snapshot {name!r} already; choose another name, or release it") from None
        except OpenError as error:
            raise OpenError(
                "a snapshot is of all tenants: take it with an operator role, and the first one as the store's owner "
                f"({error.__cause__ or error})"
            ) from error

    def _patiently(self, work: Callable[[], Program[T]]) -> Flow[T]:
        """Run a transaction in short attempts, so that others get their turn."""
        give_up = self._context.ticks() + _PATIENCE_S
        while True:
            try:
                return (yield from write(work, solo=True))
            except Busy:
                if self._context.ticks() > give_up:
                    for process, application, state, seconds in (yield from fetch(rows.BLOCKER)):
                        raise Busy(
                            f"no snapshot was taken: a transaction that uses this store has been open for {seconds} s "
                            f"(process {process}, {application!r}, {state}); end it, or try again later"
                        ) from None
                    raise
            yield from sleep(_PAUSE_S)

    @blocking
    def snapshots(self) -> Flow[list[Snapshot]]:
        """List the snapshots that are kept, the newest first."""
        return list_snapshots(self._whole)

    asnapshots = awaited(snapshots)

    @blocking
    def get_snapshot(self, name: str) -> Flow[Snapshot]:
        """Return a snapshot by its name. Raises NotFound."""
        return find_snapshot(self._whole, name)

    aget_snapshot = awaited(get_snapshot)

    @blocking
    def at(self, time: Time) -> Flow[Instant]:
        """Return what this tenant's threads, runs, questions and memory were at an instant, read-only.

        `time` is a datetime, an ISO text ("2026-11-17T10:04", local time), or how long ago it was ("2h ago", a
        timedelta). An instant needs no snapshot, but what was removed since cannot be shown: a read that could miss
        something raises HistoryGone, which says from when on the store is complete. If a later snapshot is kept, it is
        read from that.
        """
        from perdure.snapshots.instants import open_instant

        return open_instant(self._whole, time)

    aat = awaited(at)

    @blocking
    def restore(
        self,
        snapshot: Snapshot | str | None = None,
        *,
        at: Time | None = None,
        threads: Sequence[str] | None = None,
        namespaces: Sequence[Sequence[str]] | None = None,
        runs: Literal["rewind"] | None = None,
        keys: Literal["same", "new"] | None = None,
        dry_run: bool = False,
        who: str | None = None,
    ) -> Flow[SnapshotRestore]:
        """Go back to a snapshot, in this tenant: all threads, memory, deployments and schedules, or some of them.

        `threads` are patterns of names ("support-*"); `namespaces` include those below them. A snapshot is taken first:
        to undo the restore, restore `undo` of its result. After a crash, the same call finishes it. With `dry_run`
        nothing changes, and the result shows what would.

        A thread gets its old state as a new head, and an item of memory its old value as a new version: history stays.
        A thread of an adapter becomes exactly what it was, with its pending writes. Threads and items that were created
        since are deleted; those that were deleted come back.

        Runs stay as they are. With `runs="rewind"`, runs that changed since go back too: they are queued, and a process
        that executes one is fenced. This is refused if effects ran since, or may have run. `keys="same"` lets them run
        again with the same idempotency keys, `keys="new"` with new ones. A thread of an adapter whose tasks had effects
        since is refused too, unless `keys="new"`. `who` is recorded in `ops.actions()`.

        `at`, instead of a snapshot, is an instant as `store.at` takes it. Threads, memory and, with `runs="rewind"`,
        runs go back to it; deployments and schedules stay. The newest checkpoint of an adapter's thread has no pending
        writes then. HistoryGone says what is not on record; nothing was restored.
        """
        from perdure.snapshots.restore import RestoreScope, restore
        from perdure.snapshots.rewind import refuse_tied_runs

        scope = RestoreScope(threads, namespaces, runs, keys)
        if (snapshot is None) is (at is None):
            raise UsageError("restore(): a snapshot, or at= an instant")
        if runs is not None:
            yield from refuse_tied_runs(self._context)
        point = yield from self._point(snapshot, at)
        about = {"threads": threads, "namespaces": namespaces, "runs": runs, "keys": keys}
        shown = f"snapshot {point.name}" if at is None else f"instant {at}"
        by = None if dry_run else who
        restoring = restore(self, point, scope, dry_run=dry_run)
        return (yield from noted(self._context, by, "restore", shown, restoring, **about))

    arestore = awaited(restore)

    def _point(self, snapshot: Snapshot | str | None, at: Time | None) -> Flow[RestorePoint]:
        from perdure.snapshots.instants import open_instant
        from perdure.snapshots.points import RestorePoint

        if at is not None:
            return RestorePoint.of_instant((yield from open_instant(self._whole, at)))
        assert snapshot is not None
        snap = yield from own_snapshot(self._whole, snapshot)
        return RestorePoint.of_snapshot(snap._row, snap.store)
