"""Archive a thread or a finished run: move it into a store file or an object, and leave a stub row.

The copy is verified in its place. Then one transaction compares the source with the copy, deletes the rows and adds the
stub. A kill before it changes nothing in the store; one after it leaves unused records, which the next compaction
removes. `unarchive` replaces the stub in one transaction; the file stays.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from perdure.errors import Conflict, Damaged, NotFound, UsageError
from perdure.log import gc
from perdure.log.archived import Sort, Stub, add_stub, check_archived, drop_stubs, find_place, list_stubs
from perdure.log.thread_table import ThreadRow, metadata_of, thread_or_stub
from perdure.runs.calls.state import RUN_KEY
from perdure.runs.domain import busy_threads
from perdure.runs.journal.blobs import drop_loose_blobs
from perdure.runs.journal.thread_runs import drop_of_thread
from perdure.runs.maintenance.held_threads import held_threads
from perdure.storage.objects import is_object_url, redacted_url
from perdure.storage.program import Batch, Flow, Program, Sql, drive, read, write, write_repair
from perdure.storage.sqlite.foreign import check_foreign
from perdure.storage.urls import is_postgres, redacted, sqlite_path
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.transfers.catalogue import BackupRow, add_backup
from perdure.transfers.files import local_file, store_and_name
from perdure.transfers.run_rows import drop_run
from perdure.transfers.runs import copy_run, lock_family, run_digest
from perdure.transfers.threads import copy_digest, copy_threads
from perdure.transfers.transfer import transfer_some

Opener = Callable[..., AbstractContextManager[Any]]  # `perdure.open` with the tenant and the keys of the source
_FORKS = Sql("SELECT id FROM run WHERE tenant = :tenant AND origin = :run AND root <> :root LIMIT 1")


@dataclass(frozen=True, slots=True)
class Archive:
    """An archived thread or run, and the place of its archive."""

    kind: Sort
    name: str
    place: str
    at: datetime


def archive(opener: Opener, ctx: StoreContext, kind: Sort, name: str, place: str | os.PathLike[str]) -> Archive:
    """Archive as `store.ops.archive` documents. Raises Conflict, and removes nothing, if it changed meanwhile."""
    tenant = drive(ctx.driver, ctx.tenant())
    if tenant is None:
        raise NotFound(f"there is no {kind} {name!r}")
    where = _place(place)
    if where == getattr(ctx.driver.capabilities.base, "path", None):
        raise UsageError(f"{where} is the store itself: name another file for the archive")
    drive(ctx.driver, _check(tenant, kind, name))
    _copy(opener, ctx, kind, name, where)
    with _opened(opener, where) as (path, copy):
        there = drive(copy._context.driver, copy._context.tenant())
        seen, threads = drive(copy._context.driver, read(partial(_digest, there, kind, name)))
        for thread in threads:
            if not (report := copy.thread(thread).verify()).ok:
                raise Damaged(f"the archive at {where} has problems, so nothing was removed: {report.problems[0]}")
        stub = Stub(kind, name, where, ctx.clock_us())
        copied = BackupRow(ctx.entropy(16).hex(), "archive", where, tenant, stub.at, path.stat().st_size)
    remove = _remove_thread if kind == "thread" else _remove_run
    gone = drive(ctx.driver, write(partial(remove, tenant, stub, copied, seen), solo=True))
    drive(ctx.driver, _finish(ctx, tenant, gone))
    return Archive(kind, name, where, moment(stub.at))


def unarchive(
    opener: Opener, ctx: StoreContext, kind: Sort, name: str, place: str | os.PathLike[str] | None = None
) -> Archive:
    """Restore as `store.ops.unarchive` documents. `place` is the archive's place, if it was moved."""
    tenant = drive(ctx.driver, ctx.tenant())
    known = None if tenant is None else drive(ctx.driver, read(partial(find_place, tenant, kind, name)))
    if tenant is None or known is None:
        raise NotFound(f"{kind} {name!r} is not archived in this store; store.ops.archives() lists what is")
    where = known if place is None else _place(place)
    with _opened(opener, where) as (_, source):
        drive(ctx.driver, write_repair(partial(_bring_back, source._context, tenant, kind, name)))
    return Archive(kind, name, where, moment(ctx.clock_us()))


@contextmanager
def _opened(opener: Opener, where: str) -> Iterator[tuple[Path, Any]]:
    """Open the store at a place. Check the file first, because it may come from an untrusted source."""
    with local_file(where) as path:
        if path.is_file():  # if not, opening raises the error that says so
            check_foreign(path)
        with opener(path, create=False) as store:
            yield path, store


