"""The volatile tables (`domains.py`) of an SQLite store: a file beside it, whose commits do not wait for the disk.

A crash of the machine may lose rows, but does not damage the file. Writing there does not hold up the writers of the
store, and wakes no worker that waits for commits. The first write makes the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from threading import Lock
from typing import Any

import apsw

from perdure.storage.domains import all_tables
from perdure.storage.program import Program, run_on_nothing
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.opening import VOLATILE, Target, connect, make_file
from perdure.storage.sqlite.writer import perform
from perdure.storage.table_sql import create_table

_SCRUB_WAIT_MS = 1_000
_opening = Lock()


class VolatileFile:
    """One connection to the file, which the threads of this process take in turn. A store in memory has no file."""

    def __init__(self, target: Target) -> None:
        self._store = target.path
        path = target.path if target.in_memory else target.path + VOLATILE
        self._target = replace(target, path=path, durability="normal")
        self._lock = Lock()
        self._connection: apsw.Connection | None = None

    def run(self, op: Callable[[], Program[Any]], *, write: bool) -> Any:
        """Run a program in one transaction. Reading a file that does not exist finds no rows."""
        try:
            with self._lock:
                if self._connection is None:
                    if not write and self._is_missing():
                        return run_on_nothing(op)
                    self._connection = self._open()
                cursor = self._connection.cursor()
                cursor.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    result = perform(op, cursor, None)
                    cursor.execute("COMMIT")
                    return result
                finally:
                    if self._connection.in_transaction:
                        cursor.execute("ROLLBACK")
        except apsw.Error as error:
            raise translate(error, self._target.path, self._target.timeout_s) from error

    def scrub(self) -> str:
        """Truncate the log, so that removed rows are nowhere. Return "" or what prevented it."""
        try:
            with self._lock:
                if not self._is_missing():
                    with closing(self._open()) as connection:
                        connection.set_busy_timeout(_SCRUB_WAIT_MS)
                        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            return ""
        except apsw.BusyError:
            return f"{self._target.path}-wal: a reader is active, so that it could not be truncated yet"
        except apsw.Error as error:
            raise translate(error, self._target.path, self._target.timeout_s) from error

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _is_missing(self) -> bool:
        return not os.path.exists(self._target.path)

    def _open(self) -> apsw.Connection:
        with _opening:  # closing a new file's descriptor would drop the locks of other connections to it
            if not self._target.in_memory:
                make_file(self._target.path, self._store)
            connection = connect(replace(self._target, read_only=False), "writer")
        try:
            connection.pragma("journal_mode", "wal")
            connection.pragma("secure_delete", 1)  # what is removed must not stay in free pages
            connection.execute("BEGIN IMMEDIATE")
            known = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
            for name, table in all_tables().items():
                if table.volatile and name not in known:
                    connection.execute(create_table(table, "sqlite"))
            connection.execute("COMMIT")
            connection.pragma("query_only", int(self._target.read_only))
        except BaseException:
            connection.close()
            raise
        return connection
