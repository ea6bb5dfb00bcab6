"""Restoring a backup into an empty place of either database, verified there; or only testing whether that works.

Into a file, the new store is made beside its place, fenced, verified, and put in place at the end. Into PostgreSQL it
is a transfer of every row, whose last transaction also fences (`fencing.py`); the same call resumes a killed one.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from perdure.errors import Damaged, UsageError
from perdure.storage.program import Progress, drive, read, write
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.opening import check_file
from perdure.storage.urls import is_postgres, need_postgres, redacted, sqlite_path
from perdure.threads.context import Context
from perdure.threads.models import Report
from perdure.transfer.backup import backup_id, copy_pages, damaged_backup, open_backup
from perdure.transfer.catalogue import Restored, mark_tested
from perdure.transfer.fencing import fence_old_processes
from perdure.transfer.files import AtomicFile, local_file
from perdure.transfer.verify import tenant_names, verify_all
from perdure.transfer.whole import copy_store

Opener = Callable[..., Any]  # `perdure.open`


def restore(
    open_store: Opener,
    backup: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
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
            with AtomicFile(_sqlite_target(text)) as file:
                requeued = _restore_file(path, file.part, made, at, progress)
                try:
                    report, tenants = check(open_store, str(file.part), options)
                except Damaged as error:  # the file itself
                    raise damaged_backup(path, error.__cause__ or error) from error
                file.commit()
    where = redacted(text) + (f', schema "{options.get("schema", "perdure")}"' if is_postgres(text) else "")
    return Restored(made, where, report, requeued, tenants, time.monotonic() - start)


def test_backup(
    open_store: Opener, ctx: Context, backup: str | os.PathLike[str], progress: Progress | None, keys: Any
) -> Restored:
    """Restore a backup into a temporary file, verify it, and drop it; the store remembers when that was done."""
    with local_file(backup) as path, _folder_beside(path) as folder:
        target, options = os.path.join(folder, "restored.db"), {"keys": keys}
        done = restore(open_store, path, target, verify=True, progress=progress, options=options)
    if done.ok:
        drive(ctx.driver, write(partial(mark_tested, done.backup, ctx.clock_us())))
    return done


test_backup.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="perdure-restore-", dir=path.absolute().parent)


# --- into PostgreSQL


def _restore_rows(
    open_store: Opener, path: Path, url: str, made: str, at: int, progress: Progress | None, options: dict[str, Any]
) -> int:
    """A copy of the file is read: opening the backup as a store would write beside it. How many runs were queued."""
    with _folder_beside(path) as folder:
        copy = Path(folder) / "backup.db"
        copy.touch(0o600)
        _copy_backup(path, copy, None)
        with (
            closing(SqliteDriver(copy, durability="normal")) as source,
            open_store(url, **{**options, "create": True}) as store,
        ):
            fence = partial(fence_old_processes, made, at)
            return int(copy_store(source, store._context.driver.capabilities.base, progress, last=fence).last)


# --- into a file


def _sqlite_target(url: str) -> str:
    target = sqlite_path(url)
    if target == ":memory:":
        raise UsageError("a backup is restored into a file or a database, not into memory: open the backup instead")
    check_file(target)
    if os.path.exists(f"{target}-wal"):  # SQLite would apply it to the new file
        raise UsageError(f"{target}-wal is left of a store that was here: move it away first")
    return target


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


# --- verifying


def _check(open_store: Opener, url: str, options: dict[str, Any]) -> tuple[Report, int]:
    with open_store(url, **{**options, "create": True}) as store:
        names = drive(store._context.driver, read(tenant_names))
        return verify_all(store, names), len(names)


def _no_check(_open_store: Opener, _url: str, _options: dict[str, Any]) -> tuple[Report, int]:
    return Report(0, 0), 0
