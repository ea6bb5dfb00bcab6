"""Restoring into an SQLite file: made beside its place, checked there, and put in place at the end.

A file that is there already is not renamed over: whoever opens it in that moment would go on with the old one. Its
content is replaced, by SQLite, in one transaction, which nobody else may have any part in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import apsw

from perdure.errors import Damaged, UsageError
from perdure.ops.copies.alone import alone, replace_pages
from perdure.ops.copies.backup import kind_of
from perdure.ops.copies.backup_sqlite import copy_pages, damaged_file, open_backup, read_mark
from perdure.ops.copies.copy_format import unpack_rows
from perdure.ops.copies.places import Part
from perdure.ops.copies.settling import FORGET, JUMP, Loaded, remember, settle, taken_up
from perdure.storage import migrate
from perdure.storage.program import Progress
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.file_lock import remove_locks
from perdure.storage.sqlite.opening import APPLICATION_ID, apply, check_file
from perdure.threads.models import Report

_UNCOUNTED = ("meta", "copy", "clock", "migration", "size_sample")
_BUSY_MS = 1000
_PAGE = 500
_STAMPED = ("thread", "record", "run", "journal")


class Restoring:
    """One restoration. A context: what is not placed is removed."""

    def __init__(self, backup: Path, target: Path, *, force: bool) -> None:
        self._backup, self._target, self._force = backup, Path(os.path.realpath(target)), force
        check_file(str(self._target))
        self._found: Loaded | None = None  # by the same restore, which did not come to its end
        if self._target.exists():
            if os.path.samefile(backup, self._target):
                raise UsageError(f"{target} is the backup itself: name another place")
            with _alone(self._target) as connection:
                self._found = self._check_empty(connection)
        elif not self._target.parent.is_dir():
            raise UsageError(f"the folder {self._target.parent} does not exist; create it first")
        self._temporary = Part(self._target, replaces=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            remove_locks(self._temporary.part)  # of those who opened it to check it
        finally:
            self._temporary.close()

    @property
    def part(self) -> Path:
        """The file that is checked before it is placed."""
        return self._temporary.part if self._found is None else self._target

    def load(self, at: int, progress: Progress | None) -> Loaded:
        """Fill the new file, and settle it."""
        if self._found is not None:
            return self._found
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
        """Put it where it belongs. It stays marked until the names of its files are safe, too."""
        if self._found is None:
            self._place(report)
        try:
            with closing(apsw.Connection(str(self._target), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
                connection.set_busy_timeout(_BUSY_MS)
                with suppress(apsw.BusyError):  # somebody uses it already: the mark does him no harm
                    connection.execute(FORGET)
        except apsw.Error as error:
            raise translate(error, str(self._target), 0) from error

    def _place(self, report: Report) -> None:
        if not self._target.exists():
            self._temporary.keep()
            return
        if not report.ok:
            raise Damaged(f"{self._target} was not replaced: the backup has problems, the first: {report.problems[0]}")
        with _alone(self._target) as connection:
            self._check_empty(connection)
            replace_pages(connection, self.part)

    def _check_empty(self, connection: apsw.Connection) -> Loaded | None:
        """Raise unless it may be replaced, or holds what this very restore has put there before it was interrupted."""
        if connection.pragma("application_id") != APPLICATION_ID:
            tables = list(connection.execute("SELECT name FROM sqlite_schema LIMIT 1"))
            if tables:
                raise UsageError(f"{self._target} is no Perdure store: restore to another place")
            return None
        used = any(list(connection.execute(f"SELECT 1 FROM {table} LIMIT 1")) for table in ("thread", "run", "tenant"))
        if not used or self._force:
            return None
        if (found := taken_up(connection.execute, _id_of(self._backup))) is not None:
            return found
        raise UsageError(
            f"{self._target} is not empty: restore to another place, or replace what is there with force=True (--force)"
        )


def _alone(path: Path) -> AbstractContextManager[apsw.Connection]:
    return alone(
        path,
        in_use=": end all that have it open, then restore",
        damaged="is no SQLite file, or it is damaged: restore to another place, or move it away first",
        leave_log=True,
    )


def _id_of(backup: Path) -> str:
    if kind_of(backup) == "postgres":
        from perdure.ops.copies.backup_postgres import BackupFile

        file = BackupFile(backup, None)
        file.close()
        return file.header.id
    mark = read_mark(backup)
    return str(mark["id"]) if mark else ""


def _load_pages(backup: Path, part: Path, progress: Progress | None) -> str:
    made = _id_of(backup)
    source = open_backup(backup)
    try:
        if source.pragma("application_id") != APPLICATION_ID:
            raise UsageError(f"{backup} is no backup: it is an SQLite file, but not of a Perdure store")
        source.execute("BEGIN")
        copy_pages(source, part, progress)
    finally:
        source.close()
    return made


def _load_rows(backup: Path, part: Path, progress: Progress | None) -> str:
    """A store from the rows of a backup of PostgreSQL's."""
    from perdure.ops.copies.backup_postgres import BackupFile

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
            loaded = Loaded(backup, requeued, rows)
            remember(connection.execute, loaded, "?")
        return loaded
    finally:
        connection.close()
