"""`perdure.open` and the `Store` that it returns, composed of the parts of each layer.

A part (`threads/store.py`, `runs/store.py`, `snapshots/store.py`, `operations.py`) knows nothing of the others. A store
may be used from any thread and any event loop of the process that opened it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import UsageError
from perdure.log.cache import BaseCache, TenantCache
from perdure.memory.analyzers import analyzer_of
from perdure.memory.handle import Memory
from perdure.memory.scopes import INDEX_BYTES, searcher_of
from perdure.ops.operations import Operations
from perdure.runs.engine.runtime import close_runtime, runtime_of
from perdure.runs.execution.execution import LEASE_US
from perdure.runs.schedules.handle import ScheduleStore
from perdure.runs.starting import astarting, starting
from perdure.runs.store import RunStore
from perdure.snapshots.handle import Snapshot
from perdure.snapshots.store import SnapshotStore
from perdure.storage.closing import AsyncClosing
from perdure.storage.prepared import settle_quietly
from perdure.storage.program import Driver, Flow, Progress
from perdure.storage.twins import awaited, blocking, of_part
from perdure.storage.urls import open_driver
from perdure.threads.checks import check_name
from perdure.threads.context import WARN_BYTES, Handle, StoreContext
from perdure.threads.externals import Contents
from perdure.threads.store import CACHE_BYTES, DEFAULT_TENANT, ThreadStore
from perdure.values.registry import Codec

if TYPE_CHECKING:  # imported where it is used
    from perdure.encryption.keys import KeyProvider
    from perdure.memory.large import SearchIndex
    from perdure.runs.maintenance.retention import DailyMaintenance
    from perdure.teams.members import TeamInfo
    from perdure.teams.team import Team
    from perdure.transfers.catalogue import Restored


_threads, _runs = attrgetter("_threads"), attrgetter("_runs")


def open_store(
    url: str | os.PathLike[str],
    *,
    trust: Sequence[str] = (),
    durability: Literal["full", "normal", "replicated"] = "full",
    tenant: str = DEFAULT_TENANT,
    timeout_s: float = 30.0,
    create: bool = True,
    read_only: bool = False,
    cache_bytes: int = CACHE_BYTES,
    memory_cache_bytes: int = INDEX_BYTES,
    lease_s: float = LEASE_US / 1e6,
    warn_bytes: int = WARN_BYTES,
    keys: KeyProvider | bytes | Sequence[bytes] | Mapping[str, Any] | Literal["env"] | None = None,
    objects: str | os.PathLike[str] | None = None,
    embedder: Any = None,
    words: str | Callable[[str], list[str]] = "english",
    search_index: SearchIndex | None = None,
    **options: Any,
) -> Store:
    """Open a store: a path or `sqlite:///path`, `:memory:`, or `postgresql://…`. A new store is created by default.

    `trust` names module prefixes whose data classes may be saved and loaded without being registered one by one.
    `durability="normal"` may lose the last commits at a power loss, never more, and never corrupts. `"replicated"` also
    waits until a standby of PostgreSQL has applied each commit. `timeout_s` is how long to wait for other writers.
    `create=False` raises if there is no store. With `read_only=True` the database refuses every write (ReadOnlyStore).
    `lease_s` is how long a run stays with a process that stopped renewing its lease. A state larger than `warn_bytes`
    logs a warning with the path of its largest value. `keys` (a `KeyFile`, `StaticKeys`, 32 bytes, or "env" for the
    file that PERDURE_KEYS names) encrypts what is stored; data that is not encrypted is then refused. `objects`, a
    folder or `s3://bucket/folder`, is where values of `perdure.External` are. `embedder` makes memory searchable by
    meaning: "local", "SERVICE:MODEL", a function from texts to vectors, an object with `embed_documents` and
    `embed_query`, or a model of sentence-transformers. With None, items are found by their words. `words` chooses what
    cuts and stems these: "english", "simple", "ngrams", a language of Snowball such as "german", or a function from a
    text to its terms. With `search_index` (`perdure.memory.qdrant.QdrantIndex`), namespaces of more than 50,000 items
    are searched there. Other options are passed to the driver.
    """
    check_name(tenant, "tenant")
    if not lease_s > 0:
        raise UsageError(f"lease_s={lease_s!r}: a number of seconds above 0")
    analyzer = analyzer_of(words)
    wrapped = _encrypting(keys) if keys is not None else None  # first: wrong keys must not create a store
    keys = None  # error reporters show the variables of a frame: no key may be in it when the next lines raise
    opened = {"create": create and not read_only, "read_only": read_only}
    driver = open_driver(url, durability=durability, timeout_s=timeout_s, **opened, **options)
    if wrapped is not None:
        driver = wrapped(driver)
    context = StoreContext(driver, Codec(trust=trust), BaseCache(cache_bytes), tenant, warn_bytes=warn_bytes)
    if objects is not None:
        _keep_values_at(objects, context)
    searcher_of(context).scopes, searcher_of(context).words = TenantCache(memory_cache_bytes), analyzer
    if (cache := driver.capabilities.keys) is not None:  # texts in memory are dropped with the key that opened them
        cache.listen(context.cache)
        cache.listen(context.threads)
        cache.listen(searcher_of(context).scopes)
    if embedder is not None:
        from perdure.memory.embed import embedding_of

        searcher_of(context).embedding = embedding_of(embedder)
    if search_index is not None:
        if driver.capabilities.keys is not None:
            raise UsageError(
                "search_index= has vectors in the clear, and this store is encrypted: leave one of them out"
            )
        searcher_of(context).index = search_index
    searcher_of(context).stores_indexes = not read_only
    runtime_of(context).lease_us = int(lease_s * 1e6)
    if not read_only:
        settle_quietly(driver)
    return Store(context)


open = open_store  # the name in `perdure`


def _keep_values_at(objects: str | os.PathLike[str], context: StoreContext) -> None:
    from perdure.storage.object_folder import objects_at

    context.objects = objects_at(objects)
    context.codec = context.codec.with_values(Contents(context))


def _encrypting(keys: object) -> Callable[[Driver], Driver]:
    from perdure.ops.keys import encrypting

    return encrypting(keys)


def restore_backup(
    backup: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Restored:
    """Restore a backup (a path or an object's URL) into a new file or an empty schema, and verify every hash.

    Runs that were running are queued again. A process that used the store before cannot continue in the restored one.
    `options` are those of `perdure.open`: `schema=`, `keys=`. `progress` is called with (done, total) bytes, or rows on
    PostgreSQL.
    """
    from perdure.transfers.restore import restore

    return restore(open_store, backup, url, progress=progress, options=options)


@contextmanager
def open_bundle(
    place: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Iterator[Snapshot]:
    """Open the snapshot in a bundle, read-only, for the length of a `with` block.

    Raises Damaged if any byte of the bundle was changed. With `key`, a public Ed25519 key (PEM), it also raises Damaged
    if another key signed it. `options` are those of `perdure.open`: `keys=`, `trust=`, `tenant=`. A copy of the bundle
    is opened, so the bundle itself is only read.
    """
    from perdure.snapshots.bundle import checked_copy

    with checked_copy(place, key) as (path, bundle), open_store(path, **{"tenant": bundle.tenant, **options}) as store:
        yield store.get_snapshot(bundle.snapshot)


def _schedules(store: Store) -> ScheduleStore:
    return ScheduleStore(store._context)


class Store(Handle, AsyncClosing):
    """One database, as one tenant sees it. The methods for operators are under `ops`."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context
        self._threads, self._runs = ThreadStore(context), RunStore(context)

    def __repr__(self) -> str:
        return f"<Store {self._context.driver!r}, tenant {self._context.tenant_name!r}>"

    def tenant(self, name: str) -> Store:
        """Return the same database as another tenant sees it: none of this tenant's threads and runs are in it.

        Closing one of these stores closes all of them.
        """
        context = replace(self._context, tenant_name=check_name(name, "tenant"), known_tenant=None)
        if context.codec.values is not None:  # large values are those of a tenant
            context.codec = context.codec.with_values(Contents(context))
        return Store(context)

    thread = of_part(_threads, ThreadStore.thread)
    threads, athreads = of_part(_threads, ThreadStore.threads), of_part(_threads, ThreadStore.athreads)
    count_threads = of_part(_threads, ThreadStore.count_threads)
    acount_threads = of_part(_threads, ThreadStore.acount_threads)
    delete_thread = of_part(_threads, ThreadStore.delete_thread)
    adelete_thread = of_part(_threads, ThreadStore.adelete_thread)

    run, arun = starting(of_part(_runs, RunStore.run)), astarting(of_part(_runs, RunStore.arun))
    start, astart = starting(of_part(_runs, RunStore.start)), astarting(of_part(_runs, RunStore.astart))
    get_run, aget_run = of_part(_runs, RunStore.get_run), of_part(_runs, RunStore.aget_run)
    runs, aruns = of_part(_runs, RunStore.runs), of_part(_runs, RunStore.aruns)
    count_runs, acount_runs = of_part(_runs, RunStore.count_runs), of_part(_runs, RunStore.acount_runs)
    questions, aquestions = of_part(_runs, RunStore.questions), of_part(_runs, RunStore.aquestions)
    answer, aanswer = of_part(_runs, RunStore.answer), of_part(_runs, RunStore.aanswer)
    send, asend = of_part(_runs, RunStore.send), of_part(_runs, RunStore.asend)
    bulk, abulk = of_part(_runs, RunStore.bulk), of_part(_runs, RunStore.abulk)
    retry, aretry = of_part(_runs, RunStore.retry), of_part(_runs, RunStore.aretry)
    fork, afork = of_part(_runs, RunStore.fork), of_part(_runs, RunStore.afork)
    delete_run, adelete_run = of_part(_runs, RunStore.delete_run), of_part(_runs, RunStore.adelete_run)
    replay, areplay = of_part(_runs, RunStore.replay), of_part(_runs, RunStore.areplay)

    schedule, aschedule = of_part(_schedules, ScheduleStore.schedule), of_part(_schedules, ScheduleStore.aschedule)
    schedules, aschedules = of_part(_schedules, ScheduleStore.schedules), of_part(_schedules, ScheduleStore.aschedules)
    get_schedule = of_part(_schedules, ScheduleStore.get_schedule)
    aget_schedule = of_part(_schedules, ScheduleStore.aget_schedule)

    def memory(self, *labels: str, raw: bool = False) -> Memory:
        """Return the memory of a namespace, such as `store.memory("users", "alice")`. Does no I/O.

        A label may have any characters. `raw` decodes values to a readable form that needs none of your classes.
        """
        return Memory(self._context, labels, raw=raw)

    # SnapshotStore gets the whole store: the objects that a snapshot returns read through it.
    snapshot, asnapshot = (
        of_part(SnapshotStore, SnapshotStore.snapshot),
        of_part(SnapshotStore, SnapshotStore.asnapshot),
    )
    snapshots, asnapshots = (
        of_part(SnapshotStore, SnapshotStore.snapshots),
        of_part(SnapshotStore, SnapshotStore.asnapshots),
    )
    get_snapshot = of_part(SnapshotStore, SnapshotStore.get_snapshot)
    aget_snapshot = of_part(SnapshotStore, SnapshotStore.aget_snapshot)
    at, aat = of_part(SnapshotStore, SnapshotStore.at), of_part(SnapshotStore, SnapshotStore.aat)
    restore, arestore = of_part(SnapshotStore, SnapshotStore.restore), of_part(SnapshotStore, SnapshotStore.arestore)

    def team(self, name: str) -> Team:
        """Return a team of agents that send each other messages. Does no I/O."""
        from perdure.teams.team import Team

        return Team(self, name)

    @blocking
    def teams(self) -> Flow[list[TeamInfo]]:
        """List the teams of this tenant, the oldest first."""
        from perdure.teams.members import list_teams

        return list_teams(self._context)

    ateams = awaited(teams)

    @blocking
    def version(self) -> Flow[str]:
        """Return a text that changes with every commit of any process, so that a reader knows when to look again.

        Compare it with an earlier one of the same store object. On PostgreSQL it also changes with commits elsewhere in
        the same server.
        """
        from perdure.ops.overview import version

        return version(self._context)

    aversion = awaited(version)

    @property
    def ops(self) -> Operations:
        """The methods for operators: verify, measure, retention, compaction, erasure, copies, keys."""
        return Operations(self)

    def close(self) -> None:
        """Wait for running operations, then close the database. May be called twice."""
        self._runs._runtime.claims.settle()
        self._context.driver.close()
        close_runtime(self._context)

    async def aclose(self) -> None:
        """`close`, awaited."""
        await self._runs._runtime.claims.asettle()
        await self._context.driver.aclose()
        close_runtime(self._context)

    def _open(self, url: str | os.PathLike[str], **options: Any) -> Store:
        """Open another store. Lower layers, which cannot import this module, use it to copy into one."""
        return open_store(url, **options)

    def _maintain_tenant(self, tenant: int) -> Flow[DailyMaintenance]:
        from perdure.ops.maintenance.compaction import maintain_tenant

        return maintain_tenant(self._context, tenant)
