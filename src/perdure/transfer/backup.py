"""A backup: the whole store as one SQLite file, made while the store is in use. `perdure` opens it like any store.

It shows the store at one point of its commit order: every commit up to there, none after. No writer waits for it. Of an
SQLite store it is SQLite's online backup inside one read transaction, of one on PostgreSQL a transfer of every row
(`whole.py`). A row of the file's table `meta` says of which store and time it is a backup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
import orjson

from perdure.errors import Damaged, ReadOnlyStore, StoreError, UsageError
from perdure.storage.files import open_regular
from perdure.storage.objects import is_object_url
from perdure.storage.program import Batch, Program, Progress, Sql, drive, write
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.opening import APPLICATION_ID, connect
from perdure.threads.context import Context
from perdure.threads.models import moment
from perdure.transfer.catalogue import Backup, BackupRow, add_backup
from perdure.transfer.files import AtomicFile
from perdure.transfer.whole import copy_store

_STEP_PAGES = 256  # 1 MB: progress is reported between two steps. A longer step is no faster
_FIRST_LINE = b"SQLite format 3\0"
_HEADER_BYTES = 100  # of any SQLite file
_SIGN = Sql("INSERT INTO meta (key, value) VALUES ('backup', :value) ON CONFLICT (key) DO UPDATE SET value = :value")


def backup(ctx: Context, place: str | os.PathLike[str], progress: Progress | None) -> Backup:
    """Make a backup at a place: a path, or an object's URL. An earlier backup at a path is replaced."""
    start = time.monotonic()
    driver: Any = ctx.driver.capabilities.base
    made, at = ctx.entropy(16).hex(), ctx.clock_us()
    replaces = not is_object_url(os.fspath(place)) and _may_replace(Path(place), driver)
    with AtomicFile(place, replaces=replaces) as file:
        if driver.dialect == "sqlite":
            _copy_file(driver, file, progress)
        copy = SqliteDriver(file.part, durability="normal")
        try:
            if driver.dialect != "sqlite":
                copy_store(driver, copy, progress)
            drive(copy, write(partial(_sign, made, at, file)))
        finally:
            copy.close()  # the last connection: SQLite brings its log into the file
        size = file.commit()
    try:
        drive(ctx.driver, write(partial(add_backup, BackupRow(made, "backup", file.place, None, at, size))))
    except ReadOnlyStore:
        pass  # there is nowhere to remember it
    return Backup(made, file.place, moment(at), size, time.monotonic() - start)


def _sign(made: str, at: int, file: AtomicFile) -> Program[None]:
    """Write into the copy what it is, and that it exists: a restored store must name it when it erases."""
    mark = orjson.dumps({"id": made, "at": at}).decode()
    yield Batch(_SIGN(value=mark))
    yield from add_backup(BackupRow(made, "backup", file.place, None, at, file.size()))


def _copy_file(driver: SqliteDriver, file: AtomicFile, progress: Progress | None) -> None:
    """SQLite's online backup, from one snapshot."""
    try:
        with _reading(driver) as source:
            copy_pages(source, file.part, progress)
    except apsw.FullError as error:
        raise StoreError(f"there is no room for the backup at {file.path}; nothing was written there") from error
    except apsw.Error as error:
        raise translate(error, driver.path, driver._target.timeout_s) from error


@contextmanager
def _reading(driver: SqliteDriver) -> Iterator[apsw.Connection]:
    """A connection inside a read transaction."""
    if driver._target.in_memory:  # its only connection is the writer's: it is ours until the copy is done
        lock, writer = driver._lock, driver._writer
        assert lock is not None
        assert writer is not None
        lock.acquire(time.monotonic() + driver._target.timeout_s)
        try:
            yield writer.connection
        finally:
            lock.release()
        return
    connection = connect(driver._target, driver._access, "reader")
    try:
        connection.execute("BEGIN")
        yield connection
    finally:
        connection.close()


def copy_pages(source: apsw.Connection, path: Path, progress: Progress | None = None) -> None:
    """Copy a database, page by page, to a file that no other process uses."""
    target = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        # Nothing of it counts before it is whole, synced and renamed: it needs no journal and no syncs on the way.
        for pragma, value in (("journal_mode", "off"), ("synchronous", "off"), ("locking_mode", "exclusive")):
            target.pragma(pragma, value)
        page = int(source.pragma("page_size"))
        with target.backup("main", source, "main") as copying:
            while not copying.done:
                copying.step(_STEP_PAGES)
                if progress is not None:
                    total = copying.page_count
                    progress((total - copying.remaining) * page, total * page)
    finally:
        target.close()


def _may_replace(path: Path, driver: Any) -> bool:
    """Whether an earlier backup is there. Raises UsageError for anything that must not be replaced."""
    if not path.exists():
        return False
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if driver.dialect == "sqlite" and os.path.realpath(path) == driver.path:
        raise UsageError(f"{path} is the store itself: name another file for its backup")
    if os.path.exists(f"{path}-lock"):
        raise UsageError(f"{path} is a store, or a backup that was opened as one: name another file")
    try:
        if backup_id(path):
            return True
    except (Damaged, UsageError):
        pass  # whatever it was: it is not ours to throw away
    raise UsageError(f"{path} exists already and is no backup that can be read: name another file, or remove it")


def open_backup(path: Path) -> apsw.Connection:
    """A backup for reading, without touching it. A store's own file works too, if its log lies beside it. Raises
    UsageError for what is no store, Damaged for one that cannot be read."""
    has_log = os.path.exists(f"{path}-wal")  # in use, perhaps here: closing it would drop the locks that SQLite holds
    try:
        if not has_log:
            with open_regular(path) as file:
                head = file.read(_HEADER_BYTES)
            if not head.startswith(_FIRST_LINE[: len(head)]):
                raise UsageError(
                    f"{path} is no backup, or its beginning is damaged. Take another one, or make a new one"
                )
            if len(head) < _HEADER_BYTES:
                raise damaged_backup(path, "it is empty or cut short")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    name = f"file:{quote(str(path.absolute()))}" + ("" if has_log else "?immutable=1")
    connection = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        if connection.pragma("application_id") == APPLICATION_ID:
            return connection
    except (apsw.CorruptError, apsw.NotADBError) as error:
        connection.close()
        raise damaged_backup(path, error) from error
    connection.close()
    raise UsageError(f"{path} is no backup: it is an SQLite file, but not of a Perdure store")


def backup_id(path: Path) -> str:
    """The id of a backup; empty for a store that is none."""
    connection = open_backup(path)
    try:
        for (value,) in connection.execute("SELECT value FROM meta WHERE key = 'backup'"):
            return str(orjson.loads(value)["id"])
    except (apsw.Error, ValueError, KeyError, TypeError) as error:
        raise damaged_backup(path, error) from error
    finally:
        connection.close()
    return ""


def damaged_backup(path: Path, why: object) -> Damaged:
    return Damaged(
        f"the backup {path} is damaged ({why}): take another one, or repair it: `perdure store repair --store {path}`"
    )
