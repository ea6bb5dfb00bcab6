"""Reads for an overview of a store: its queues, the processes that execute runs, its activity, tenants and version.

None of them reads more rows than a limit says, however large the store is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from perdure.errors import UsageError
from perdure.log.thread_table import MINUTE_US
from perdure.runs.engine.searching import is_live
from perdure.runs.journal import listing
from perdure.runs.journal.listing import RunFilter
from perdure.runs.journal.rows import STATUSES
from perdure.runs.run_table import ENDED_STATUSES, NO_TASK
from perdure.storage.program import Batch, Flow, Program, Sql, either, fetch, read
from perdure.threads.checks import check_limit, microseconds
from perdure.threads.context import StoreContext
from perdure.threads.models import moment

COUNTED_MAX = 10_000
_INTERVALS_MAX = 1_000
_HOUR_US = 3_600_000_000
_LIMITS = Sql("SELECT queue, concurrency, tenant_concurrency, rate FROM queue")
_WORKERS = Sql(
    """SELECT owner, count(*), min(changed_at), max(lease_until) FROM run
    WHERE status = 'running' AND tenant = :tenant AND owner IS NOT NULL GROUP BY owner ORDER BY owner"""
)
_TENANTS = Sql("SELECT name FROM tenant WHERE name > :after ORDER BY name LIMIT :limit")
_STARTED = Sql(
    f"""SELECT created_at, status FROM run WHERE tenant = :tenant AND created_at >= :since AND {NO_TASK}
    ORDER BY created_at DESC, run DESC LIMIT :limit"""
)
_ENDED = Sql(
    f"""SELECT changed_at, status FROM run
    WHERE tenant = :tenant AND changed_at >= :since AND status IN {ENDED_STATUSES} AND {NO_TASK}
    ORDER BY changed_at DESC LIMIT :limit"""
)
_SAVED = Sql(
    """SELECT updated_at FROM thread WHERE tenant = :tenant AND active >= :minute
    ORDER BY active DESC LIMIT :limit"""
)
# Queued and waiting runs have an index each. `wake_at` is 0 for a run that waits for nothing but a worker.
_DUE = Sql(
    "SELECT count(*), min(since) FROM ("
    + " UNION ALL ".join(
        f"""SELECT since FROM (
            SELECT CASE WHEN wake_at > changed_at THEN wake_at ELSE changed_at END AS since FROM run
            WHERE status = '{status}' AND queue = :queue AND wake_at <= :now AND tenant = :tenant
            LIMIT {COUNTED_MAX}) AS {name}"""
        for name, status in (("first", "queued"), ("second", "waiting"))
    )
    + ") AS due"
)
# On PostgreSQL the text changes when a writing transaction begins or ends. On SQLite it serves stores in memory only.
_VERSION = Sql(sqlite="SELECT total_changes()", postgres="SELECT pg_current_snapshot()::text")


@dataclass(frozen=True)
class QueueInfo:
    """A queue: how many runs it has by status, its limits, and what a worker could begin now."""

    name: str
    statuses: dict[str, int]
    concurrency: int | None
    tenant_concurrency: int | None
    rate: float | None
    due: int = 0
    """the runs that wait for a worker, queued ones and those that would resume; at most 10,000 of each are counted"""
    oldest_due_at: datetime | None = None
    """since when one of these has waited"""


@dataclass(frozen=True)
class WorkerInfo:
    """A process that executes runs."""

    owner: str
    runs: int
    since: datetime
    """when it began or resumed the oldest of these runs"""
    lease_until: datetime
    """until when it holds them, unless it renews its leases"""


@dataclass(frozen=True)
class Activity:
    """What happened in an interval that begins at `at`."""

    at: datetime
    runs: dict[str, int]
    """the runs that were started in it, by their present status"""
    ended: dict[str, int]
    """the runs that ended in it, by how they ended"""
    threads: int
    """how many threads were saved in it, and not since"""


def queues(ctx: StoreContext) -> Flow[list[QueueInfo]]:
    """Return the queues that have runs or limits, ordered by name."""
    limits: dict[str, tuple[Any, ...]] = {name: tuple(columns) for name, *columns in (yield from fetch(_LIMITS))}
    tenant = yield from ctx.tenant()
    kinds: list[listing.RunKind] = []
    if tenant is not None:
        kinds, _ = yield from read(partial(listing.counts, tenant, RunFilter(), 0, live=is_live(ctx)))
    names = sorted({*limits, *(kind.queue for kind in kinds)})
    due = {} if tenant is None or not names else (yield from read(partial(_due, tenant, names, ctx.clock_us())))
    infos = []
    for name in names:
        statuses = listing.totals([kind for kind in kinds if kind.queue == name], "status")
        count, oldest = due.get(name, (0, None))
        concurrency, of_tenant, rate = limits.get(name, (None, None, None))
        infos.append(QueueInfo(name, statuses, concurrency, of_tenant, rate, count, oldest))
    return infos


def _due(tenant: int, names: Sequence[str], now: int) -> Program[dict[str, tuple[int, datetime | None]]]:
    """Return how many runs of each queue wait for a worker, and since when the oldest of them does."""
    answers = yield Batch(*(_DUE(tenant=tenant, queue=name, now=now) for name in names), last=True)
    return {
        name: (count, None if oldest is None else moment(oldest))
        for name, [(count, oldest)] in zip(names, answers, strict=True)
    }


def workers(ctx: StoreContext) -> Flow[list[WorkerInfo]]:
    """Return the processes that execute runs of this tenant."""
    tenant = yield from ctx.tenant()
    rows = [] if tenant is None else (yield from fetch(_WORKERS, tenant=tenant))
    return [WorkerInfo(owner, count, moment(since), moment(until)) for owner, count, since, until in rows]


def tenants(after: str, limit: int | None) -> Flow[list[str]]:
    """Return the names of the tenants that this connection may see, in order."""
    most = check_limit(limit)
    return [name for (name,) in (yield from fetch(_TENANTS, after=after, limit=2**62 if most is None else most))]


def activity(ctx: StoreContext, since: datetime | None, intervals: int) -> Flow[list[Activity]]:
    """Count runs and threads in each interval up to now, the oldest interval first."""
    now = ctx.clock_us()
    start = now - _HOUR_US if since is None else microseconds(since, "since")
    if not 1 <= intervals <= _INTERVALS_MAX:
        raise UsageError(f"activity(intervals={intervals!r}): from 1 to {_INTERVALS_MAX}")
    if start >= now:
        raise UsageError("activity(since=…) must be in the past")
    width = -((start - now) // intervals)  # rounded up
    tenant = yield from ctx.tenant()
    none: tuple[_Times, _Times, list[int]] = ([], [], [])
    started, ended, saved = none if tenant is None else (yield from read(partial(_recent, tenant, start)))
    # If the limit cut off older rows, the intervals up to that of the oldest row are incomplete: they are left out.
    times = ([at for at, _ in started], [at for at, _ in ended], saved)
    first = -((start - max([start, *(each[-1] for each in times if len(each) >= COUNTED_MAX)])) // width)
    begun, over = (Counter(((at - start) // width, status) for at, status in runs) for runs in (started, ended))
    threads = Counter((at - start) // width for at in saved)
    return [
        Activity(moment(start + place * width), _at(begun, place), _at(over, place), threads[place])
        for place in range(first, intervals)
    ]


def _at(counts: Counter[tuple[int, str]], place: int) -> dict[str, int]:
    return {status: counts[place, status] for status in STATUSES if counts[place, status]}


_Times = list[tuple[int, str]]


def _recent(tenant: int, since: int) -> Program[tuple[_Times, _Times, list[int]]]:
    """Return when runs were started, when runs ended, and when threads were last saved, the newest first."""
    scope = {"tenant": tenant, "limit": COUNTED_MAX}
    started, ended, saved = yield Batch(
        _STARTED(**scope, since=since),
        _ENDED(**scope, since=since),
        _SAVED(**scope, minute=since // MINUTE_US),
        last=True,
    )
    return [(*one,) for one in started], [(*one,) for one in ended], sorted((at for (at,) in saved), reverse=True)


def version(ctx: StoreContext) -> Flow[str]:
    """Return a text that changes with every commit, of any process."""
    data_version = ctx.driver.capabilities.data_version
    if data_version is None:
        [[text]] = yield from fetch(_VERSION)
        return str(text)

    async def adata_version() -> str:
        return data_version()

    return (yield from either(data_version, adata_version))
