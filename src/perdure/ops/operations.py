"""`store.ops`: what an operator does with a store: verify, measure, retention, compaction, erasure, copies, keys.

The methods block. From async code call them with `asyncio.to_thread`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from perdure.runs.handle import Run
from perdure.storage.program import Flow, Progress, read, write
from perdure.threads.checks import check_name
from perdure.threads.models import Checkpoint, Report, Stats
from perdure.threads.retention import Erased, Retention, Ttl, checkpoint_id, fields_from, retention_of
from perdure.threads.thread import Thread

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.log.retention_policy import Fields
    from perdure.ops.copies.copied import Backup, Exported, Imported, Restored
    from perdure.ops.doctor.checklist import Finding
    from perdure.ops.health import Health
    from perdure.ops.keys import KeyInfo, Rotated
    from perdure.ops.maintenance.compaction import Compacted
    from perdure.ops.store import Store

T = TypeVar("T")


class Operations:
    """The operator's side of one store, for one tenant."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._context = store._context

    def verify(self, *, progress: Progress | None = None) -> Report:
        """Check every record of this tenant, and the database file itself. `progress`: (done, of how many) trees."""
        return self._store._run(self._store._verify(progress))

    def stats(self) -> Stats:
        """How much is stored, and how much storing every state in full would take."""
        return self._store._run(self._store._stats())

    def doctor(self) -> list[Finding]:
        """The checklist of a deployment: for each line how it stands, and what to do. Changes nothing."""
        from perdure.ops.doctor.checklist import examine

        return self._run(examine(self._context))

    def health(self) -> Health:
        """How the store is doing, and what a crash of this process would cost now. Cheap: it may be asked often."""
        from perdure.ops.health import health

        return self._run(health(self._context))

    def set_retention(self, *, ttl: Ttl = None, keep_last: int | None = None) -> Retention:
        """How long threads stay that nobody writes to (`ttl`: seconds or a timedelta), and how many of their newest
        checkpoints (`keep_last`). None: for good. Kept in the store, for this tenant; a thread's own
        `set_retention` goes before it. `compact` acts on it, which workers do daily."""
        return self._run(self._set_retention(fields_from(ttl, keep_last)))

    def retention(self) -> Retention:
        """What holds for threads that have nothing of their own."""
        return self._run(self._retention())

    def compact(self, *, dry_run: bool = False, vacuum: bool = False, progress: Progress | None = None) -> Compacted:
        """Remove what retention says (threads that have expired, checkpoints beyond `keep_last`, journals of finished
        runs), compress and pack what stays. What a pin, a fork, a graph or an unfinished run needs stays.

        `dry_run` says what would go and writes nothing. `vacuum` gives the free space back to the file system: SQLite
        rewrites the file, and others wait meanwhile. `progress`: (done, of how many) threads.
        """
        from perdure.ops.maintenance.compaction import compact

        keep_us = self._store._keep_us
        return self._run(compact(self._context, keep_us, dry_run=dry_run, vacuum=vacuum, progress=progress))

    def erase(
        self, thread: Thread | str, *, forks: bool = False, full: bool = False, progress: Progress | None = None
    ) -> Erased:
        """Erase a thread for good: its states, notes, metadata and pending writes, from the store's own files too. Pins
        do not hold it. If it has forks, which hold its history, it raises and lists them; with `forks` they go too.

        SQLite rewrites its file and cuts off its log, and others wait meanwhile. PostgreSQL vacuums; `full` makes it
        rewrite the tables, which nobody can use meanwhile. `may_remain` of the answer names what may still hold it.
        """
        from perdure.ops.maintenance.erase import erase_thread

        name, number = self._store._named(thread)
        return self._run(erase_thread(self._context, name, number, forks=forks, full=full, progress=progress))

    def erase_run(self, run: str | Run, *, full: bool = False) -> Erased:
        """Erase a finished run for good, as `erase` does a thread: arguments, journal, result, questions, answers,
        messages, states. Raises UsageError if it is not finished, or a fork or an unfinished parent needs it."""
        from perdure.ops.maintenance.erase import erase_run

        return self._run(erase_run(self._context, _id(run), full=full))

    def sweep_runs(self) -> int:
        """Remove the journals of finished runs that were kept as long as `keep_runs_s` said; workers do it daily. The
        runs stay, with their results. What a fork or an unfinished parent needs stays as well. How many runs."""
        return self._store._run(self._store._sweep_runs())

    def export_run(self, run: str | Run, path: str | Path, *, keep: bool = False) -> Path:
        """Take a run that is parked, paused, stuck, queued or finished to a file, with all that belongs to it and the
        runs that it has started, and end it here: its status is "exported", and no process can go on with it.

        `import_run` takes it into another store. `keep=True`, for finished runs, leaves the source as it is. Called
        again after a kill in the middle, it finishes what it began.
        """
        from perdure.runs.moving import exporting

        steps = exporting.export(self._context, _id(run), path, keep)
        return exporting.drive_steps(self._context.driver, steps)

    def import_run(self, path: str | Path) -> Run:
        """Take in a run that was exported: with its id, its keys, its history. `result()` goes on with it here.

        Refuses an id that is taken, a file that was imported elsewhere, and one that is damaged or says what cannot be.
        """
        from perdure.runs.moving import exporting, importing

        steps = importing.importing(self._context, path)
        return self._store._handle(exporting.drive_steps(self._context.driver, steps), drives=True)

    def export_thread(
        self,
        thread: Thread | str,
        path: str | os.PathLike[str],
        *,
        branch: Checkpoint | str | None = None,
        progress: Progress | None = None,
    ) -> Exported:
        """Write a thread to one file: the checkpoints of all its branches, its metadata, LangGraph's ids and writes.

        With `branch`, only that checkpoint and those that led to it. `import_thread` takes the file into any store,
        with the same ids and hashes. The file is not encrypted, also if the store is. It gets its name only when it is
        whole and on the disk. `progress`: (done, of how many) checkpoints.
        """
        from perdure.ops.copies.exporting import export
        from perdure.runs.moving.exporting import drive_steps

        name, number = self._store._named(thread)
        steps = export(self._context, name, number, path, checkpoint_id(branch), progress)
        return drive_steps(self._context.driver, steps)

    def import_thread(
        self, path: str | os.PathLike[str], *, name: str | None = None, progress: Progress | None = None
    ) -> Imported:
        """Take in a thread that was exported, under its own name or another one. All of it, or nothing.

        Every hash is checked on the way. A name that is taken is refused; if that thread is the same, nothing is done,
        and the answer says so. `progress`: (done, of how many) bytes of the file.
        """
        from perdure.ops.copies.importing import import_file
        from perdure.runs.moving.exporting import drive_steps

        return drive_steps(self._context.driver, import_file(self._context, path, name, progress))

    def backup(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Backup:
        """Copy the whole store, all tenants, to a file while it is in use: as it is at one point of its commit order.

        Of an SQLite store the copy is a store itself; of one on PostgreSQL it is a file that `perdure.restore` reads.
        An earlier backup there is replaced once the new one is whole; anything else that is there is refused. What is
        encrypted stays so. `progress`: (done, of how many) bytes, about.
        """
        from perdure.ops.copies.backup import backup

        return backup(self._context, path, progress)

    def try_restore(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Restored:
        """Whether a backup of this store can be restored: into a temporary place, checked, thrown away.

        The place is a folder beside the backup, or a schema of the store's own database. The store remembers when it
        was done, and `perdure doctor` tells. `progress`: (done, of how many) bytes.
        """
        from perdure.ops.copies.restoring import try_restore

        return try_restore(self._context, path, progress)

    def list_keys(self) -> list[KeyInfo]:
        """The provider's key that this tenant's data key is wrapped with; never the key itself."""
        from perdure.ops.keys import list_keys

        return self._run(list_keys(self._context))

    def rotate_keys(self) -> Rotated:
        """Wrap this tenant's data key with the provider's key in use: one row, at once. Safe to repeat."""
        from perdure.ops.keys import rotate

        return self._run(rotate(self._context))

    def _set_retention(self, fields: Fields) -> Flow[Retention]:
        from perdure.log import retention_policy

        tenant = yield from self._context.ensure_tenant()
        yield from write(partial(retention_policy.write_policy, tenant, fields))
        return retention_of(fields, {})

    def _retention(self) -> Flow[Retention]:
        from perdure.log import retention_policy

        tenant = yield from self._context.tenant()
        fields = (yield from read(partial(retention_policy.read_policy, tenant))) if tenant is not None else {}
        return retention_of(fields, {})

    def _run(self, flow: Flow[T]) -> T:
        return self._store._run(flow)


def _id(run: str | Run) -> str:
    return run.id if isinstance(run, Run) else check_name(run, "run")
