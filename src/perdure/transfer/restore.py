"""Restoring a backup into an empty place of either database, verified there; or only testing whether that works.

Into a file, the new store is made beside its place, fenced, verified, and put in place at the end. A file that is there
already is not renamed over: its content is replaced by SQLite in one transaction. Into PostgreSQL it is a transfer of
every row, whose last transaction also fences (`fencing.py`); one that was killed is resumed by the same call.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from perdure.errors import Damaged, UsageError
from perdure.storage.program import Progress, drive, read, write
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.opening import APPLICATION_ID, check_file
from perdure.storage.urls import is_postgres, need_postgres, redacted, sqlite_path
from perdure.threads.context import Context
from perdure.threads.models import Report
from perdure.transfer.backup import backup_id, copy_pages, damaged_backup, open_backup
from perdure.transfer.catalogue import Restored, mark_tested
from perdure.transfer.exclusive import exclusive, replace_pages
from perdure.transfer.fencing import fence_old_processes
from perdure.transfer.files import AtomicFile, local_file
from perdure.transfer.verify import tenant_names, verify_all
from perdure.transfer.whole import copy_store

Opener = Callable[..., Any]  # `perdure.open`
_DROP_SCHEMA = 'DROP SCHEMA IF EXISTS "{}" CASCADE'


def restore(
    open_store: Opener,
    backup: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    force: bool,
    verify: bool,
    progress: Progress | None,
    options: dict[str, Any],
) -> Restored:
    """See `perdure.restore`."""
    start = time.monotonic()
    text = os.fspath(url)
    check = _check if verify else _no_check
    with local_file(backup) as path:
        made, at = backup_id(path), time.time_ns() // 1000
        if is_postgres(text):
            need_postgres()
            requeued = _restore_rows(open_store, path, text, made, at, progress, options)
            report, tenants = check(open_store, text, options)
        else:
            target = Path(os.path.realpath(_sqlite_target(text)))
            with _new_file(path, target, force=force) as file:
                requeued = _restore_file(path, file.part, made, at, progress)
                try:
                    report, tenants = check(open_store, str(file.part), options)
                except Damaged as error:  # the file itself
                    raise damaged_backup(path, error.__cause__ or error) from error
                _put_in_place(file, target, report, force=force)
    where = redacted(text) + (f', schema "{options.get("schema", "perdure")}"' if is_postgres(text) else "")
    return Restored(made, where, report, requeued, tenants, time.monotonic() - start)


def test_backup(
    open_store: Opener, ctx: Context, backup: str | os.PathLike[str], progress: Progress | None, keys: Any
) -> Restored:
    """Restore a backup into a temporary place, verify it, and drop it; the store remembers when that was done."""
    given = {} if keys is None else {"keys": keys}
    with local_file(backup) as path, _temporary(ctx.driver.capabilities.base, path) as (url, place):
        done = restore(open_store, path, url, force=False, verify=True, progress=progress, options={**given, **place})
    if done.ok:
        drive(ctx.driver, write(partial(mark_tested, done.backup, ctx.clock_us())))
    return done


test_backup.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


# --- into PostgreSQL


def _restore_rows(
    open_store: Opener, path: Path, url: str, made: str, at: int, progress: Progress | None, options: dict[str, Any]
) -> int:
    """A copy of the file is read: opening the backup as a store would write beside it. How many runs were queued."""
    with tempfile.TemporaryDirectory(prefix="perdure-restore-", dir=path.absolute().parent) as folder:
        copy = Path(folder) / "backup.db"
        copy.touch(0o600)
        _copy_backup(path, copy, None)
        with (
            closing(SqliteDriver(copy, durability="normal")) as source,
            open_store(url, **{**options, "create": True}) as store,
        ):
            fence = partial(fence_old_processes, made, at)
            return int(copy_store(source, store._context.driver.capabilities.base, progress, last=fence).last)


@contextmanager
def _temporary(driver: Any, backup: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a backup can be restored to for a moment: a folder beside it, or a schema of the store's database."""
    if driver.dialect == "sqlite":
        folder = tempfile.mkdtemp(prefix="perdure-restore-", dir=backup.absolute().parent)
        try:
            yield os.path.join(folder, "restored.db"), {}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    name = f"perdure_restore_{os.urandom(6).hex()}"
    try:
        yield driver._target.conninfo, {"schema": name}
    finally:
        drop_schema(driver, name)


