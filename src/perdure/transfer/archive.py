"""Archives: a thread goes into a store file, on a disk or in an object store; a stub row stays.

    1  copy      the thread is transferred into the file, which is a store
    2  verify    the file is opened where it lies now (an object is downloaded again) and every hash is checked
    3  remove    one transaction compares the source with the copy, removes the rows and adds the stub

A kill before 3 has committed changes nothing in the store, and the same call continues. A kill after 3 leaves records
that nothing needs, which the next compaction removes. `unarchive` replaces the stub in one transaction; the file stays.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from perdure.errors import Conflict, Damaged, NotFound, UsageError
from perdure.log import gc
from perdure.log.archived import Stub, add_stub, check_archived, drop_stub, find_place, list_stubs
from perdure.log.thread_table import ThreadRow, metadata_of, thread_or_stub
from perdure.runs.calls.state import RUN_KEY
from perdure.runs.domain import busy_threads
from perdure.runs.journal.adapter_tasks import drop_of_thread
from perdure.runs.journal.blobs import drop_loose_blobs
from perdure.runs.maintenance.held_threads import held_threads
from perdure.storage.objects import is_object_url, redacted_url
from perdure.storage.program import Batch, Flow, Program, drive, read, write, write_repair
from perdure.storage.urls import is_postgres, redacted, sqlite_path
from perdure.threads.context import Context
from perdure.threads.models import moment
from perdure.transfer.catalogue import BackupRow, add_backup
from perdure.transfer.files import local_file, store_and_name
from perdure.transfer.threads import copy_threads, thread_digest
from perdure.transfer.transfer import transfer_some

Opener = Callable[..., AbstractContextManager[Any]]  # `perdure.open` with the tenant and the keys of the source


@dataclass(frozen=True, slots=True)
class Archive:
    """A thread that was archived, and where it is."""

    name: str
    place: str
    at: datetime


def archive(opener: Opener, ctx: Context, name: str, place: str | os.PathLike[str]) -> Archive:
    """See `store.ops.archive`. Raises Conflict if it changed meanwhile: then nothing was removed."""
    tenant = drive(ctx.driver, ctx.tenant())
    if tenant is None:
        raise NotFound(f"there is no thread {name!r}")
    where = _place(place)
    if where == getattr(ctx.driver.capabilities.base, "path", None):
        raise UsageError(f"{where} is the store itself: name another file for the archive")
    drive(ctx.driver, _check(tenant, name))
    _copy(opener, ctx, name, where)
    with local_file(where) as path, opener(path, create=False) as copy:
        there = drive(copy._context.driver, copy._context.tenant()) or 0
        seen = drive(copy._context.driver, read(partial(thread_digest, there, name)))
        if not (report := copy.thread(name).verify()).ok:
            raise Damaged(f"the archive at {where} has problems, so nothing was removed: {report.problems[0]}")
        stub = Stub(name, where, ctx.clock_us())
        copied = BackupRow(ctx.entropy(16).hex(), "archive", where, tenant, stub.at, path.stat().st_size)
    gone = drive(ctx.driver, write(partial(_remove, tenant, stub, copied, seen), solo=True))
    drive(ctx.driver, _finish(ctx, tenant, gone))
    return Archive(name, where, moment(stub.at))


def unarchive(opener: Opener, ctx: Context, name: str, place: str | os.PathLike[str] | None = None) -> Archive:
    """See `store.ops.unarchive`. `place`: where the archive is now, if it was moved."""
    tenant = drive(ctx.driver, ctx.tenant())
    known = None if tenant is None else drive(ctx.driver, read(partial(find_place, tenant, name)))
    if tenant is None or known is None:
        raise NotFound(f"thread {name!r} is not archived in this store; store.ops.archives() lists what is")
    where = known if place is None else _place(place)
    with local_file(where) as path, opener(path, create=False) as source:
        drive(ctx.driver, write_repair(partial(_bring_back, source._context, tenant, name)))
    return Archive(name, where, moment(ctx.clock_us()))


def archives(ctx: Context) -> Flow[list[Archive]]:
    """What this tenant has archived."""
    tenant = yield from ctx.tenant()
    stubs = [] if tenant is None else (yield from read(partial(list_stubs, tenant)))
    return [Archive(stub.name, stub.place, moment(stub.at)) for stub in stubs]


def _place(place: str | os.PathLike[str]) -> str:
    text = os.fspath(place)
    if is_object_url(text):
        return redacted_url(text)
    if is_postgres(text) or sqlite_path(text) == ":memory:":
        raise UsageError(f"{redacted(text)!r}: an archive is a file or an object, such as s3://bucket/thread.db")
    return os.path.realpath(sqlite_path(text))


def _check(tenant: int, name: str) -> Flow[None]:
    """Raise UsageError if an unfinished run or graph needs it."""
    yield from read(partial(check_archived, tenant, name))
    row = yield from read(partial(thread_or_stub, tenant, name))
    if row is None:
        return
    if run := metadata_of(row).get(RUN_KEY):
        raise UsageError(f"thread {name!r} holds the state of run {run!r}: it stays with its run")
    busy = yield from read(partial(busy_threads, tenant, row.tree))
    if row.thread in busy or name in (yield from held_threads(tenant)):
        raise UsageError(f"an unfinished run or graph needs thread {name!r}: archive it when that is finished")


def _copy(opener: Opener, ctx: Context, name: str, where: str) -> None:
    if not is_object_url(where):
        with opener(where) as copy:
            transfer_some(ctx, copy._context, [name], [], "", None, move=False)
        return
    objects, key = store_and_name(where)
    if objects.exists(key):  # made by a call that was killed, or it is found to hold something else
        return
    with tempfile.TemporaryDirectory(prefix="perdure-archive-") as folder:
        path = Path(folder) / "archive.db"
        with opener(path) as copy:
            transfer_some(ctx, copy._context, [name], [], "", None, move=False)
        objects.put_file(key, path, create=True)


def _remove(tenant: int, stub: Stub, copied: BackupRow, seen: bytes) -> Program[ThreadRow]:
    row, threads = yield from gc.lock_tree(tenant, stub.name, None)
    if (yield from thread_digest(tenant, stub.name)) != seen:
        raise Conflict(
            f"the archive at {stub.place} holds another state of thread {stub.name!r}, which may have changed "
            "meanwhile: nothing was removed. Archive it at another place"
        )
    yield from gc.remove_threads(tenant, threads, [row])
    yield Batch(add_stub(tenant, stub))
    yield from add_backup(copied)
    return row


def _finish(ctx: Context, tenant: int, gone: ThreadRow) -> Flow[None]:
    ctx.cache.forget(tenant, gone.tree)
    yield from drop_of_thread(tenant, gone.thread)
    yield from drop_loose_blobs(tenant)


def _bring_back(source: Context, tenant: int, name: str) -> Program[None]:
    """Replace the stub by the thread."""
    yield from drop_stub(tenant, name)
    yield from copy_threads(source, tenant, [name], lambda _rows: None)