def _bring_back(source: StoreContext, tenant: int, kind: Sort, name: str) -> Program[None]:
    """Replace the stubs of a thread or a run by its rows."""
    names = [name]
    if kind == "run":
        there = drive(source.driver, source.tenant()) or 0
        _, rows, _ = drive(source.driver, read(partial(run_digest, there, name)))
        names = [row.id for row in rows]
    yield from drop_stubs(tenant, kind, *names)
    if kind == "run":
        yield from copy_run(source, tenant, name, _ignore)
    else:
        yield from copy_threads(source, tenant, [name], _ignore)


def _ignore(_rows: int) -> None:
    pass


def archives(ctx: StoreContext) -> Flow[list[Archive]]:
    """Return the archived threads and runs of this tenant."""
    tenant = yield from ctx.tenant()
    stubs = [] if tenant is None else (yield from read(partial(list_stubs, tenant)))
    return [Archive(*stub[:3], moment(stub.at)) for stub in stubs]


def _place(place: str | os.PathLike[str]) -> str:
    text = os.fspath(place)
    if is_object_url(text):
        return redacted_url(text)
    if is_postgres(text) or sqlite_path(text) == ":memory:":
        raise UsageError(f"{redacted(text)!r}: an archive is a file or an object, such as s3://bucket/thread.db")
    return os.path.realpath(sqlite_path(text))


def _check(tenant: int, kind: Sort, name: str) -> Flow[None]:
    """Raise UsageError if the thread holds a run's state, or an unfinished run or graph needs it."""
    yield from read(partial(check_archived, tenant, kind, name))
    row = yield from read(partial(thread_or_stub, tenant, name))
    if kind == "run" or row is None:
        return
    if run := metadata_of(row).get(RUN_KEY):
        raise UsageError(f"thread {name!r} holds the state of run {run!r}: archive that run")
    busy = yield from read(partial(busy_threads, tenant, row.tree))
    if row.thread in busy or name in (yield from held_threads(tenant)):
        raise UsageError(f"an unfinished run or graph needs thread {name!r}: archive it when that is finished")


def _copy(opener: Opener, ctx: StoreContext, kind: Sort, name: str, where: str) -> None:
    if not is_object_url(where):
        with opener(where) as copy:
            _transfer(ctx, copy._context, kind, name)
        return
    objects, key = store_and_name(where)
    if objects.exists(key):  # a killed call wrote it; if it holds something else, later checks refuse it
        return
    with tempfile.TemporaryDirectory(prefix="perdure-archive-") as folder:
        path = Path(folder) / "archive.db"
        with opener(path) as copy:
            _transfer(ctx, copy._context, kind, name)
        objects.put_file(key, path, create=True)


def _transfer(source: StoreContext, target: StoreContext, kind: Sort, name: str) -> None:
    threads, runs = ([name], []) if kind == "thread" else ([], [name])
    transfer_some(source, target, threads, runs, "", None, move=False)


def _digest(tenant: int | None, kind: Sort, name: str) -> Program[tuple[bytes, list[str]]]:
    if kind == "thread":
        return (yield from copy_digest(tenant or 0, name)), [name]
    digest, _, states = yield from run_digest(tenant or 0, name)
    return digest, [thread.name for thread, _ in states]


def _remove_thread(tenant: int, stub: Stub, copied: BackupRow, seen: bytes) -> Program[list[ThreadRow]]:
    row, threads = yield from gc.lock_tree(tenant, stub.name, None)
    _compare((yield from copy_digest(tenant, stub.name)), seen, stub)
    yield from gc.remove_threads(tenant, threads, [row])
    yield Batch(add_stub(tenant, stub))
    yield from add_backup(copied)
    return [row]


def _remove_run(tenant: int, stub: Stub, copied: BackupRow, seen: bytes) -> Program[list[ThreadRow]]:
    yield from lock_family(tenant, stub.name)
    digest, rows, states = yield from run_digest(tenant, stub.name)
    _compare(digest, seen, stub)
    for row in rows:
        [forks] = yield Batch(_FORKS(tenant=tenant, run=row.run, root=row.root))
        if forks:
            raise UsageError(
                f"run {stub.name!r} stays: its fork {forks[0][0]!r} shares its history; archive that first"
            )
        yield Batch(*drop_run(tenant, row.run), add_stub(tenant, stub._replace(name=row.id)))
    for thread, threads in states:
        yield from gc.remove_threads(tenant, threads, [thread])
    yield from add_backup(copied)
    return [thread for thread, _ in states]


def _compare(digest: bytes, seen: bytes, stub: Stub) -> None:
    if digest != seen:
        raise Conflict(
            f"the archive at {stub.place} holds another state of {stub.kind} {stub.name!r}, which may have changed "
            "meanwhile: nothing was removed. Archive it at another place"
        )


def _finish(ctx: StoreContext, tenant: int, gone: list[ThreadRow]) -> Flow[None]:
    for row in gone:
        ctx.cache.forget(tenant, row.tree)
        yield from drop_of_thread(tenant, row.thread)
    yield from drop_loose_blobs(tenant)
