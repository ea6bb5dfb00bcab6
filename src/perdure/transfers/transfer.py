"""`store.ops.transfer`: copy threads, runs, one tenant or everything from one store to another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from perdure.errors import NotFound, UsageError
from perdure.log.archived import Stub, add_stub, list_stubs
from perdure.log.thread_table import ThreadRow, try_thread
from perdure.runs.journal.rows import NEVER, TASK
from perdure.runs.journal.turns import release_all
from perdure.runs.maintenance import deployments
from perdure.runs.schedules.rows import ScheduleRow, listed
from perdure.runs.tables import SCHEDULE
from perdure.storage.program import Batch, Program, Progress, Sql, drive, fetch, read, write, write_repair
from perdure.threads.checks import check_name
from perdure.threads.context import StoreContext
from perdure.threads.externals import copy_values
from perdure.transfers.fencing import fence_old_processes
from perdure.transfers.memory import copy_memory
from perdure.transfers.run_rows import encode, read_tasks
from perdure.transfers.runs import RunMove, copy_run, copy_run_values
from perdure.transfers.tables import insert_into
from perdure.transfers.threads import copy_threads, values_of
from perdure.transfers.verify import tenant_names
from perdure.transfers.whole import copy_store

_THREADS = Sql("SELECT name FROM thread WHERE tenant = :tenant AND head IS NOT NULL ORDER BY thread")
# Without the tasks of graphs: they are copied with their threads.
_TOP_RUNS = Sql(
    f"""SELECT id FROM run WHERE tenant = :tenant AND parent IS NULL AND function NOT LIKE '{TASK}%'
    AND (status <> 'exported' OR :frozen = 1) ORDER BY run"""
)
_THREAD = Sql("SELECT 1 FROM thread WHERE tenant = :tenant AND name = :name")
_RUN = Sql("SELECT 1 FROM run WHERE tenant = :tenant AND id = :name")
_ADD_SCHEDULE = insert_into(SCHEDULE, " ON CONFLICT (tenant, name) DO NOTHING")
_PAUSE_SCHEDULES = Sql(f"UPDATE schedule SET paused = 1, next_at = {NEVER} WHERE tenant = :tenant")
_KEYS = Sql("SELECT 1 FROM tenant_key LIMIT 1")
_STATES = Sql(
    """SELECT DISTINCT t.name FROM run r CROSS JOIN thread t
    WHERE r.tenant = :tenant AND t.tenant = r.tenant AND t.name = 'run:' || r.id"""
)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The counts of what `transfer` copied. `already` names threads that the target had, with the same history."""

    threads: int
    checkpoints: int
    runs: int
    already: tuple[str, ...]
    seconds: float
    versions: int = 0  # of items of memory


def transfer(
    source: StoreContext,
    target: StoreContext,
    where: str,
    threads: Sequence[str] | None,
    runs: Sequence[str] | None,
    tenant: str | None,
    progress: Progress | None,
    *,
    move: bool,
) -> TransferReport:
    """Copy as `store.ops.transfer` documents. `where` is the target as messages show it."""
    if tenant is not None and (threads is not None or runs is not None):
        raise UsageError("transfer(): tenant= takes all threads and runs of a tenant; name no others with it")
    if tenant is not None:
        return _transfer_tenant(source, target, tenant, where, progress, move=move)
    if threads is None and runs is None:
        if target.driver.capabilities.keys is not None and not drive(source.driver, fetch(_KEYS)):
            return _encrypt_all(source, target, where, progress)
        return _transfer_all(source, target, progress)
    names = [check_name(name) for name in threads or ()]
    run_ids = [check_name(run, "run") for run in runs or ()]
    return transfer_some(source, target, names, run_ids, where, progress, move=move)


def _transfer_all(source: StoreContext, target: StoreContext, progress: Progress | None) -> TransferReport:
    """Copy everything into an empty store that continues in place of the source."""
    start = time.monotonic()
    fence = partial(fence_old_processes, "", source.clock_us())
    done = copy_store(source.driver.capabilities.base, target.driver.capabilities.base, progress, last=fence)
    threads, checkpoints, runs, versions = (done.rows[name] for name in ("thread", "record", "run", "memory_item"))
    return TransferReport(threads, checkpoints, runs, (), time.monotonic() - start, versions)


def _encrypt_all(source: StoreContext, target: StoreContext, where: str, progress: Progress | None) -> TransferReport:
    """Copy an unencrypted store tenant by tenant, so that the target encrypts everything. Unfinished runs move."""
    names = drive(source.driver, read(tenant_names))
    done = [_transfer_tenant(source, target, name, where, progress, move=True) for name in names]
    already = tuple(name for each in done for name in each.already)
    threads, checkpoints, runs, seconds, versions = (
        sum(getattr(each, name) for each in done) for name in ("threads", "checkpoints", "runs", "seconds", "versions")
    )
    return TransferReport(threads, checkpoints, runs, already, seconds, versions)


