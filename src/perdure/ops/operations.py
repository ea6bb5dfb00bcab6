"""`store.ops`: the operator's methods of a store. The work itself is in the modules that each method imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.log.retention import UNCHANGED, Retention, Unchanged, fields_from, read_policy, write_policy
from perdure.runs.handle import Run, run_id_of
from perdure.snapshots.verify import snapshot_problems, verify_tenant
from perdure.storage.program import Flow, Progress, aside, read, write
from perdure.storage.twins import awaited, blocking
from perdure.storage.urls import redacted
from perdure.threads.actions import OperatorAction, actions, noted
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
    from perdure.ops.overview import Activity, QueueInfo, WorkerInfo
    from perdure.ops.store import Store
    from perdure.runs.history.code_check import CodeFinding
    from perdure.runs.maintenance.deployments import Deployment
    from perdure.transfers.archive import Archive
    from perdure.transfers.catalogue import Backup, Restored
    from perdure.transfers.transfer import TransferReport


class Operations(Handle):
    """An operator's methods for one tenant of a store: verify, measure, retention, compaction, erasure, copies, keys.

    The awaited methods that copy files or whole stores do it on a thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._context = store._context

    @blocking
    def verify(self, *, progress: Progress | None = None) -> Flow[Report]:
        """Check every record of this tenant, and the database file. `progress` is called with (done, total) trees."""
        report = yield from verify_tenant(self._context, progress)
        return replace(report, problems=(*report.problems, *(yield from snapshot_problems(self._context))))

    averify = awaited(verify)

    @blocking
    def stats(self) -> Flow[Stats]:
        """Return how much is stored, and how much it would be if every state were stored in full."""
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
        """Check a deployment and return one finding per check, with what to do about it. Writes nothing."""
        from perdure.ops.doctor.checklist import examine

        return examine(self._context)

    adoctor = awaited(doctor)

    @blocking
    def health(self) -> Flow[Health]:
        """Return the store's figures, and the changes that a crash of this process would lose now.

        It is cheap enough to be called every few seconds.
        """
        from perdure.ops.health import health

        return health(self._context)

    ahealth = awaited(health)

    @blocking
    def retention(
        self,
        *,
        threads: Duration | Unchanged | None = UNCHANGED,
        checkpoints: int | Unchanged | None = UNCHANGED,
        checkpoint_age: Duration | Unchanged | None = UNCHANGED,
        runs: Duration | Unchanged | None = UNCHANGED,
        memory: Duration | Unchanged | None = UNCHANGED,
        memory_history: Duration | Unchanged | None = UNCHANGED,
        snapshots: Duration | Unchanged | None = UNCHANGED,
    ) -> Flow[Retention]:
        """Set the rules that are passed, and return all rules for how long this tenant's data is kept.

        The rules are stored, so they hold for every process. A duration is text ("12h", "30d", "8w") or a timedelta;
        None keeps for ever. `Retention` documents each rule. `thread.retention()`, `policy()` of a memory namespace and
        `keep_until` of a snapshot take precedence. `compact` applies the rules; workers call it daily.
        """
        named = {"threads": threads, "checkpoints": checkpoints, "checkpoint_age": checkpoint_age, "runs": runs}
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
        """Remove the data that the rules of `retention` no longer keep.

        That is old threads, checkpoints, journals of finished runs, items of memory, and snapshots. Data that a pin, a
        fork, a graph or an unfinished run needs is kept. `dry_run` reports what would be removed and writes nothing.
        `vacuum` returns free space to the file system: SQLite rewrites the file, and other writers wait meanwhile.
        `progress` is called with (done, total) threads.
        """
        from perdure.ops.maintenance.compaction import compact

        return compact(self._context, dry_run=dry_run, vacuum=vacuum, progress=progress)

    acompact = awaited(compact)

    @blocking
    def erase(self, thread: Thread | str, *, forks: bool = False, full: bool = False) -> Flow[Erased]:
        """Erase a thread for good: its states, notes, metadata and pending writes, also from the store's files.

        Pins do not prevent it. Forks hold the thread's history: if there are any, it raises and lists them, or erases
        them too (`forks=True`). SQLite rewrites its file and truncates its log; other writers wait meanwhile.
        PostgreSQL vacuums; with `full` it rewrites the tables and locks them meanwhile. `may_remain` of the result
        names the places that may still hold the data.
        """
        from perdure.ops.maintenance.erase import erase_thread

        name, number = named_thread(self._context, thread)
        return erase_thread(self._context, name, number, forks=forks, full=full)

    aerase = awaited(erase)

    @blocking
    def erase_run(self, run: str | Run, *, full: bool = False) -> Flow[Erased]:
        """Erase a finished run for good, as `erase` does a thread.

        Its arguments, journal, result, questions, answers, messages and states are erased. Raises UsageError if the run
        is not finished, or if a fork or an unfinished parent needs it.
        """
        from perdure.ops.maintenance.erase import erase_run

        return erase_run(self._context, run_id_of(self._context, run), full=full)

    aerase_run = awaited(erase_run)

    @blocking
    def sweep_runs(self) -> Flow[int]:
        """Remove the journals of finished runs that are older than `retention(runs=…)`, and return how many.

        The runs themselves stay, with their results. A journal that a fork or an unfinished parent needs stays too.
        Workers do this daily.
        """
        from perdure.runs.maintenance.retention import sweep_runs

        tenant = yield from self._context.tenant()
        if tenant is None:
            return 0
        return (yield from sweep_runs(tenant, self._context.clock_us))

    asweep_runs = awaited(sweep_runs)

    @blocking
    def backup(
        self,
        place: str | os.PathLike[str],
        *,
        retain_until: datetime | None = None,
        progress: Progress | None = None,
    ) -> Flow[Backup]:
        """Copy the whole store, all tenants, to one file, consistent at one commit. The store may be in use.

        `place` is a path or an object's URL (`s3://bucket/name`) where nothing exists yet. The file is an SQLite store,
        even if this one is on PostgreSQL. Encrypted data stays encrypted. With `retain_until`, an object in S3 is
        locked: it cannot be deleted or replaced before (extra `object-lock`). `progress` is called with (done, total)
        bytes or rows.
        """
        from perdure.transfers.backup import backup

        return aside(partial(backup, self._context, place, progress, retain_until))

    abackup = awaited(backup)

    @blocking
    def test_backup(self, place: str | os.PathLike[str], *, progress: Progress | None = None) -> Flow[Restored]:
        """Check that a backup of this store can be restored.

        It is restored to a file in a temporary folder beside it, verified, and dropped. The store records the time of
        the test for `perdure doctor`. `progress` is called with (done, total) bytes.
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
        """Copy `threads` and `runs` of this tenant, or all of `tenant`, into another store.

        The target is created if it does not exist. Without any of the three arguments, everything is copied, and the
        target must be empty. Ids and hashes stay the same. A graph's thread includes what its tasks recorded. A thread
        that the target has with the same history is skipped; one with another history is refused. An unfinished run
        must be moved (`move=True`): from then on it continues only in the target. A thread arrives whole or not at all,
        and so does a copy of everything. After a kill, the same call copies the missing threads and runs. `options` are
        those of `perdure.open` for the target, such as `keys=`: the target encrypts with its own keys, but a copy of
        everything keeps encrypted data as it is. `progress` is called with (done, total) threads and runs, or rows if
        everything is copied.
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
        """Move a thread into an archive: a store file, which may hold other threads, or a new object (`s3://…`).

        The thread is copied, verified in the archive, and then removed from this store in one transaction, which leaves
        a stub. Loading the thread or saving to it then raises `Archived` with the place. After a kill, the same call
        resumes. The archive is encrypted with the keys of this store. Raises UsageError while an unfinished run or
        graph needs the thread.
        """
        from perdure.transfers.archive import archive

        name, _ = named_thread(self._context, thread)
        return aside(partial(archive, self._opener(), self._context, "thread", name, place))

    aarchive = awaited(archive)

    @blocking
    def archive_run(self, run: str | Run, place: str | os.PathLike[str]) -> Flow[Archive]:
        """Move a finished run, the runs it started, and their states into an archive, as `archive` does a thread."""
        from perdure.transfers.archive import archive

        return aside(partial(archive, self._opener(), self._context, "run", run_id_of(self._context, run), place))

    aarchive_run = awaited(archive_run)

    @blocking
    def unarchive(self, thread: str, place: str | os.PathLike[str] | None = None) -> Flow[Archive]:
        """Copy an archived thread back into this store. The archive stays. `place` is its new place if it was moved."""
        from perdure.transfers.archive import unarchive

        return aside(partial(unarchive, self._opener(), self._context, "thread", check_name(thread), place))

    aunarchive = awaited(unarchive)

    @blocking
    def unarchive_run(self, run: str, place: str | os.PathLike[str] | None = None) -> Flow[Archive]:
        """Copy an archived run back into this store, as `unarchive` does a thread."""
        from perdure.transfers.archive import unarchive

        return aside(partial(unarchive, self._opener(), self._context, "run", check_name(run, "run"), place))

    aunarchive_run = awaited(unarchive_run)

    @blocking
    def archives(self) -> Flow[list[Archive]]:
        """Return the archived threads and runs of this tenant, with their places."""
        from perdure.transfers.archive import archives

        return archives(self._context)

    aarchives = awaited(archives)

    @blocking
    def deploy(
        self,
        fn: Callable[..., Any] | str,
        version: str | None,
        *,
        canary: float | None = None,
        who: str | None = None,
    ) -> Flow[None]:
        """Set the version that new runs of a function get when `store.start` queues them.

        `fn` is the function or its name. The version "" is code without a version. None removes the deployment, and
        runs get the version of the code that starts them again; it raises NotFound if there is no deployment.
        `canary=0.05` gives the version to a random 5 % of new runs, until it is deployed to all. It is reverted if it
        fails more often than the version before. Open runs keep their version; see `move_runs`.
        """
        from perdure.runs.calls.decorators import durable_spec
        from perdure.runs.maintenance.deployments import deploy

        name = fn if isinstance(fn, str) else durable_spec(fn).name
        deploying = deploy(self._context, fn, version, canary)
        action = "deploy" if version is not None else "remove deployment"
        return noted(self._context, who, action, f"function {name}", deploying, version=version, canary=canary)

    adeploy = awaited(deploy)

    @blocking
    def deployments(self) -> Flow[list[Deployment]]:
        """Return the deployments of all functions, ordered by name.

        Workers revert a canary that fails more often than the version before. A canary that does not fail more often is
        reverted with a probability of at most 1 %.
        """
        from perdure.runs.maintenance.deployments import deployments

        return deployments(self._context)

    adeployments = awaited(deployments)

    @blocking
    def actions(
        self, *, limit: int | None = 100, before: str | None = None, subject: str | None = None
    ) -> Flow[list[OperatorAction]]:
        """Return what operators did, the newest first: calls with `who=`, and commands of the command line.

        `before` is the `cursor` of the last action of a page. `subject` is one thing that was changed: "run trip-42",
        "thread alice", "schedule nightly". The newest 10,000 actions of a tenant are kept.
        """
        return actions(self._context, limit, before, subject)

    aactions = awaited(actions)

    @blocking
    def queues(self) -> Flow[list[QueueInfo]]:
        """Return the queues that have runs or limits, with the number of runs by status."""
        from perdure.ops.overview import queues

        return queues(self._context)

    aqueues = awaited(queues)

    @blocking
    def workers(self) -> Flow[list[WorkerInfo]]:
        """Return the processes that run something of this tenant now. An idle worker is not listed."""
        from perdure.ops.overview import workers

        return workers(self._context)

    aworkers = awaited(workers)

    @blocking
    def activity(self, *, since: datetime | None = None, intervals: int = 60) -> Flow[list[Activity]]:
        """Count the runs that began, the runs that ended and the threads that were saved in each interval up to now.

        `since` is an hour ago by default. At most 10,000 of each are counted, the newest ones.
        Intervals that were not counted completely are left out.
        """
        from perdure.ops.overview import activity

        return activity(self._context, since, intervals)

    aactivity = awaited(activity)

    @blocking
    def tenants(self, *, after: str = "", limit: int | None = 1000) -> Flow[list[str]]:
        """Return the names of the tenants that this role of the database may see, in order, from `after` on."""
        from perdure.ops.overview import tenants

        return tenants(after, limit)

    atenants = awaited(tenants)

    @blocking
    def move_runs(self, fn: Callable[..., Any]) -> Flow[list[CodeFinding]]:
        """Move the open runs of a function to this version of its code, each only if its replay passes.

        `is_ok` of a finding says whether the run was moved, and `problem` why it was not. Runs that are running stay.
        """
        from perdure.runs.history.code_check import move_runs

        return aside(partial(move_runs, self._store, fn))

    amove_runs = awaited(move_runs)

    @blocking
    def list_keys(self) -> Flow[list[KeyInfo]]:
        """Return the id of the provider's key that wraps this tenant's data key, never the key itself."""
        from perdure.ops.keys import list_keys

        return list_keys(self._context)

    alist_keys = awaited(list_keys)

    @blocking
    def rotate_keys(self) -> Flow[Rotated]:
        """Wrap this tenant's data key with the provider's current key. It rewrites one row, and is safe to repeat."""
        from perdure.ops.keys import rotate

        return rotate(self._context)

    arotate_keys = awaited(rotate_keys)

    def _keys(self) -> Any:
        cache = self._context.driver.capabilities.keys
        return None if cache is None else cache.provider

    def _opener(self) -> Any:
        """Return a function that opens a store with this one's tenant and keys."""
        return partial(self._store._open, tenant=self._context.tenant_name, keys=self._keys())
