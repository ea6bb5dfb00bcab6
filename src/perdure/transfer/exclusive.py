"""Exclusive use of a store's file: so its content can be replaced as a whole, in one transaction.

The file is not renamed over: a process that opens it in that moment would continue with the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw

from perdure.errors import OpenError, UsageError
from perdure.storage.sqlite.errors import translate

_BUSY_MS = 1000


@contextmanager
def exclusive(path: Path, *, in_use: str, damaged: str, leave_log: bool = False) -> Iterator[apsw.Connection]:
    """A connection to a file that no other process has open, and none can open meanwhile. Raises UsageError.

    `in_use` and `damaged` end the sentence that says why not. `leave_log`: what is written goes to the file itself.
    """
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise OpenError(f"{path} cannot be opened: {error}") from error
    try:
        with closing(connection):
            connection.set_busy_timeout(_BUSY_MS)
            connection.pragma("locking_mode", "exclusive")
            if leave_log:  # SQLite leaves the log only if it is the only user; and then none can join
                connection.pragma("journal_mode", "delete")
                connection.pragma("synchronous", "extra")
            connection.execute("BEGIN EXCLUSIVE; COMMIT")
            yield connection
    except apsw.BusyError as error:
        raise UsageError(f"{path} is in use{in_use}") from error
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise UsageError(f"{path} {damaged}") from error
    except apsw.Error as error:
        raise translate(error, str(path), _BUSY_MS / 1000) from error


def replace_pages(connection: apsw.Connection, source: Path) -> None:
    """Give a file the content of another one, in one transaction."""
    other = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        with connection.backup("main", other, "main") as copying:
            copying.step(-1)
    finally:
        other.close()
