"""`Snapshot`: one instant of a store, read through the same handles as the store itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import orjson

from perdure.errors import NotFound, UsageError
from perdure.log.cache import BaseCache
from perdure.memory.handle import Memory
from perdure.memory.scopes import search_alike
from perdure.runs.schedules.handle import ScheduleStore
from perdure.runs.store import RunStore
from perdure.snapshots import rows
from perdure.snapshots.diff import SnapshotChange, changed_rows, changes_after, in_pages, same_threads
from perdure.snapshots.rows import SnapshotRow
from perdure.snapshots.verify import snapshot_problems, verify_tenant
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Dialect, Flow, aside, either, read, write
from perdure.storage.twins import awaited, blocking, of_part
from perdure.threads.actions import noted
from perdure.threads.checks import check_limit
from perdure.threads.context import Handle, StoreContext
from perdure.threads.models import Report, moment
from perdure.threads.store import ThreadStore
from perdure.threads.thread_cache import ThreadCache

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.bundle import Bundle

_CACHE_BYTES = 4_000_000
_VERSIONED_RUNS = 10_000
_threads, _runs = attrgetter("store._threads"), attrgetter("store._runs")


def _schedules(snapshot: Snapshot) -> ScheduleStore:
    return ScheduleStore(snapshot.store._context)


class Snapshot(Handle):
    """Everything that was committed at one instant: threads, runs, questions, memory. Read-only.

    The database keeps what it can see until it is released.
    """

    def __init__(self, live: Store, row: SnapshotRow) -> None:
        self._live = live
        self._context = live._context
        self._row = row

    def __repr__(self) -> str:
        return f"<Snapshot {self.name!r}, {self.taken_at:%Y-%m-%d %H:%M:%S}>"

    @property
    def name(self) -> str:
        return self._row.name

    @property
    def taken_at(self) -> datetime:
        return moment(self._row.taken_at)

    @property
    def note(self) -> str | None:
        """The note that it was taken with. A role of PostgreSQL that is held to one tenant sees None."""
        return self._row.note

    @property
    def good(self) -> bool:
        """Whether it was marked good: a state to go back to."""
        return bool(self._row.good)

    @property
    def keep_until(self) -> datetime | None:
        """From then on daily maintenance releases it; None: it stays until it is released."""
        return None if self._row.keep_until is None else moment(self._row.keep_until)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What it is of, and what made it.

        `stores` has the version of each store, {store: [era, epoch, token]}. `made_by` has the versions of Perdure, the
        schema and Python, and the git commit of the folder in which the process worked, if there is one.
        """
        return dict(orjson.loads(self._row.manifest))

    @cached_property
    def store(self) -> Store:
        """The store as it was. Whatever would change it raises ReadOnlyStore."""
        self._row.check()
        live = self._context
        context = replace(
            live,
            driver=live.driver.at(self._row.epoch, self._row.token),
            clock_us=lambda: self._row.taken_at,  # what was not expired then is there
            cache=BaseCache(_CACHE_BYTES),
            threads=ThreadCache(),
            large_warned={},
        )
        search_alike(context, live)
        return type(self._live)(context)

    # The reads of the store, as of then.
    thread = of_part(_threads, ThreadStore.thread)
    threads, athreads = of_part(_threads, ThreadStore.threads), of_part(_threads, ThreadStore.athreads)
    get_run, aget_run = of_part(_runs, RunStore.get_run), of_part(_runs, RunStore.aget_run)
    runs, aruns = of_part(_runs, RunStore.runs), of_part(_runs, RunStore.aruns)
    questions, aquestions = of_part(_runs, RunStore.questions), of_part(_runs, RunStore.aquestions)
    replay, areplay = of_part(_runs, RunStore.replay), of_part(_runs, RunStore.areplay)
    schedules, aschedules = of_part(_schedules, ScheduleStore.schedules), of_part(_schedules, ScheduleStore.aschedules)

    def memory(self, *labels: str) -> Memory:
        """Return the memory of a namespace, as `store.memory` does."""
        return self.store.memory(*labels)

    @blocking
    def versions(self) -> Flow[dict[str, list[str]]]:
        """Return the versions of code, models and prompts that the newest 10,000 runs of this tenant had recorded.

        The keys are "code" (`@perdure.durable(version=…)`), "model" and "prompt" (`perdure.tag(model=…, prompt=…)`).
        """
        past, limit = self.store, _VERSIONED_RUNS
        infos = yield from either(lambda: past.runs(limit=limit), lambda: past.aruns(limit=limit))
        recorded = {"code": {info.version for info in infos}}
        recorded |= {name: {info.tags.get(name, "") for info in infos} for name in ("model", "prompt")}
        return {name: sorted(values - {""}) for name, values in recorded.items()}

    aversions = awaited(versions)

    @blocking
    def verify(self) -> Flow[Report]:
        """Check every record and hash of this tenant that the snapshot sees, and that it sees what it saw at first."""
        if problems := (yield from snapshot_problems(self._context)):  # what it shows cannot be relied on then
            return Report(0, 0, tuple(problems))
        past = self.store
        return (
            yield from either(
                lambda: past._run(verify_tenant(past._context)), lambda: past._arun(verify_tenant(past._context))
            )
        )

    averify = awaited(verify)

    @blocking
    def diff(
        self, other: Snapshot | str | None = None, *, limit: int | None = None, after: str | None = None
    ) -> Flow[list[SnapshotChange]]:
        """Return the threads, runs, items, deployments and schedules that have changed since, or until a later one.

        `paths()` of a change says where. `limit` returns a page; for the next one pass the `cursor` of its last change
        as `after`. The pages of two snapshots make up their difference. Since the live store changes between two pages,
        what changed meanwhile is in the pages that follow, if it comes after the cursor.
        """
        check_limit(limit)
        if isinstance(other, str):
            other = yield from find_snapshot(self._live, other)
        if other is not None and other._row.epoch < self._row.epoch:
            raise UsageError(f"snapshot {other.name!r} is older than {self.name!r}: the older one comes first")
        tenant = yield from self._context.tenant()
        if tenant is None:
            return []
        later, until = (self._live, None) if other is None else (other.store, other._row)
        now = later._context.clock_us()
        changes, maybe_same = yield from read(partial(changed_rows, tenant, self._row, until, now))
        page: list[SnapshotChange] = []
        for some in in_pages(changes_after(changes, after), limit):  # contents are compared for one page only
            if limit is not None and len(page) >= limit:
                break
            unsure = {change.name for change in some if change.what == "thread"} & maybe_same
            same = yield from same_threads(self.store._context, later._context, tenant, unsure)
            page += [
                replace(change, _stores=(self.store, later))
                for change in some
                if change.what != "thread" or change.name not in same
            ]
        return page[:limit]

    adiff = awaited(diff)

    @blocking
    def export(
        self,
        file: str | os.PathLike[str],
        *,
        threads: Sequence[str] | None = None,
        runs: Sequence[str] | None = None,
        namespaces: Sequence[Sequence[str]] | None = None,
        since: Snapshot | str | None = None,
        sign: str | os.PathLike[str] | None = None,
    ) -> Flow[Bundle]:
        """Copy what this tenant had into a bundle that can be given away.

        `file` is a new file or a new object (`s3://bucket/name`). `perdure.ops.open_bundle` opens it, read-only, and
        refuses it if any byte was changed.

        `threads` and `runs` are ids or patterns (`support-*`), `namespaces` their labels, with all below; without any
        of the three it is everything. `since`: of that, the threads, runs and namespaces that have changed since an
        older snapshot. `sign` names a private Ed25519 key (PEM). A bundle of an encrypted store is encrypted with the
        same keys.
        """
        from perdure.snapshots.bundle import export

        work = partial(export, self, file, threads=threads, runs=runs, namespaces=namespaces, since=since, sign=sign)
        return aside(work)

    aexport = awaited(export)

    @blocking
    def mark_good(self, good: bool = True) -> Flow[None]:
        """Mark this as a state to go back to."""
        yield from write(partial(rows.update, self._row.token, good=int(good)))
        self._row = self._row._replace(good=int(good))

    amark_good = awaited(mark_good)

    @blocking
    def release(self, *, who: str | None = None) -> Flow[None]:
        """Release the snapshot: rows that only it could see are removed. Reading it fails from then on.

        `who` is recorded in `store.ops.actions()`."""
        return noted(self._context, who, "release", f"snapshot {self.name}", self._release())

    arelease = awaited(release)

    def _release(self) -> Flow[None]:
        return release_all([self._row.token], self._context.driver.dialect)

    @blocking
    def held_bytes(self) -> Flow[int]:
        """Return how many bytes releasing it would free: 0 if it was released."""
        tables = {table.name: table.names for table in versioned_tables().values()}
        return (yield from read(partial(rows.held_bytes, self._row.epoch, tables, self._context.driver.dialect)))

    aheld_bytes = awaited(held_bytes)


