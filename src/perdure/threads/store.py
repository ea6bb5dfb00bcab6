"""The part of a store (`ops/store.py`) that opens, lists and deletes threads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from perdure.errors import Archived, UsageError
from perdure.log import gc
from perdure.log.archived import drop_stubs
from perdure.log.thread_listing import EARLIEST, LATEST, ThreadFilter, ThreadPosition, count_threads, list_threads
from perdure.log.thread_table import no_thread
from perdure.storage.program import Flow, read, write
from perdure.storage.twins import awaited, blocking
from perdure.threads.checks import check_limit, check_metadata, check_name, microseconds, parse_cursor
from perdure.threads.context import Cursor, Handle, StoreContext
from perdure.threads.flows import newest_id
from perdure.threads.models import Pruned, ThreadInfo
from perdure.threads.thread import Thread

DEFAULT_TENANT = "default"
CACHE_BYTES = 64 * 1024 * 1024  # some seventy hot threads: a writer's compressor takes most of a megabyte


class ThreadStore(Handle):
    """The threads of one tenant."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    def thread(self, name: str, *, metadata: Mapping[str, Any] | None = None) -> Thread:
        """Return a handle of a thread, without I/O. The first save creates the thread and merges the metadata."""
        return Thread(self._context, Cursor(check_name(name), merge=check_metadata(metadata)))

    @blocking
    def threads(
        self,
        *,
        where: Mapping[str, Any] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        name_prefix: str | None = None,
        before: str | None = None,
        limit: int | None = 100,
    ) -> Flow[list[ThreadInfo]]:
        """List the threads that meet all conditions, the most recently saved first.

        `where` selects threads whose metadata has all its items, `since` and `until` those last saved then. `before` is
        the `cursor` of the last thread of a page: the next page begins after it.
        """
        filters, most = _filter(where, since, until, name_prefix), check_limit(limit)
        place = ThreadPosition(*(() if before is None else parse_cursor(before)))
        tenant = yield from self._context.tenant()
        if tenant is None:
            return []
        rows = yield from read(partial(list_threads, tenant, filters, place, 2**62 if most is None else most))
        return [ThreadInfo.of(row) for row in rows]

    athreads = awaited(threads)

    @blocking
    def count_threads(
        self,
        *,
        where: Mapping[str, Any] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        name_prefix: str | None = None,
        limit: int | None = 1000,
    ) -> Flow[int]:
        """Count the threads that `threads` lists. The count stops at `limit`; None counts all, however many."""
        filters, most = _filter(where, since, until, name_prefix), check_limit(limit)
        tenant = yield from self._context.tenant()
        if tenant is None:
            return 0
        return (yield from read(partial(count_threads, tenant, filters, 2**62 if most is None else most)))

    acount_threads = awaited(count_threads)

    @blocking
    def delete_thread(self, thread: Thread | str, *, force: bool = False) -> Flow[Pruned]:
        """Delete a thread and every record that no fork of it needs.

        Late writes to it are refused. Raises `Pinned` if a checkpoint is pinned, unless `force`.
        """
        name, number = named_thread(self._context, thread)
        tenant = yield from self._context.tenant()
        if tenant is None:
            raise no_thread(name)
        try:
            newest = yield from read(partial(newest_id, tenant, name))
            removed = yield from gc.delete(tenant, name, number, force=force)
        except Archived:  # deleting an archived thread frees its name; the archive file stays
            yield from write(partial(drop_stubs, tenant, "thread", name))
            return Pruned(0)
        if newest is not None:
            self._context.threads.mark_deleted((tenant, name), newest)
        return Pruned(removed)

    adelete_thread = awaited(delete_thread)


def named_thread(ctx: StoreContext, thread: Thread | str) -> tuple[str, int | None]:
    """Return the name of a thread, and its number if a handle was passed that knows it."""
    if not isinstance(thread, Thread):
        return check_name(thread), None
    if not ctx.is_same_tenant(thread._context):
        raise UsageError("this thread belongs to another store or tenant: use that one, or give the thread's name")
    return thread.name, thread._cursor.thread


def _filter(
    where: Mapping[str, Any] | None, since: datetime | None, until: datetime | None, name_prefix: str | None
) -> ThreadFilter:
    return ThreadFilter(
        check_metadata(where) or {},
        EARLIEST if since is None else microseconds(since, "since"),
        LATEST if until is None else microseconds(until, "until"),
        check_name(name_prefix) if name_prefix else "",
    )
