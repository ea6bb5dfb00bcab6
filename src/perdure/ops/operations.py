"""`store.ops`: what an operator does with a store: verify, measure, retention, compaction, erasure, copies, keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.log.retention import UNCHANGED, Retention, Unchanged, fields_from, read_policy, write_policy
from perdure.runs.handle import Run, run_id_of
from perdure.snapshots.verify import snapshot_problems, verify_tenant
from perdure.storage.program import Flow, Progress, aside, read, write
from perdure.storage.twins import awaited, blocking
from perdure.storage.urls import redacted
from perdure.threads.checks import check_name
from perdure.threads.context import Handle
from perdure.threads.models import Report, Stats
from perdure.threads.retention import Erased
from perdure.threads.store import named_thread
from perdure.threads.thread import Thread
from perdure.values.durations import Duration

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


class Operations(Handle):
    """The operator's side of one store, for one tenant. Copies of whole files and stores are made on a thread if they
    are awaited."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._context = store._context

    @blocking
    def verify(self, *, progress: Progress | None = None) -> Flow[Report]:
        """Check every record of this tenant, and the database file itself. `progress`: (done, of how many) trees."""
        report = yield from verify_tenant(self._context, progress)
        return replace(report, problems=(*report.problems, *(yield from snapshot_problems(self._context))))

    averify = awaited(verify)

    @blocking
    def stats(self) -> Flow[Stats]:
        """Measure how much is stored, and how much storing every state in full would take."""
        from perdure.log.stats import count
        from perdure.runs.maintenance.verify import count_runs

        tenant = yield from self._context.tenant()
        if tenant is None:
            return Stats(0, 0, 0, 0, 0, 0)
        runs, run_bytes = yield from read(partial(count_runs, tenant))
        return replace(Stats(*(yield from read(partial(count, tenant)))), runs=runs, run_bytes=run_bytes)

    astats = awaited(stats)

    @blocking
    def doctor(self) -> Flow[list[Finding]]:
        """Go through the checklist of a deployment: how each line stands, and what to do. Changes nothing."""
        from perdure.ops.doctor.checklist import examine

        return examine(self._context)

    adoctor = awaited(doctor)

    @blocking
    def health(self) -> Flow[Health]:
        """Return how the store is doing, and what a crash of this process would cost now. Cheap: call it often."""
        from perdure.ops.health import health

        return health(self._context)

    ahealth = awaited(health)

    @blocking
    def retention(
        self,
        *,
        threads: Duration | Unchanged | None = UNCHANGED,
        checkpoints: int | Unchanged | None = UNCHANGED,
        runs: Duration | Unchanged | None = UNCHANGED,
        memory: Duration | Unchanged | None = UNCHANGED,
        memory_history: Duration | Unchanged | None = UNCHANGED,
        snapshots: Duration | Unchanged | None = UNCHANGED,
    ) -> Flow[Retention]:
        """Return how long this tenant's data is kept, after setting what is named. It is stored: every process follows.

        Durations are text ("12h", "30d", "8w") or a timedelta; None keeps for ever. `Retention` says what each rule
        means. A thread's own `thread.retention()`, a namespace's own `policy()` and a snapshot's `keep_until` go first.
        `compact` acts on it, which workers do daily.
        """
        named = {"threads": threads, "checkpoints": checkpoints, "runs": runs}
        named |= {"memory": memory, "memory_history": memory_history, "snapshots": snapshots}
        if fields := fields_from(named):
            tenant = yield from self._context.ensure_tenant()
            return Retention.of((yield from write(partial(write_policy, tenant, fields))))
        known = yield from self._context.tenant()
        return Retention.of((yield from read(partial(read_policy, known))) if known is not None else {})

    aretention = awaited(retention)

    @blocking
    def compact(
        self, *, dry_run: bool = False, vacuum: bool = False, progress: Progress | None = None
    ) -> Flow[Compacted]:
        """Remove what `retention` says: old threads, checkpoints, journals of finished runs, items of memory and
        snapshots. What a pin, a fork, a graph or an unfinished run needs stays.

        `dry_run` says what would go and writes nothing. `vacuum` gives the free space back to the file system: SQLite
        rewrites the file, and others wait meanwhile. `progress`: (done, of how many) threads.
        """
        from perdure.ops.maintenance.compaction import compact

        return compact(self._context, dry_run=dry_run, vacuum=vacuum, progress=progress)

    acompact = awaited(compact)

    @blocking
    def erase(self, thread: Thread | str, *, forks: bool = False, full: bool = False) -> Flow[Erased]:
        """Erase a thread for good: its states, notes, metadata and pending writes, from the store's own files too. Pins
        do not hold it. If it has forks, which hold its history, it raises and lists them; with `forks` they go too.

        SQLite rewrites its file and cuts off its log, and others wait meanwhile. PostgreSQL vacuums; `full` makes it
        rewrite the tables, which locks them meanwhile. `may_remain` of the answer names what may still hold it.
        """
        from perdure.ops.maintenance.erase import erase_thread

        name, number = named_thread(self._context, thread)
        return erase_thread(self._context, name, number, forks=forks, full=full)

    aerase = awaited(erase)

    @blocking
    def erase_run(self, run: str | Run, *, full: bool = False) -> Flow[Erased]:
        """Erase a finished run for good, as `erase` does a thread: arguments, journal, result, questions, answers,
        messages, states. Raises UsageError if it is not finished, or a fork or an unfinished parent needs it."""
        from perdure.ops.maintenance.erase import erase_run

        return erase_run(self._context, run_id_of(self._context, run), full=full)

    aerase_run = awaited(erase_run)

    @blocking
    def sweep_runs(self) -> Flow[int]:
        """Remove the journals of finished runs that were kept as long as `retention(runs=…)` says; workers do it daily.
        The runs stay, with their results. What a fork or an unfinished parent needs stays. Return how many runs."""
        from perdure.runs.maintenance.retention import sweep_runs

        tenant = yield from self._context.tenant()
        if tenant is None:
            return 0
        return (yield from sweep_runs(tenant, self._context.clock_us))

    asweep_runs = awaited(sweep_runs)

    @blocking
    def backup(self, place: str | os.PathLike[str], *, progress: Progress | None = None) -> Flow[Backup]:
        """Copy the whole store, all tenants, to one file while it is in use, as it is at one point of its commit order.

        `place` is a path or an object's URL (`s3://bucket/name`) where nothing is yet. The file is an SQLite store,
        also if this one is on PostgreSQL. What is encrypted stays so. `progress`: (done, total) bytes or rows.
        """
        from perdure.transfers.backup import backup

        return aside(partial(backup, self._context, place, progress))

    abackup = awaited(backup)

    @blocking
    def test_backup(self, place: str | os.PathLike[str], *, progress: Progress | None = None) -> Flow[Restored]:
        """Check that a backup of this store can be restored: into a file of a temporary folder beside it, verified, and
        dropped. The store remembers when it was done, and `perdure doctor` reports it. `progress`: (done, total) bytes.
        """
        from perdure.transfers.restore import test_backup

        return aside(partial(test_backup, self._store._open, self._context, place, progress, self._keys()))

    atest_backup = awaited(test_backup)

    @blocking
    def transfer(
        self,
        /,
        target: str | os.PathLike[str],
        *,
        threads: Sequence[str] | None = None,
        runs: Sequence[str] | None = None,
        tenant: str | None = None,
        move: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> Flow[TransferReport]:
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

        def copy() -> TransferReport:
            with self._store._open(target, **{"tenant": self._context.tenant_name, **options}) as store:
                where = redacted(os.fspath(target))
                return transfer(self._context, store._context, where, threads, runs, tenant, progress, move=move)

        return aside(copy)

    atransfer = awaited(transfer)

    @blocking
    def archive(self, thread: Thread | str, place: str | os.PathLike[str]) -> Flow[Archive]:
        """Move a thread into an archive: a store file at a path (others may be in it) or a new object (`s3://…`).

        It is copied, verified there, and removed here in one transaction, which leaves a stub: to load it or to save to
        it raises `Archived`, which says where it is. A call that was killed is resumed by the same call. The archive is
        encrypted with the keys of this store. Raises UsageError while an unfinished run or graph needs the thread.
        """
        from perdure.transfers.archive import archive

        name, _ = named_thread(self._context, thread)
        return aside(partial(archive, self._opener(), self._context, "thread", name, place))

    aarchive = awaited(archive)

    @blocking
    def archive_run(self, run: str | Run, place: str | os.PathLike[str]) -> Flow[Archive]:
        """Move a finished run, with the runs it started and their states, into an archive, as `archive` does."""
        from perdure.transfers.archive import archive

        return aside(partial(archive, self._opener(), self._context, "run", run_id_of(self._context, run), place))

    aarchive_run = awaited(archive_run)

    @blocking
    def unarchive(self, thread: str, place: str | os.PathLike[str] | None = None) -> Flow[Archive]:
        """Bring an archived thread back; the archive stays. `place`: where it is now, if it was moved."""
        from perdure.transfers.archive import unarchive

        return aside(partial(unarchive, self._opener(), self._context, "thread", check_name(thread), place))

    aunarchive = awaited(unarchive)

    @blocking
    def unarchive_run(self, run: str, place: str | os.PathLike[str] | None = None) -> Flow[Archive]:
        """Bring an archived run back, as `unarchive` does."""
        from perdure.transfers.archive import unarchive

        return aside(partial(unarchive, self._opener(), self._context, "run", check_name(run, "run"), place))

    aunarchive_run = awaited(unarchive_run)

    @blocking
    def archives(self) -> Flow[list[Archive]]:
        """List the threads and runs of this tenant that are archived, and where."""
        from perdure.transfers.archive import archives

        return archives(self._context)

    aarchives = awaited(archives)

    @blocking
    def deploy(self, fn: Callable[..., Any] | str, version: str | None, *, canary: float | None = None) -> Flow[None]:
        """Give new runs that `store.start` queues for a function (or its name) this version of it. "" is code without
        one. None removes the deployment (else NotFound): runs get the version of the code that starts them.

        `canary=0.05`: 5 % of them do, chosen at random, until it is deployed to all, or fails more often than the
        version before: then it is reverted. Open runs stay with their version; see `move_runs`."""
        from perdure.runs.maintenance.deployments import deploy

        return deploy(self._context, fn, version, canary)

    adeploy = awaited(deploy)

    @blocking
    def deployments(self) -> Flow[list[Deployment]]:
        """List the functions that have a deployment, by name. Like workers every few seconds, this reverts a canary
        that fails more often than its version; one that does not is reverted with a chance of at most 1 %."""
        from perdure.runs.maintenance.deployments import deployments

        return deployments(self._context)

    adeployments = awaited(deployments)

    @blocking
    def move_runs(self, fn: Callable[..., Any]) -> Flow[list[CodeFinding]]:
        """Move the open runs of a function to this version of its code, each if its replay passes. `is_ok` of a
        finding: it was moved; `problem` says why one was not. Runs that are running stay."""
        from perdure.runs.history.code_check import move_runs

        return aside(partial(move_runs, self._store, fn))

    amove_runs = awaited(move_runs)

    @blocking
    def list_keys(self) -> Flow[list[KeyInfo]]:
        """Return the provider's key that this tenant's data key is wrapped with; never the key itself."""
        from perdure.ops.keys import list_keys

        return list_keys(self._context)

    alist_keys = awaited(list_keys)

    @blocking
    def rotate_keys(self) -> Flow[Rotated]:
        """Wrap this tenant's data key with the provider's key in use: one row, at once. Safe to repeat."""
        from perdure.ops.keys import rotate

        return rotate(self._context)

    arotate_keys = awaited(rotate_keys)

    def _keys(self) -> Any:
        cache = self._context.driver.capabilities.keys
        return None if cache is None else cache.provider

    def _opener(self) -> Any:
        """Return a function that opens a store with this one's tenant and keys."""
        return partial(self._store._open, tenant=self._context.tenant_name, keys=self._keys())
