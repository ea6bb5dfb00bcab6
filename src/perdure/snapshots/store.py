"""The store as far as snapshots go: `store.snapshot(…)` and `store.snapshots()`."""

from __future__ import annotations

import os
from datetime import datetime
from functools import partial
from typing import Any

from perdure.errors import Busy, NotFound, UsageError
from perdure.memory.models import microseconds
from perdure.memory.store import MemoryStore
from perdure.snapshots import rows
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.rows import SnapshotRow
from perdure.storage.domains import owned_tables
from perdure.storage.program import ConstraintFailed, Flow, read, sleep, write
from perdure.storage.twins import awaited, blocking
from perdure.storage.versions import install, installed
from perdure.threads.checks import check_name, check_note

_PATIENCE_S = 10.0  # for writers on PostgreSQL that have changed something and do not commit


class SnapshotStore(MemoryStore):
    """One database, as one tenant sees it: its threads, runs and memory, now and at its snapshots."""

    @blocking
    def snapshot(self, name: str, *, note: str | None = None, keep_until: datetime | None = None) -> Flow[Snapshot]:
        """Freeze the whole store, all tenants, at this instant. It takes milliseconds, however much is stored: from
        here on the first change of a row keeps the old one, until the snapshot is released or `keep_until` is past."""
        ctx = self._context
        check_name(name, "snapshot")
        check_note(note)
        until = microseconds(keep_until, "keep_until")
        if not (yield from read(installed)):
            yield from write(partial(install, list(owned_tables()), ctx.driver.dialect), solo=True)
        row = yield from self._take(name, note, until)
        return Snapshot(self, row)

    asnapshot = awaited(snapshot)

    @blocking
    def snapshots(self) -> Flow[list[Snapshot]]:
        """The snapshots that are kept, the newest first."""
        return [Snapshot(self, row) for row in (yield from read(rows.read_all))]

    asnapshots = awaited(snapshots)

    @blocking
    def get_snapshot(self, name: str) -> Flow[Snapshot]:
        """A snapshot by its name. Raises NotFound."""
        for row in (yield from read(rows.read_all)):
            if row.name == name:
                return Snapshot(self, row)
        raise NotFound(f"there is no snapshot {name!r}; `perdure snapshot list` names those that are kept")

    aget_snapshot = awaited(get_snapshot)

    def _open(self, url: str | os.PathLike[str], **options: Any) -> SnapshotStore:
        """Another store: a sandbox, a transfer's target."""
        raise NotImplementedError

    def _take(self, name: str, note: str | None, keep_until: int | None) -> Flow[SnapshotRow]:
        ctx = self._context
        taking = partial(rows.take, name, ctx.entropy(16).hex(), note, keep_until, ctx.clock_us())
        give_up = ctx.ticks() + _PATIENCE_S
        while True:
            try:
                return (yield from write(taking, solo=True))
            except ConstraintFailed:
                raise UsageError(f"there is a snapshot {name!r} already; choose another name, or release it") from None
            except Busy:
                if ctx.ticks() > give_up:
                    raise
                yield from sleep(0.02)
