"""Bringing a backup back: into an empty place, checked afterwards; or only to try whether it can be.

A backup of one database can be restored into the other: both are read as rows then. What is done to the restored store
so that processes of its past do no harm: `settling.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from perdure.errors import Damaged, UsageError
from perdure.ops.copies.backup import bottom, kind_of
from perdure.ops.copies.checked import tenant_names, verified
from perdure.ops.copies.copied import Restored, mark_restored
from perdure.ops.copies.remote import at_hand
from perdure.ops.copies.sections import damaged_backup
from perdure.ops.copies.settling import Loaded
from perdure.storage.program import Batch, Program, Progress, Sql, drive, read, write
from perdure.storage.urls import is_postgres, need_postgres, sqlite_path
from perdure.threads.context import Context
from perdure.threads.models import Problem, Report


def restore(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Restored:
    """Bring a backup back into an empty place: a file that is not there, an empty store, an empty schema.

    `force` replaces an SQLite store that is not empty, if nobody has it open; on PostgreSQL drop the schema yourself.
    Then every hash is checked (`verify=False`: not). Runs that were running are queued again, and no process that used
    the store before can go on where it was. `options` are those of `perdure.open`: `schema=`, `keys=`.
    `progress`: (done, of how many) bytes.
    """
    with at_hand(path) as here:
        if here is not None:
            return restore(here, url, force=force, verify=verify, progress=progress, **options)
    start = time.monotonic()
    url = os.fspath(url)
    backup = _backup(path)
    at = time.time_ns() // 1000
    if is_postgres(url):
        need_postgres()
        from perdure.ops.copies.restoring_postgres import forget, load_tables, shown

        loaded = load_tables(backup, url, options, at, progress)
        report, tenants = _check(url, options, loaded) if verify else (Report(0, 0), 0)
        forget(url, options)
        return Restored(loaded.backup, shown(url, options), report, loaded.requeued, tenants, time.monotonic() - start)
    from perdure.ops.copies.restoring_sqlite import Restoring

    target = sqlite_path(url)
    if target == ":memory:":
        raise UsageError("a backup is restored into a file or a database, not into memory: open the backup instead")
    with Restoring(backup, Path(target), force=force) as restoring:
        loaded = restoring.load(at, progress)
        try:
            report, tenants = _check(str(restoring.part), options, loaded) if verify else (Report(0, 0), 0)
        except Damaged as error:  # the part's file itself
            raise damaged_backup(backup, error.__cause__ or error) from error
        restoring.place(report)
    return Restored(loaded.backup, target, report, loaded.requeued, tenants, time.monotonic() - start)


async def arestore(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Restored:
    """`restore`, awaited."""
    from asyncio import to_thread

    return await to_thread(restore, path, url, force=force, verify=verify, progress=progress, **options)


def try_restore(ctx: Context, path: str | os.PathLike[str], progress: Progress | None) -> Restored:
    """Restore a backup into a temporary place, check it, and throw it away; the store remembers when that was done."""
    with at_hand(path) as here:
        if here is not None:
            return try_restore(ctx, here, progress)
    cache = getattr(ctx.driver, "keys", None)
    keys: dict[str, Any] = {} if cache is None else {"keys": cache.provider}
    with _temporary(bottom(ctx.driver), _backup(path)) as (url, place):
        done = restore(path, url, progress=progress, **keys, **place)
    if done.ok:
        drive(ctx.driver, write(partial(mark_restored, done.backup, ctx.clock_us())))
    return done


def _backup(path: str | os.PathLike[str]) -> Path:
    backup = Path(path)
    if kind_of(backup) is None:
        if not backup.stat().st_size:
            raise damaged_backup(backup, "it is empty")
        raise UsageError(
            f"{backup} is no backup, or its beginning is damaged: neither a file of `perdure store backup` nor an "
            "SQLite store. Take another one, or make a new one"
        )
    return backup


@contextmanager
def _temporary(driver: Any, backup: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it can be restored to for a moment: a folder beside the backup, or a schema of the store's database."""
    if driver.dialect == "postgres":
        from perdure.ops.copies.restoring_postgres import temporary_schema

        with temporary_schema(driver) as place:
            yield place
        return
    folder = tempfile.mkdtemp(prefix="perdure-restore-", dir=backup.absolute().parent)
    try:
        yield os.path.join(folder, "restored.db"), {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(url: str, options: dict[str, Any], loaded: Loaded) -> tuple[Report, int]:
    """Verify everything, for every tenant, and compare how many rows there are."""
    from perdure.ops.store import open_store

    with open_store(url, **{**options, "create": True}) as store:
        names = drive(store._context.driver, read(tenant_names))
        report = verified(store, names)
        problems = list(report.problems)
        for table, count in loaded.rows.items():
            there = drive(store._context.driver, read(partial(_count, table)))
            if there != count:
                problems.append(Problem("(store)", None, f"table {table} has {there} rows, the backup {count}"))
    return replace(report, problems=tuple(problems)), len(names)


def _count(table: str) -> Program[int]:
    [rows] = yield Batch(Sql(f'SELECT count(*) FROM "{table}"')(), last=True)
    return int(rows[0][0])
