"""`store.ops.health()`: the changes that a crash would lose now, and figures of the store that are cheap to read.

No query here scans a whole table: counts stop at a limit, and other queries read the ends of indexes. A test checks the
query plans. Figures from the file system (the disk, the write-ahead log) are read after the transaction.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from perdure.log import store_size
from perdure.log.store_size import DAY_US, Sample
from perdure.runs.journal.rows import STATUSES
from perdure.storage.program import Batch, Flow, Program, Row, Rows, Sql, read
from perdure.threads.autosave import Unsaved, unsaved_changes
from perdure.threads.context import StoreContext
from perdure.threads.models import moment

THREADS_MAX = 100_000
RUNS_MAX = 10_000
_AMONG = 1_000  # the oldest waiting run is looked for among this many
_YEARS_US = 100 * 365 * DAY_US

_THREADS = Sql(f"SELECT count(*) FROM (SELECT 1 FROM thread WHERE tenant = :tenant LIMIT {THREADS_MAX}) AS counted")
_RUNS = Sql(
    " UNION ALL ".join(
        f"SELECT '{status}', (SELECT count(*) FROM "
        f"(SELECT 1 FROM run WHERE tenant = :tenant AND status = '{status}' LIMIT {RUNS_MAX}) AS counted)"
        for status in STATUSES
    )
)
_OLDEST = Sql(
    f"""SELECT id, changed_at FROM (SELECT id, changed_at FROM run WHERE tenant = :tenant AND status = :status
    ORDER BY run LIMIT {_AMONG}) AS some_of_them ORDER BY changed_at LIMIT 1"""
)
# The index has minutes, the row has microseconds.
_LAST_SAVE = Sql(
    """SELECT max(updated_at) FROM thread WHERE tenant = :tenant AND active = (
        SELECT active FROM thread WHERE tenant = :tenant ORDER BY active DESC LIMIT 1)"""
)
_RETENTION = Sql("""SELECT count(*) FROM meta WHERE key = :key
    AND (value LIKE '%"threads":%' OR value LIKE '%"checkpoint%')""")  # the policy of all the tenant's threads
_COPIES = Sql("SELECT max(at), max(restored_at) FROM copy WHERE kind = 'backup'")
_FILE = Sql(sqlite="SELECT file FROM pragma_database_list WHERE name = 'main'", postgres="SELECT ''")
QUERIES = (_THREADS, _RUNS, _OLDEST, _LAST_SAVE)  # on tables that grow


class WaitingRun(NamedTuple):
    """A run, and since when it has had its status."""

    id: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Health:
    """Figures of a store. Sizes and backups are those of the whole store, all others are of one tenant."""

    at: datetime
    unsaved: tuple[Unsaved, ...]  # the changes that a crash of this process would lose, for each open autosave
    last_save_at: datetime | None
    threads: int  # counted up to THREADS_MAX
    runs: dict[str, int]  # by status, each counted up to RUNS_MAX
    oldest_waiting: WaitingRun | None
    oldest_stuck: WaitingRun | None
    bytes: int
    free_bytes: int  # inside the store, to be reused
    wal_bytes: int | None  # None: PostgreSQL, or in memory
    disk_free_bytes: int | None  # None: PostgreSQL, whose disk is not visible; or in memory
    growth_bytes_per_day: float | None  # None: not known yet
    has_retention: bool  # a policy for all threads of this tenant; single threads may have their own
    last_backup_at: datetime | None
    last_restored_at: datetime | None  # when a backup was last restored and found whole

    @property
    def unsaved_changes(self) -> int:
        """The number of changes that a crash of this process would lose."""
        return sum(each.changes for each in self.unsaved)

    @property
    def unsaved_s(self) -> float:
        """The age of the oldest unsaved change, in seconds."""
        return max((each.seconds for each in self.unsaved), default=0.0)

    @property
    def disk_full_at(self) -> datetime | None:
        """When the disk will be full at this growth, or None if the store does not grow or its growth is unknown."""
        if self.disk_free_bytes is None or self.growth_bytes_per_day is None or self.growth_bytes_per_day <= 0:
            return None
        days = (self.disk_free_bytes + self.free_bytes) / self.growth_bytes_per_day
        return self.at + timedelta(days=days) if days * DAY_US < _YEARS_US else None


class Facts(NamedTuple):
    """The figures that come from the database."""

    size: Sample
    samples: list[Sample]
    copies: Row
    file: str
    threads: int = 0
    runs: Sequence[Row] = ()
    waiting: Row | None = None
    stuck: Row | None = None
    last_save: int | None = None
    policies: int = 0


def health(ctx: StoreContext) -> Flow[Health]:
    """Return the health of the store. Writes nothing: workers record its size."""
    tenant = yield from ctx.tenant()
    now = ctx.clock_us()
    facts = yield from read(partial(_facts, tenant, now))
    return _health_of(ctx, facts, now)


def whole_store(ctx: StoreContext) -> Flow[Health]:
    """Return the figures of the whole store, without those of a tenant. Writes nothing."""
    now = ctx.clock_us()
    return _health_of(ctx, (yield from read(partial(_facts, None, now))), now)


def _facts(tenant: int | None, now: int) -> Program[Facts]:
    size, samples = yield from store_size.size_and_samples(now)
    [[copies], [(file,)]] = yield Batch(_COPIES(), _FILE())
    if tenant is None:
        return Facts(size, samples, copies, file or "")
    return (yield from _of_tenant(tenant, Facts(size, samples, copies, file or "")))


def _of_tenant(tenant: int, facts: Facts) -> Generator[Batch, list[Rows], Facts]:
    [[(threads,)], runs, waiting, stuck, [(last_save,)], [(policies,)]] = yield Batch(
        _THREADS(tenant=tenant),
        _RUNS(tenant=tenant),
        _OLDEST(tenant=tenant, status="waiting"),
        _OLDEST(tenant=tenant, status="stuck"),
        _LAST_SAVE(tenant=tenant),
        _RETENTION(tenant=tenant, key=f"retention {tenant}"),
        last=True,
    )
    return facts._replace(
        threads=threads,
        runs=runs,
        waiting=waiting[0] if waiting else None,
        stuck=stuck[0] if stuck else None,
        last_save=last_save,
        policies=policies,
    )


def _health_of(ctx: StoreContext, facts: Facts, now: int) -> Health:
    backup, restored = facts.copies
    return Health(
        at=moment(now),
        unsaved=unsaved_changes(ctx),
        last_save_at=_moment(facts.last_save),
        threads=facts.threads,
        runs={status: count for status, count in facts.runs if count},
        oldest_waiting=_waiting(facts.waiting),
        oldest_stuck=_waiting(facts.stuck),
        bytes=facts.size.bytes,
        free_bytes=facts.size.free_bytes,
        wal_bytes=_wal_bytes(facts.file),
        disk_free_bytes=shutil.disk_usage(os.path.dirname(facts.file)).free if facts.file else None,
        growth_bytes_per_day=store_size.growth_per_day([*facts.samples, facts.size]),
        has_retention=facts.policies > 0,
        last_backup_at=_moment(backup),
        last_restored_at=_moment(restored),
    )


def _moment(at: int | None) -> datetime | None:
    return None if at is None else moment(at)


def _waiting(row: Row | None) -> WaitingRun | None:
    return None if row is None else WaitingRun(row[0], moment(row[1]))


def _wal_bytes(file: str) -> int | None:
    if not file:
        return None
    try:
        return os.path.getsize(f"{file}-wal")
    except OSError:  # the log does not exist
        return 0
