"""The volatile tables (`domains.py`) of an SQLite store: a file beside it, whose commits do not wait for the disk.

A crash of the machine may lose rows, but does not damage the file. Writing there does not hold up the writers of the
store, and wakes no worker that waits for commits. The first write makes the file.

Nothing depends on these rows, so nothing may fail for the file's sake. A damaged file, or one with another schema, is
removed, and one that was removed or replaced is opened again. Something else of its name (a folder, a symlink) is left
alone: reading finds no rows there, and writing is refused.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from threading import Lock
from typing import Any

import apsw

from perdure.errors import OpenError
from perdure.storage.domains import all_tables
from perdure.storage.events import event
from perdure.storage.program import Program, run_on_nothing
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.opening import VOLATILE, Target, connect, make_file, remove_volatile
from perdure.storage.sqlite.writer import perform
from perdure.storage.table_sql import create_table

_SCRUB_WAIT_MS = 1_000
_opening = Lock()
_log = logging.getLogger("perdure")


class ForeignFile(Exception):
    """Raised for a file whose schema is not that of the volatile tables."""


_UNUSABLE = (ForeignFile, apsw.NotADBError, apsw.CorruptError)


class VolatileFile:
    """One connection to the file, which the threads of this process take in turn. A store in memory has no file."""

    def __init__(self, target: Target) -> None:
        self._store = target.path
        path = target.path if target.in_memory else target.path + VOLATILE
        self._target = replace(target, path=path, durability="normal")
        self._lock = Lock()
        self._connection: apsw.Connection | None = None
        self._inode = 0

    def run(self, op: Callable[[], Program[Any]], *, write: bool) -> Any:
        """Run a program in one transaction. Reading a file that does not exist or is unusable finds no rows."""
        try:
            with self._lock:
                try:
                    return self._perform(op, write)
                except _UNUSABLE as error:
                    self._close()
                    if self._target.read_only:
                        return run_on_nothing(op)
                    self._remove(error)
                    return self._perform(op, write)
        except apsw.Error as error:
            raise translate(error, self._target.path, self._target.timeout_s) from error

    def scrub(self) -> str:
        """Truncate the log, so that removed rows are nowhere. Return "" or what prevented it."""
        try:
            with self._lock:
                if self._found_inode():
                    try:
                        with closing(self._open()) as connection:
                            connection.set_busy_timeout(_SCRUB_WAIT_MS)
                            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                    except _UNUSABLE as error:
                        self._close()
                        self._remove(error)
            return ""
        except apsw.BusyError:
            return f"{self._target.path}-wal: a reader is active, so that it could not be truncated yet"
        except apsw.Error as error:
            raise translate(error, self._target.path, self._target.timeout_s) from error

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _remove(self, error: Exception) -> None:
        fields = event("stream.removed", error=type(error).__name__)
        _log.warning("%s is unusable and was removed: %s", self._target.path, type(error).__name__, extra=fields)
        remove_volatile(self._store)

    def _perform(self, op: Callable[[], Program[Any]], write: bool) -> Any:
        inode = self._found_inode()
        if inode != self._inode:
            self._close()
        if self._connection is None:
            if not write and not inode and not self._target.in_memory:
                return run_on_nothing(op)
            self._connection = self._open()
            self._inode = self._found_inode()
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            result = perform(op, cursor, None)
            cursor.execute("COMMIT")
            return result
        finally:
            if self._connection.in_transaction:
                cursor.execute("ROLLBACK")

    def _found_inode(self) -> int:
        """Return the number of the file, 0 if there is none."""
        if self._target.in_memory:
            return 0
        try:
            status = os.lstat(self._target.path)
        except OSError:
            return 0
        return status.st_ino if stat.S_ISREG(status.st_mode) else 0

    def _open(self) -> apsw.Connection:
        with _opening:  # closing a new file's descriptor would drop the locks of other connections to it
            if not self._target.in_memory:
                make_file(self._target.path, self._store)
                if not self._found_inode():
                    raise OpenError(f"{self._target.path} is not a regular file: remove it; the store makes a new one")
            connection = connect(replace(self._target, read_only=False), "writer")
        try:
            connection.pragma("journal_mode", "wal")
            connection.pragma("secure_delete", 1)  # what is removed must not stay in free pages
            connection.execute("BEGIN IMMEDIATE")
            tables = {name: create_table(table, "sqlite") for name, table in all_tables().items() if table.volatile}
            known = [*connection.execute("SELECT name, sql FROM sqlite_schema ORDER BY name")]
            if not known:
                for statement in tables.values():
                    connection.execute(statement)
            elif known != sorted(tables.items()):
                raise ForeignFile
            connection.execute("COMMIT")
            connection.pragma("query_only", int(self._target.read_only))
        except BaseException:
            connection.close()
            raise
        return connection
