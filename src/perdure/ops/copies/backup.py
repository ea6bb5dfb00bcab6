"""Copying a whole store while it is in use: where to, what is remembered of it. How is each database's own.

The copy shows the store at one point of its commit order: every commit up to there, none after. Nobody waits for it.
What must never happen here: a file under the final name that is not whole, or a store that is taken for an old backup
and replaced.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from perdure.errors import Damaged, ReadOnlyStore, UsageError
from perdure.ops.copies.copied import Backup, CopyRow, add_copy
from perdure.ops.copies.places import Part, part_for
from perdure.storage.files import open_regular
from perdure.storage.program import Progress, drive, write
from perdure.threads.context import Context
from perdure.threads.models import moment

POSTGRES_LINE = b"perdure-backup "
SQLITE_LINE = b"SQLite format 3\0"


def bottom(driver: Any) -> Any:
    """The driver that talks to the database, below whatever encrypts or counts."""
    while (inner := getattr(driver, "inner", None)) is not None:
        driver = inner
    return driver


def backup(ctx: Context, place: str | os.PathLike[str], progress: Progress | None) -> Backup:
    """Make a backup at a place."""
    start = time.monotonic()
    driver = bottom(ctx.driver)
    made, at = ctx.entropy(16).hex(), ctx.clock_us()
    with part_for(place, replaces=_may_replace(Path(place), driver)) as part:
        stamp, snapshot = _copy(driver, part, made, at, progress)
        size = part.keep()
        path = part.place
    row = CopyRow(made, "backup", path, None, at, stamp, size)
    try:
        drive(ctx.driver, write(partial(add_copy, row)))
    except ReadOnlyStore:
        pass  # there is nowhere to remember it
    return Backup(made, path, moment(at), stamp, size, time.monotonic() - start, snapshot)


def _copy(driver: Any, part: Part, made: str, at: int, progress: Progress | None) -> tuple[int, str | None]:
    if driver.dialect == "sqlite":
        from perdure.ops.copies.backup_sqlite import copy_file

        return copy_file(driver, part, made, at, progress), None
    from perdure.ops.copies.backup_postgres import copy_tables

    return copy_tables(driver, part, made, at, progress)


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
    kind = kind_of(path)
    if kind == "postgres":
        return True
    if kind == "sqlite":
        from perdure.ops.copies.backup_sqlite import read_mark

        try:
            if read_mark(path) is not None:
                return True
        except Damaged:
            pass  # whatever it was: it is not ours to throw away
    raise UsageError(f"{path} exists already and is no backup that can be read: name another file, or remove it")


def kind_of(path: Path) -> str | None:
    """Of which database a file is a backup, by its first bytes; None: of none."""
    if os.path.exists(f"{path}-wal"):  # in use, perhaps here: closing it would drop the locks that SQLite holds on it
        return "sqlite"
    try:
        with open_regular(path) as file:
            head = file.read(len(SQLITE_LINE))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if head.startswith(POSTGRES_LINE):
        return "postgres"
    return "sqlite" if head == SQLITE_LINE else None