def _transfer_tenant(
    source: StoreContext, target: StoreContext, tenant: str, where: str, progress: Progress | None, *, move: bool
) -> TransferReport:
    """Copy all threads, runs, deployments, schedules and memory of a tenant, and the stubs of what it has archived.

    Schedules arrive paused, because those of the source may still start runs. With `move` they are paused there.
    """
    source = replace(source, tenant_name=check_name(tenant, "tenant"), known_tenant=None)
    target = replace(target, tenant_name=tenant, known_tenant=None)
    number = drive(source.driver, source.tenant())
    if number is None:
        raise NotFound(f"there is no tenant {tenant!r}")
    # Runs that are frozen already may be those of a move that was killed before it was finished.
    threads, runs = drive(source.driver, read(partial(all_of, number, frozen=move)))
    stubs = drive(source.driver, read(partial(list_stubs, number)))
    drive(target.driver, write(partial(_add_stubs, drive(target.driver, target.ensure_tenant()), stubs)))
    deployed = drive(source.driver, fetch(deployments.SELECT, tenant=number))
    drive(target.driver, write(partial(deployments.copy_rows, drive(target.driver, target.ensure_tenant()), deployed)))
    schedules = drive(source.driver, read(partial(listed, number, 2**62)))
    drive(target.driver, write(partial(_add_schedules, drive(target.driver, target.ensure_tenant()), schedules)))
    if move:
        drive(source.driver, write(partial(_pause_schedules, number)))
    versions = copy_memory(source, target)
    done = transfer_some(source, target, threads, runs, where, progress, move=move, skip_moved=True)
    return replace(done, versions=versions)


def transfer_some(
    source: StoreContext,
    target: StoreContext,
    threads: Sequence[str],
    runs: Sequence[str],
    where: str,
    progress: Progress | None,
    *,
    move: bool,
    skip_moved: bool = False,
) -> TransferReport:
    """Copy threads and runs of a tenant into the target's tenant. `progress` gets how many are done, and the total.

    `skip_moved` passes over runs that were moved to another store before.
    """
    start = time.monotonic()
    trees, already = _trees(source, target, threads)
    total = sum(map(len, trees)) + len(runs)
    done = checkpoints = moved = 0
    to = drive(target.driver, target.ensure_tenant())

    def advance(_rows: int) -> None:
        if progress is not None:
            progress(done, total)

    here = drive(source.driver, source.tenant()) or 0
    for names in trees:
        copy_values(source, target, drive(source.driver, read(partial(values_of, here, names))))
        checkpoints += drive(target.driver, write_repair(partial(copy_threads, source, to, names, advance)))
        done += len(names)
        advance(0)
    for run in runs:
        if move:
            moved += RunMove(source, target, run, where, advance).run(or_skip=skip_moved)
        else:
            copy_run_values(source, target, run)
            moved += drive(target.driver, write_repair(partial(copy_run, source, to, run, advance)))
        done += 1
        advance(0)
    if move:  # not before: runs of a schedule that move together take turns in the target
        for store in (source, target):
            drive(store.driver, write(partial(release_all, drive(store.driver, store.ensure_tenant()))))
    return TransferReport(done - len(runs), checkpoints, moved, already, time.monotonic() - start)


def _trees(
    source: StoreContext, target: StoreContext, threads: Sequence[str]
) -> tuple[list[list[str]], tuple[str, ...]]:
    """Return the threads to copy, grouped by tree, and those that the target has already.

    Raises NotFound, and UsageError if the target has a different thread of that name.
    """
    here = drive(source.driver, source.tenant())
    there = drive(target.driver, target.ensure_tenant())
    trees: dict[int, list[str]] = {}
    already = []
    for name in dict.fromkeys(threads):
        row = None if here is None else drive(source.driver, read(partial(try_thread, here, name)))
        if row is None:
            raise NotFound(f"there is no thread {name!r}: nothing was copied")
        existing = drive(target.driver, read(partial(try_thread, there, name)))
        if existing is None:
            trees.setdefault(row.tree, []).append(name)
        elif existing.head_hash == row.head_hash and _tasks(target, existing) >= _tasks(source, row):
            already.append(name)
        else:
            raise UsageError(
                f"there is another thread {name!r} in the target already, or it has changed since: nothing was copied. "
                "Delete that one first"
            )
    return list(trees.values()), tuple(already)


def _tasks(ctx: StoreContext, thread: ThreadRow) -> set[bytes]:
    """Return what a thread's tasks have recorded, even since its last checkpoint. Skip those past their retention."""
    tenant = drive(ctx.driver, ctx.tenant()) or 0
    tasks = drive(ctx.driver, read(partial(read_tasks, tenant, thread.thread)))
    return {encode(part.known()) for part in tasks if (part.row.keep_until or NEVER) > ctx.clock_us()}


def _add_stubs(tenant: int, stubs: list[Stub]) -> Program[None]:
    for stub in stubs:
        [taken] = yield Batch((_THREAD if stub.kind == "thread" else _RUN)(tenant=tenant, name=stub.name))
        if taken:
            raise UsageError(
                f"{stub.kind} {stub.name!r} is archived in the source, and the target has one of that name: nothing "
                "was copied. Delete one of them first"
            )
        yield Batch(add_stub(tenant, stub))


def _add_schedules(tenant: int, schedules: list[ScheduleRow]) -> Program[None]:
    """Add schedules of another store, paused. One that is there already stays as it is."""
    for row in schedules:
        yield Batch(_ADD_SCHEDULE(tenant=tenant, **row._replace(paused=1, next_at=NEVER)._asdict()))


def _pause_schedules(tenant: int) -> Program[None]:
    yield Batch(_PAUSE_SCHEDULES(tenant=tenant))


def all_of(tenant: int, *, frozen: bool = False) -> Program[tuple[list[str], list[str]]]:
    """Return the names of a tenant's threads and the ids of its runs. `frozen` includes runs that have moved away.

    Threads that hold the state of a run are left out: they are copied with it.
    """
    top = _TOP_RUNS(tenant=tenant, frozen=int(frozen))
    threads, states, runs = yield Batch(_THREADS(tenant=tenant), _STATES(tenant=tenant), top, last=True)
    of_runs = {name for (name,) in states}
    return [name for (name,) in threads if name not in of_runs], [run for (run,) in runs]