def drop_schema(driver: Any, name: str) -> None:
    """Remove a copy that is not wanted, from the database of a driver."""
    connection = driver._connect_plain()
    try:
        connection.execute("SET statement_timeout = 0")
        connection.execute(_DROP_SCHEMA.format(name))
    finally:
        connection.close()


# --- into a file


def _sqlite_target(url: str) -> str:
    target = sqlite_path(url)
    if target == ":memory:":
        raise UsageError("a backup is restored into a file or a database, not into memory: open the backup instead")
    return target


@contextmanager
def _new_file(backup: Path, target: Path, *, force: bool) -> Iterator[AtomicFile]:
    """A file beside the target. Raises UsageError if the target may not be replaced."""
    check_file(str(target))
    if target.exists():
        if os.path.samefile(backup, target):
            raise UsageError(f"{target} is the backup itself: name another place")
        with _exclusive(target) as connection:
            _check_empty(connection, target, force=force)
    elif not target.parent.is_dir():
        raise UsageError(f"the folder {target.parent} does not exist; create it first")
    with AtomicFile(target, replaces=target.exists()) as file:
        yield file


def _restore_file(backup: Path, part: Path, made: str, at: int, progress: Progress | None) -> int:
    _copy_backup(backup, part, progress)
    try:
        with closing(SqliteDriver(part, durability="normal")) as driver:
            return int(drive(driver, write(partial(fence_old_processes, made, at))))
    except Damaged as error:
        raise damaged_backup(backup, error.__cause__ or error) from error


def _copy_backup(backup: Path, to: Path, progress: Progress | None) -> None:
    try:
        with closing(open_backup(backup)) as source:
            source.execute("BEGIN")
            copy_pages(source, to, progress)
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise damaged_backup(backup, error) from error
    except apsw.Error as error:
        raise translate(error, str(to), 0) from error


def _put_in_place(file: AtomicFile, target: Path, report: Report, *, force: bool) -> None:
    if not target.exists():
        file.commit()
        return
    if not report.ok:
        raise Damaged(f"{target} was not replaced: the backup has problems, the first: {report.problems[0]}")
    with _exclusive(target) as connection:
        _check_empty(connection, target, force=force)
        replace_pages(connection, file.part)


def _exclusive(path: Path) -> Any:
    return exclusive(
        path,
        in_use=": end all processes that have it open, then restore",
        damaged="is no SQLite file, or it is damaged: restore to another place, or move it away first",
        leave_log=True,
    )


def _check_empty(connection: apsw.Connection, target: Path, *, force: bool) -> None:
    if connection.pragma("application_id") != APPLICATION_ID:
        if list(connection.execute("SELECT name FROM sqlite_schema LIMIT 1")):
            raise UsageError(f"{target} is no Perdure store: restore to another place")
        return
    used = any(list(connection.execute(f"SELECT 1 FROM {table} LIMIT 1")) for table in ("thread", "run", "tenant"))
    if used and not force:
        raise UsageError(
            f"{target} is not empty: restore to another place, or replace what is there with force=True (--force)"
        )


# --- verifying


def _check(open_store: Opener, url: str, options: dict[str, Any]) -> tuple[Report, int]:
    with open_store(url, **{**options, "create": True}) as store:
        names = drive(store._context.driver, read(tenant_names))
        return verify_all(store, names), len(names)


def _no_check(_open_store: Opener, _url: str, _options: dict[str, Any]) -> tuple[Report, int]:
    return Report(0, 0), 0