def list_snapshots(live: Store) -> Flow[list[Snapshot]]:
    """Return the snapshots that are kept, the newest first."""
    return [Snapshot(live, row) for row in (yield from read(rows.read_all))]


def find_snapshot(live: Store, name: str) -> Flow[Snapshot]:
    """Return a snapshot by its name. Raises NotFound."""
    for snapshot in (yield from list_snapshots(live)):
        if snapshot.name == name:
            return snapshot
    raise NotFound(f"there is no snapshot {name!r}; `perdure snapshots` names those that are kept")


def own_snapshot(live: Store, snapshot: Snapshot | str) -> Flow[Snapshot]:
    """Return a snapshot of this store, by name or handle. Raises NotFound, and UsageError for that of another store."""
    if isinstance(snapshot, str):
        return (yield from find_snapshot(live, snapshot))
    if snapshot._context.driver is not live._context.driver:
        raise UsageError("this snapshot belongs to another store: restore it there")
    return Snapshot(live, snapshot._row)


def release_expired(ctx: StoreContext, tenant: int) -> Flow[int]:
    """Release the snapshots whose time is over, by `keep_until` or by retention. Return how many."""
    tokens = yield from read(partial(rows.expired, tenant, ctx.clock_us()))
    if tokens:
        yield from release_all(tokens, ctx.driver.dialect)
    return len(tokens)


def release_all(tokens: Sequence[str], dialect: Dialect) -> Flow[None]:
    """Remove snapshots, and the rows that no other snapshot can see, in short transactions.

    If the process is killed in between, the next release removes the remaining rows.
    """
    yield from write(partial(rows.drop, tokens))
    while (yield from write(partial(rows.collect, list(versioned_tables().values()), dialect), solo=True)):
        pass
