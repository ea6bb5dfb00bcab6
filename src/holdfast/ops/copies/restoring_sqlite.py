"""Restoring into an SQLite file: made beside its place, checked there, and put in place at the end.

A file that is there already is not renamed over: whoever opens it in that moment would go on with the old one. Its
content is replaced, by SQLite, in one transaction, which nobody else may have any part in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import apsw

from holdfast.errors import Damaged, OpenError, UsageError
from holdfast.ops.copies.backup import kind_of
from holdfast.ops.copies.backup_sqlite import copy_pages, damaged_file, read_mark
from holdfast.ops.copies.copy_format import unpack_rows
from holdfast.ops.copies.places import Part
from holdfast.ops.copies.restoring import Loaded
from holdfast.ops.copies.settling import JUMP, settle
from holdfast.storage import migrate
from holdfast.storage.program import Progress
from holdfast.storage.sqlite_errors import translate
from holdfast.storage.sqlite_open import APPLICATION_ID, apply
from holdfast.threads.models import Report

_UNCOUNTED = ("meta", "copy", "clock", "migration", "size_sample")
_LOCKS = ("-lock", "-lock-next")
_PAGE = 500
_STAMPED = ("thread", "record", "run", "journal")


class Restoring:
    """One restoration. A context: what is not placed is removed."""

    def __init__(self, backup: Path, target: Path, *, force: bool) -> None:
        self._backup, self._target, self._force = backup, Path(os.path.realpath(target)), force
        if self._target.exists():
            if os.path.samefile(backup, self._target):
                raise UsageError(f"{target} is the backup itself: name another place")
            with _alone(self._target) as connection:
                self._check_empty(connection)
        elif not self._target.parent.is_dir():
            raise UsageError(f"the folder {self._target.parent} does not exist; create it first")
        self._temporary = Part(self._target, replaces=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in _LOCKS:  # of those who opened it to check it
            Path(f"{self.part}{end}").unlink(missing_ok=True)
        self._temporary.close()

    @property
    def part(self) -> Path:
        return self._temporary.part

    def load(self, at: int, progress: Progress | None) -> Loaded:
        """Fill the new file, and settle it."""
        try:
            if kind_of(self._backup) == "postgres":
                backup = _load_rows(self._backup, self.part, progress)
            else:
                backup = _load_pages(self._backup, self.part, progress)
            return _settle(self.part, backup, at)
        except apsw.Error as error:
            if isinstance(error, apsw.CorruptError | apsw.NotADBError):
                raise damaged_file(self._backup, error) from error
            raise translate(error, str(self._target), 0) from error

    def place(self, report: Report) -> None:
        """Put it where it belongs."""
        if not self._target.exists():
            self._temporary.keep()
            return
        if not report.ok:
            raise Damaged(f"{self._target} was not replaced: the backup has problems, the first: {report.problems[0]}")
        with _alone(self._target) as connection:
            self._check_empty(connection)
            source = apsw.Connection(str(self.part), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                with connection.backup("main", source, "main") as copying:
                    copying.step(-1)
            finally:
                source.close()

    def _check_empty(self, connection: apsw.Connection) -> None:
        if connection.pragma("application_id") != APPLICATION_ID:
            tables = list(connection.execute("SELECT name FROM sqlite_schema LIMIT 1"))
            if tables:
                raise UsageError(f"{self._target} is no Holdfast store: restore to another place")
            return
        used = any(list(connection.execute(f"SELECT 1 FROM {table} LIMIT 1")) for table in ("thread", "run", "tenant"))
        if used and not self._force:
            raise UsageError(
                f"{self._target} is not empty: restore to another place, or replace what is there with force=True "
                "(--force)"
            )


@contextmanager
def _alone(path: Path) -> Iterator[apsw.Connection]:
    """A connection to a file that nobody else has open, and nobody can open meanwhile. Raises UsageError."""
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise OpenError(f"{path} cannot be opened: {error}") from error
    try:
        connection.set_busy_timeout(1000)
        # SQLite leaves the log only if nobody else is there; and then nobody comes in.
        connection.pragma("locking_mode", "exclusive")
        connection.pragma("journal_mode", "delete")
        connection.pragma("synchronous", "extra")
        connection.execute("BEGIN EXCLUSIVE; COMMIT")
        yield connection
    except apsw.BusyError as error:
        raise UsageError(f"{path} is in use: end all that have it open, then restore") from error
    except apsw.NotADBError as error:
        raise UsageError(f"{path} is no SQLite file: restore to another place") from error
    finally:
        connection.close()


def _load_pages(backup: Path, part: Path, progress: Progress | None) -> str:
    mark = read_mark(backup)
    # A store's own file works as well, if it is whole by itself or its log lies beside it.
    name, flags = f"file:{quote(str(backup.absolute()))}", apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    if not os.path.exists(f"{backup}-wal"):
        name += "?immutable=1"
    source = apsw.Connection(name, flags=flags)
    try:
        if source.pragma("application_id") != APPLICATION_ID:
            raise UsageError(f"{backup} is no backup: it is an SQLite file, but not of a Holdfast store")
        source.execute("BEGIN")
        copy_pages(source, part, progress)
    finally:
        source.close()
    return str(mark["id"]) if mark else ""


def _load_rows(backup: Path, part: Path, progress: Progress | None) -> str:
    """A store from the rows of a backup of PostgreSQL's."""
    from holdfast.ops.copies.backup_postgres import BackupFile

    file = BackupFile(backup, progress)
    header = file.header
    connection = apsw.Connection(str(part), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        for pragma, value in (("journal_mode", "off"), ("synchronous", "off"), ("locking_mode", "exclusive")):
            connection.pragma(pragma, value)
        for migration in migrate.migrations("sqlite")[: header.version]:
            apply(connection, migration)
        here = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        connection.execute("BEGIN; DELETE FROM meta")
        for name, chunks in file.rows():
            if name in here and name != "migration":  # others are PostgreSQL's own
                _insert(connection, file.tables[name], unpack_rows(chunks, file.tables[name].types))
        stamps = [next(iter(connection.execute(f"SELECT max(stamp) FROM {table}")))[0] or 0 for table in _STAMPED]
        number = file.sequences.get("number", 0)
        connection.execute("UPDATE clock SET stamp = ?, number = ?", (max(header.stamp, *stamps), number))
        connection.execute("COMMIT")
        connection.pragma("journal_mode", "wal")
    finally:
        connection.close()
        file.close()
    return header.id


def _insert(connection: apsw.Connection, table: Any, rows: Iterator[list[Any]]) -> None:
    names = ", ".join(f'"{column}"' for column in table.columns)
    text = f'INSERT INTO "{table.name}" ({names}) VALUES ({", ".join("?" * len(table.columns))})'
    while some := list(islice(rows, _PAGE)):
        connection.executemany(text, some)


def _settle(part: Path, backup: str, at: int) -> Loaded:
    connection = apsw.Connection(str(part), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.pragma("locking_mode", "exclusive")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        rows = {
            name: next(iter(connection.execute(f'SELECT count(*) FROM "{name}"')))[0]
            for name in tables
            if name not in _UNCOUNTED and not name.startswith("sqlite_")
        }
        with connection:
            requeued = settle(connection.execute, backup, at, connection.changes, "?", has_runs="run" in tables)
            connection.execute(f"UPDATE clock SET number = number + {JUMP}, stamp = stamp + 1")
        return Loaded(backup, requeued, rows)
    finally:
        connection.close()
