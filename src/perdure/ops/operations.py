"""`store.ops`: what an operator does with a store: verify, measure, retention, compaction, erasure, copies, keys.

The methods block. From async code call them with `asyncio.to_thread`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.log.retention import read_policy
from perdure.runs.handle import Run, run_id_of
from perdure.storage.program import Flow, Progress, read
from perdure.storage.urls import redacted
from perdure.threads.checks import check_name
from perdure.threads.models import Report, Stats
from perdure.threads.retention import Erased, Retention, Ttl, Unchanged, fields_from, retention_of, set_policy
from perdure.threads.thread import Thread

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.ops.doctor.findings import Finding
    from perdure.ops.health import Health
    from perdure.ops.keys import KeyInfo, Rotated
    from perdure.ops.maintenance.compaction import Compacted
    from perdure.ops.store import Store
    from perdure.runs.history.code_check import CodeFinding
    from perdure.runs.maintenance.deployments import Deployment
    from perdure.transfers.archive import Archive
    from perdure.transfers.catalogue import Backup, Restored
    from perdure.transfers.transfer import TransferReport

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

    def set_retention(
        self, *, ttl: Ttl | Unchanged = "unchanged", keep_last: int | Unchanged | None = "unchanged"
    ) -> Retention:
        """Set how long threads stay that are not written to (`ttl`: seconds or a timedelta), and how many of their
        newest checkpoints (`keep_last`). Only what is named changes; None keeps for good. Kept in the store, for this
        tenant; a thread's own `set_retention` goes before it. `compact` acts on it, which workers do daily."""
        return self._run(set_policy(self._context, fields_from(ttl, keep_last)))

    def retention(self) -> Retention:
        """What holds for threads that have nothing of their own."""
        return self._run(self._retention())

    def compact(self, *, dry_run: bool = False, vacuum: bool = False, progress: Progress | None = None) -> Compacted:
        """Remove what retention says (threads that have expired, checkpoints beyond `keep_last`, journals of finished
        runs). What a pin, a fork, a graph or an unfinished run needs stays.

        `dry_run` says what would go and writes nothing. `vacuum` gives the free space back to the file system: SQLite
        rewrites the file, and others wait meanwhile. `progress`: (done, of how many) threads.
        """
        from perdure.ops.maintenance.compaction import compact

        keep_us = self._store._runtime.keep_us
        return self._run(compact(self._context, keep_us, dry_run=dry_run, vacuum=vacuum, progress=progress))

    def erase(self, thread: Thread | str, *, forks: bool = False, full: bool = False) -> Erased:
        """Erase a thread for good: its states, notes, metadata and pending writes, from the store's own files too. Pins
        do not hold it. If it has forks, which hold its history, it raises and lists them; with `forks` they go too.

        SQLite rewrites its file and cuts off its log, and others wait meanwhile. PostgreSQL vacuums; `full` makes it
        rewrite the tables, which locks them meanwhile. `may_remain` of the answer names what may still hold it.
        """
        from perdure.ops.maintenance.erase import erase_thread

        name, number = self._store._named(thread)
        return self._run(erase_thread(self._context, name, number, forks=forks, full=full))

    def erase_run(self, run: str | Run, *, full: bool = False) -> Erased:
        """Erase a finished run for good, as `erase` does a thread: arguments, journal, result, questions, answers,
        messages, states. Raises UsageError if it is not finished, or a fork or an unfinished parent needs it."""
        from perdure.ops.maintenance.erase import erase_run

        return self._run(erase_run(self._context, run_id_of(self._context, run), full=full))

    def sweep_runs(self) -> int:
        """Remove the journals of finished runs that were kept as long as `keep_runs_s` said; workers do it daily. The
        runs stay, with their results. What a fork or an unfinished parent needs stays as well. How many runs."""
        return self._store._run(self._store._sweep_runs())

    def backup(self, place: str | os.PathLike[str], *, progress: Progress | None = None) -> Backup:
        """Copy the whole store, all tenants, to one file while it is in use, as it is at one point of its commit order.

        `place` is a path or an object's URL (`s3://bucket/name`) where nothing is yet. The file is an SQLite store,
        also if this one is on PostgreSQL. What is encrypted stays so. `progress`: (done, total) bytes or rows.
        """
        from perdure.transfers.backup import backup

        return backup(self._context, place, progress)

    def test_backup(self, place: str | os.PathLike[str], *, progress: Progress | None = None) -> Restored:
        """Whether a backup of this store can be restored: into a file of a temporary folder beside it, verified, and
        dropped. The store remembers when it was done, and `perdure doctor` reports it. `progress`: (done, total) bytes.
        """
        from perdure.transfers.restore import test_backup

        return test_backup(self._store._open, self._context, place, progress, self._keys())

    def transfer(
        self,
        target: str | os.PathLike[str],
        *,
        threads: Sequence[str] | None = None,
        runs: Sequence[str] | None = None,
        tenant: str | None = None,
        move: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> TransferReport:
        """Copy threads and runs of this tenant, or all of a tenant, into another store, which is made if it is not
        there; without any of the three, everything into an empty store.

        Ids and hashes stay. A graph's thread has what its tasks recorded. A thread that the target has with the same
        history is skipped; another of the same name is refused. A run that is not finished must move (`move=True`):
        from then on it continues in the target only. A thread arrives whole or not at all; of a killed transfer the
        same call copies the rest. `options` are those of `perdure.open` for the target, such as `keys=`: it encrypts
        with its own keys, except that a copy of everything keeps what is encrypted already.
        `progress`: (done, total) threads and runs, or rows of everything.
        """
        from perdure.transfers.transfer import transfer

        given = {"tenant": self._context.tenant_name, **options}
        with self._store._open(target, **given) as store:
            where = redacted(os.fspath(target))
            return transfer(self._context, store._context, where, threads, runs, tenant, progress, move=move)

    def archive(self, thread: Thread | str, place: str | os.PathLike[str]) -> Archive:
        """Move a thread into an archive: a store file at a path (others may be in it) or a new object (`s3://…`).

        It is copied, verified there, and removed here in one transaction, which leaves a stub: to load it or to save to
        it raises `Archived`, which says where it is. A call that was killed is resumed by the same call. The archive is
        encrypted with the keys of this store. Raises UsageError while an unfinished run or graph needs the thread.
        """
        from perdure.transfers.archive import archive

        return archive(self._opener(), self._context, "thread", self._store._named(thread)[0], place)

    def archive_run(self, run: str | Run, place: str | os.PathLike[str]) -> Archive:
        """Move a finished run, with the runs it started and their states, into an archive, as `archive` does."""
        from perdure.transfers.archive import archive

        return archive(self._opener(), self._context, "run", run_id_of(self._context, run), place)

    def unarchive(self, thread: str, place: str | os.PathLike[str] | None = None) -> Archive:
        """Bring an archived thread back; the archive stays. `place`: where it is now, if it was moved."""
        from perdure.transfers.archive import unarchive

        return unarchive(self._opener(), self._context, "thread", check_name(thread), place)

    def unarchive_run(self, run: str, place: str | os.PathLike[str] | None = None) -> Archive:
        """Bring an archived run back, as `unarchive` does."""
        from perdure.transfers.archive import unarchive

        return unarchive(self._opener(), self._context, "run", check_name(run, "run"), place)

    def archives(self) -> list[Archive]:
        """The threads and runs of this tenant that are archived, and where."""
        from perdure.transfers.archive import archives

        return self._run(archives(self._context))

    def deploy(self, fn: Callable[..., Any] | str, version: str | None, *, canary: float | None = None) -> None:
        """New runs that `store.start` queues for a function (or its name) get this version of it; "" is code without
        one, None removes the deployment (else NotFound): runs get the version of the code that starts them.

        `canary=0.05`: 5 % of them do, chosen at random, until it is deployed to all, or fails more often than the
        version before: then it is reverted. Open runs stay with their version; see `move_runs`."""
        from perdure.runs.maintenance.deployments import deploy

        self._run(deploy(self._context, fn, version, canary))

    def deployments(self) -> list[Deployment]:
        """The functions that have one, by name. Workers look at the failures every few seconds, and so does this: a
        canary that fails more often than its version is reverted; one that does not, with a chance of at most 1 %."""
        from perdure.runs.maintenance.deployments import deployments

        return self._run(deployments(self._context))

    def move_runs(self, fn: Callable[..., Any]) -> list[CodeFinding]:
        """Move the open runs of a function to this version of its code, each if its replay passes. `is_ok` of a
        finding: it was moved; `problem` says why one was not. Runs that are running stay."""
        from perdure.runs.history.code_check import move_runs

        return move_runs(self._store, fn)

    def index_memory(self) -> None:
        """PostgreSQL: let pgvector find the nearest items in namespaces with more than 50,000 of them. Run it as the
        store's owner, and again after a change of the embedder; writers of memory wait meanwhile. Refused for an
        encrypted store."""
        from perdure.memory.pgvector import make_pgvector

        self._run(make_pgvector(self._context.driver))

    def list_keys(self) -> list[KeyInfo]:
        """The provider's key that this tenant's data key is wrapped with; never the key itself."""
        from perdure.ops.keys import list_keys

        return self._run(list_keys(self._context))

    def rotate_keys(self) -> Rotated:
        """Wrap this tenant's data key with the provider's key in use: one row, at once. Safe to repeat."""
        from perdure.ops.keys import rotate

        return self._run(rotate(self._context))

    def _retention(self) -> Flow[Retention]:
        tenant = yield from self._context.tenant()
        return retention_of((yield from read(partial(read_policy, tenant))) if tenant is not None else {}, {})

    def _keys(self) -> Any:
        cache = self._context.driver.capabilities.keys
        return None if cache is None else cache.provider

    def _opener(self) -> Any:
        """Opens a store with this one's tenant and keys."""
        return partial(self._store._open, tenant=self._context.tenant_name, keys=self._keys())

    def _run(self, flow: Flow[T]) -> T:
        return self._store._run(flow)
