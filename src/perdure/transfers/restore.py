"""Restore a backup into a new SQLite file or an empty PostgreSQL schema and verify it, or test whether that works.

For a file, the new store is created beside its place, fenced, verified, and renamed at the end. For PostgreSQL, every
row is copied in one transaction, which also fences (`fencing.py`). A restore that was killed can be repeated: before
the COMMIT it has left nothing, and after it only the verification is missing.
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

from perdure.errors import Damaged, UsageError
from perdure.storage.program import Progress, drive, read, write
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.foreign import check_foreign
from perdure.storage.sqlite.opening import check_file, remove_volatile
from perdure.storage.urls import is_postgres, need_postgres, redacted, sqlite_path
from perdure.threads.context import StoreContext
from perdure.threads.models import Report
from perdure.transfers.backup import backup_id, copy_file, damaged_backup
from perdure.transfers.catalogue import Restored, mark_tested
from perdure.transfers.fencing import end_restore, fence_old_processes, unfinished_restore
from perdure.transfers.files import AtomicFile, local_file
from perdure.transfers.verify import tenant_names, verify_all
from perdure.transfers.whole import copy_store

Opener = Callable[..., Any]  # `perdure.open`


def restore(
    open_store: Opener,
    backup: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    progress: Progress | None,
    options: dict[str, Any],
) -> Restored:
    """Restore as `perdure.ops.restore_backup` documents."""
    start = time.monotonic()
    where = os.fspath(url)
    with local_file(backup) as path:
        original, at = backup_id(path), time.time_ns() // 1000
        if is_postgres(where):
            need_postgres()
            requeued = _restore_rows(open_store, path, where, original, at, progress, options)
            report, tenants = _verify(open_store, where, original, at, options)
            where = f'{redacted(where)}, schema "{options.get("schema", "perdure")}"'
        else:
            with AtomicFile(_sqlite_target(where)) as file:
                copy_file(path, file.part, progress)
                check_foreign(file.part)
                try:
                    with closing(SqliteDriver(file.part, durability="normal")) as driver:
                        requeued = int(drive(driver, write(partial(fence_old_processes, original, at))))
                    report, tenants = _verify(open_store, str(file.part), original, at, options)
                except Damaged as error:
                    raise damaged_backup(path, error.__cause__ or error) from error
                file.commit()
                remove_volatile(str(file.path))
    return Restored(original, where, report, requeued, tenants, time.monotonic() - start)


def test_backup(
    open_store: Opener, ctx: StoreContext, backup: str | os.PathLike[str], progress: Progress | None, keys: Any
) -> Restored:
    """Restore a backup into a temporary file, verify it, and remove it. Record in the store when it passed."""
    with local_file(backup) as path, _folder_beside(path) as folder:
        target, options = os.path.join(folder, "restored.db"), {"keys": keys}
        done = restore(open_store, path, target, progress=progress, options=options)
    if done.ok:
        drive(ctx.driver, write(partial(mark_tested, done.backup, ctx.clock_us())))
    return done


test_backup.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="perdure-restore-", dir=path.absolute().parent)


def _restore_rows(
    open_store: Opener,
    path: Path,
    url: str,
    original: str,
    at: int,
    progress: Progress | None,
    options: dict[str, Any],
) -> int:
    """Copy every row of a backup into a store, unless a killed restore did. Return how many runs were queued again.

    Read a copy of the file, because opening the backup itself as a store would write files beside it.
    """
    with _folder_beside(path) as folder:
        copy = Path(folder) / "backup.db"
        copy.touch(0o600)
        copy_file(path, copy)
        check_foreign(copy)
        with (
            closing(SqliteDriver(copy, durability="normal")) as source,
            open_store(url, **{**options, "create": True}) as store,
        ):
            target = store._context.driver.capabilities.base
            if (requeued := drive(target, read(partial(unfinished_restore, original)))) is not None:
                return int(requeued)
            return int(copy_store(source, target, progress, last=partial(fence_old_processes, original, at)).last)


def _sqlite_target(url: str) -> str:
    target = sqlite_path(url)
    if target == ":memory:":
        raise UsageError("a backup is restored into a file or a database, not into memory: open the backup instead")
    check_file(target)
    if os.path.exists(f"{target}-wal"):  # SQLite would apply it to the new file
        raise UsageError(f"{target}-wal is left of a store that was here: move it away first")
    return target


def _verify(open_store: Opener, url: str, original: str, at: int, options: dict[str, Any]) -> tuple[Report, int]:
    with open_store(url, **{**options, "create": True}) as store:
        names = drive(store._context.driver, read(tenant_names))
        report = verify_all(store, names)
        drive(store._context.driver.capabilities.base, write(partial(end_restore, original, at)))
        return report, len(names)
