"""The store as far as threads go: opens them, lists them, deletes them, checks them.

`perdure.open` makes a store (`ops/store.py`), of which this is the lower half. A store may be used from any thread
and any event loop of the process that opened it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from perdure.errors import Archived, UsageError
from perdure.log import gc
from perdure.log.archived import drop_stubs
from perdure.log.domain import THREADS
from perdure.log.stats import count
from perdure.log.thread_table import list_threads, no_thread
from perdure.storage.closing import AsyncClosing
from perdure.storage.domains import register
from perdure.storage.program import Flow, Progress, read, write
from perdure.storage.twins import awaited, blocking
from perdure.threads.checks import check_limit, check_metadata, check_name
from perdure.threads.context import Cursor, Handle, StoreContext
from perdure.threads.flows import newest_id
from perdure.threads.models import Pruned, Report, Stats, ThreadInfo
from perdure.threads.thread import Thread

DEFAULT_TENANT = "default"
CACHE_BYTES = 64 * 1024 * 1024  # some seventy hot threads: a writer's compressor takes most of a megabyte


register(THREADS)


class ThreadStore(Handle, AsyncClosing):
    """One database, as one tenant sees it: its threads."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<Store {self._context.driver!r}, tenant {self._context.tenant_name!r}>"

    def _for_tenant(self, name: str) -> StoreContext:
        """The same database as another tenant sees it."""
        return replace(self._context, tenant_name=check_name(name, "tenant"), known_tenant=None)

    def thread(self, name: str, *, metadata: Mapping[str, Any] | None = None) -> Thread:
        """A handle of a thread. Does no I/O: the thread is made by its first save, which also merges the metadata."""
        return Thread(self._context, Cursor(check_name(name), merge=check_metadata(metadata)))

    @blocking
    def threads(
        self,
        *,
        where: Mapping[str, Any] | None = None,
        since: datetime | None = None,
        limit: int | None = 100,
    ) -> Flow[list[ThreadInfo]]:
        """Threads, the most recently saved first: those whose metadata has all of `where`, saved since `since`."""
        conditions = check_metadata(where) or {}
        since_us = None if since is None else _microseconds(since)
        most = check_limit(limit)
        tenant = yield from self._context.tenant()
        if tenant is None:
            return []
        rows = yield from read(partial(list_threads, tenant, conditions, since_us, 2**62 if most is None else most))
        return [ThreadInfo.of(row) for row in rows]

    athreads = awaited(threads)

    @blocking
    def delete_thread(self, thread: Thread | str, *, force: bool = False) -> Flow[Pruned]:
        """Delete a thread and every record that no fork of it needs. Late writes to it are refused. One with pinned
        checkpoints is deleted only with `force`; else it raises `Pinned`."""
        name, number = self._named(thread)
        tenant = yield from self._context.tenant()
        if tenant is None:
            raise no_thread(name)
        try:
            newest = yield from read(partial(newest_id, tenant, name))
            removed = yield from gc.delete(tenant, name, number, force=force)
        except Archived:  # the archive stays, the name is free
            yield from write(partial(drop_stubs, tenant, "thread", name))
            return Pruned(0)
        if newest is not None:
            self._context.threads.mark_deleted((tenant, name), newest)
        return Pruned(removed)

    adelete_thread = awaited(delete_thread)

    def close(self) -> None:
        """Finish what is running and close the database. May be called twice."""
        self._context.driver.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        await self._context.driver.aclose()

    def _named(self, thread: Thread | str) -> tuple[str, int | None]:
        """A thread that a caller means: its name, and its number if the handle knows it."""
        if not isinstance(thread, Thread):
            return check_name(thread), None
        if not self._context.is_same_tenant(thread._context):
            raise UsageError("this thread belongs to another store or tenant: use that one, or give the thread's name")
        return thread.name, thread._cursor.thread

    def _verify(self, progress: Progress | None) -> Flow[Report]:
        tenant = yield from self._context.tenant()
        if tenant is None:
            return Report(0, 0)
        from perdure.log import verify  # imported late: few programs verify

        return Report.of((yield from verify.verify_tenant(tenant, progress)))

    def _stats(self) -> Flow[Stats]:
        tenant = yield from self._context.tenant()
        if tenant is None:
            return Stats(0, 0, 0, 0, 0, 0)
        return Stats(*(yield from read(partial(count, tenant))))


def _microseconds(since: datetime) -> int:
    if not isinstance(since, datetime):
        raise UsageError(f"since= wants a datetime, not {type(since).__name__}")
    if since.tzinfo is None:
        since = since.astimezone()  # naive means local time, as everywhere in Python
    return int(since.timestamp() * 1_000_000)
