"""`store.ops.compact()`: remove data that retention rules no longer keep, and return the space.

It takes many short transactions, so other writers never wait long. After a kill, the next compaction continues. Data
that a pin, a fork, a graph or an unfinished run needs is kept, and no hash of the kept data changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from perdure.log import erase, retention
from perdure.log.store_size import size_and_samples
from perdure.memory import maintenance
from perdure.ops.maintenance.erase import finish_erasing
from perdure.runs.journal import thread_runs
from perdure.runs.maintenance import retention as runs
from perdure.snapshots.handle import release_expired
from perdure.storage import metrics
from perdure.storage.program import Flow, Program, Progress, maintain, read
from perdure.threads import externals
from perdure.threads.context import StoreContext


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction removed, or what a dry run would remove.

    Bytes are those in use inside the store. On PostgreSQL they shrink only when the server has vacuumed. `bytes_after`
    of a dry run is an estimate.
    """

    threads: int  # expired threads
    checkpoints: int  # checkpoints of expired threads, and those beyond the number that retention keeps
    runs: int  # finished runs whose journals were removed
    held: int  # expired threads that were kept because a pin, a graph or a run needs them
    bytes_before: int
    bytes_after: int
    expired: tuple[str, ...] = ()  # names of expired threads, up to 100
    damaged: int = 0  # threads, with their forks, that could not be read: see `perdure store verify`
    dry_run: bool = False
    memory: int = 0  # versions of items that were replaced, deleted or expired


def compact(
    ctx: StoreContext,
    *,
    dry_run: bool = False,
    vacuum: bool = False,
    progress: Progress | None = None,
) -> Flow[Compacted]:
    """Compact the store's tenant, or report what that would remove (`dry_run`), then reclaim space (`vacuum`)."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        done = Compacted(0, 0, 0, 0, 0, 0, dry_run=dry_run)
    elif dry_run:
        done = yield from _foresee(ctx, tenant, progress)
    else:
        done = yield from compact_tenant(ctx, tenant, progress)
    if vacuum and not dry_run:
        yield from maintain("reclaim")
    return done


def _foresee(ctx: StoreContext, tenant: int, progress: Progress | None) -> Flow[Compacted]:
    now = ctx.clock_us()
    before = yield from _used(now)
    gone = yield from retention.enforce(tenant, now, dry_run=True, progress=progress)
    swept = yield from runs.would_sweep(tenant, now)
    memory = yield from maintenance.would_sweep(tenant, now)
    return _compacted(gone, swept, before, max(0, before - gone.bytes), memory=memory, dry_run=True)


def compact_tenant(ctx: StoreContext, tenant: int, progress: Progress | None = None) -> Flow[Compacted]:
    """Compact one tenant, without returning space to the file system."""
    now = ctx.clock_us()
    before = yield from _used(now)
    yield from release_expired(ctx, tenant)
    # An erasure that another process began and did not finish.
    if (yield from read(partial(erase.marked, tenant))) is not None:
        yield from finish_erasing(ctx, tenant, full=False)
    swept = yield from thread_runs.sweep(tenant, now)
    gone = yield from retention.enforce(tenant, now, dry_run=False, progress=progress)
    swept += yield from runs.sweep_runs(tenant, ctx.clock_us)
    memory = yield from maintenance.sweep(ctx, tenant)
    yield from externals.collect(ctx, tenant)
    if (sink := metrics.sink) is not None:
        sink.record(metrics.COMPACTIONS, 1)
    return _compacted(gone, swept, before, (yield from _used(now)), memory=memory)


def _compacted(
    gone: retention.Removed, runs: int, before: int, after: int, *, memory: int = 0, dry_run: bool = False
) -> Compacted:
    counts = (gone.threads, gone.checkpoints, runs, gone.held)
    return Compacted(*counts, before, after, tuple(gone.names), gone.damaged, dry_run, memory)


def _used(now: int) -> Flow[int]:
    def program() -> Program[int]:
        sample, _ = yield from size_and_samples(now)
        return sample.bytes - sample.free_bytes

    return (yield from read(program))


def maintain_tenant(ctx: StoreContext, tenant: int) -> Flow[runs.DailyMaintenance]:
    """Run the daily maintenance of a tenant, for a worker."""
    done = yield from compact_tenant(ctx, tenant)
    return runs.DailyMaintenance(done.runs, done.threads, done.checkpoints)
