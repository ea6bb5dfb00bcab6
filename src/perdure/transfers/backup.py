"""Backup: copy the whole store to one SQLite file while the store is in use. `perdure` opens it like any store.

A backup shows the store at one point of its commit order: every commit up to there, none after. No writer waits for it.
A SQLite file is copied by SQLite's online backup inside one read transaction. A store on PostgreSQL or in memory is
copied row by row (`whole.py`). The file's table `meta` holds the backup's id and time.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

import apsw
import orjson

from perdure.errors import Damaged, UsageError
from perdure.storage.program import Batch, Program, Progress, Sql, drive, write
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.opening import APPLICATION_ID, MEMORY, harden
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.transfers.catalogue import Backup, BackupRow, add_backup, place_copy
from perdure.transfers.files import AtomicFile
from perdure.transfers.whole import copy_store

_STEP_PAGES = 512  # 1 MB. Progress is reported between steps; longer steps are not faster
_SIGN = Sql("INSERT INTO meta (key, value) VALUES ('backup', :value) ON CONFLICT (key) DO UPDATE SET value = :value")


def backup(
    ctx: StoreContext, place: str | os.PathLike[str], progress: Progress | None, retain_until: datetime | None = None
) -> Backup:
    """Write a backup to a path or an object's URL, where nothing may exist yet."""
    start = time.monotonic()
    capabilities = ctx.driver.capabilities
    is_file = capabilities.path not in ("", MEMORY)
    backup_id, at = ctx.entropy(16).hex(), ctx.clock_us()
    with AtomicFile(place, retain_until=retain_until) as file:
        if is_file:
            copy_file(Path(capabilities.path), file.part, progress)
        with closing(SqliteDriver(file.part, durability="normal")) as copy:  # closing moves SQLite's WAL into the file
            if not is_file:
                copy_store(capabilities.base, copy, progress)
            drive(copy, write(partial(_sign, backup_id, at, file)))
        row = BackupRow(backup_id, "backup", file.place, None, at, file.size())
        place_copy(ctx.driver, file, row)
    return Backup(backup_id, file.place, moment(at), row.bytes, time.monotonic() - start)


def _sign(backup_id: str, at: int, file: AtomicFile) -> Program[None]:
    """Write the backup's id into it, and the row of its catalogue: a restored store must name it when it erases."""
    mark = orjson.dumps({"id": backup_id, "at": at}).decode()
    yield Batch(_SIGN(value=mark))
    yield from add_backup(BackupRow(backup_id, "backup", file.place, None, at, file.size()))


def copy_file(source: Path, to: Path, progress: Progress | None = None) -> None:
    """Copy a store's file by SQLite's online backup, from one snapshot, into a file that no other process uses."""
    try:
        with (
            closing(_open(source)) as connection,
            closing(apsw.Connection(str(to), flags=apsw.SQLITE_OPEN_READWRITE)) as target,
        ):
            harden(target)
            # The target needs no journal and no syncs: it counts only when it is complete, synced and renamed.
            for pragma, value in (("journal_mode", "off"), ("synchronous", "off"), ("locking_mode", "exclusive")):
                target.pragma(pragma, value)
            page = int(connection.pragma("page_size"))
            with target.backup("main", connection, "main") as copying:
                while not copying.done:
                    copying.step(_STEP_PAGES)
                    if progress is not None:
                        total = copying.page_count
                        progress((total - copying.remaining) * page, total * page)
    except apsw.CorruptError as error:
        raise damaged_backup(source, error) from error
    except apsw.Error as error:
        raise translate(error, str(to), 0) from error


def backup_id(path: Path) -> str:
    """Return the id of a backup, or "" for a store that is not one. Raises Damaged, UsageError."""
    try:
        with closing(_open(path)) as connection:
            for (value,) in connection.execute("SELECT value FROM meta WHERE key = 'backup'"):
                return str(orjson.loads(value)["id"])
    except UsageError:
        raise
    except (apsw.Error, ValueError, KeyError, TypeError) as error:
        raise damaged_backup(path, error) from error
    return ""


def _open(path: Path) -> apsw.Connection:
    """Open a store's file in a read transaction, without changing it.

    Raises UsageError if it is not a store, and apsw.CorruptError if it cannot be read.
    """
    if not path.is_file():  # opening a FIFO would wait for its other end
        raise UsageError(f"there is no file {path}")
    in_use = os.path.exists(f"{path}-wal")
    name = f"file:{quote(str(path.absolute()))}" + ("" if in_use else "?immutable=1")
    try:
        connection = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    except apsw.CantOpenError as error:
        raise UsageError(f"{path} cannot be read: check its permissions") from error
    try:
        harden(connection)
        connection.execute("BEGIN")
        if connection.pragma("application_id") == APPLICATION_ID:  # the first read: it fixes the snapshot
            return connection
    except apsw.NotADBError:
        pass
    except BaseException:
        connection.close()
        raise
    connection.close()
    raise UsageError(f"{path} is no backup, or its beginning is damaged. Take another one, or make a new one")


def damaged_backup(path: Path, why: object) -> Damaged:
    return Damaged(
        f"{path} is damaged ({why}): take another backup, or repair it: `perdure store repair --store {path}`"
    )
