"""Where an import reads from: the databases of LangGraph's stock savers, read only and a little at a time.

Ids come first, in pages from the primary key's index; then each checkpoint by its id. No read transaction stays open
between two of them, so that an application that still uses the database is not held up, and no more than a few
checkpoints are in memory, however long a thread is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import apsw

from perdure.errors import OpenError, PerdureError, UsageError
from perdure.storage.sqlite_errors import translate
from perdure.storage.urls import is_postgres, sqlite_path

_BUSY_MS = 30_000
_CHECKPOINTS = {"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "type", "checkpoint", "metadata"}
_WRITES = {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type"}

Rows = list[tuple[Any, ...]]
WriteKey = tuple[str, int]  # task, index


class StoredWrite(NamedTuple):
    """A pending write as it is stored."""

    task: str
    path: str
    idx: int
    channel: str
    type: Any
    data: Any


class Stored(NamedTuple):
    """A checkpoint as it is stored. `values`: of channels that are kept apart from it, as (type, bytes)."""

    id: str
    parent: str | None
    type: Any  # None: `data` is decoded already
    data: Any
    metadata: Any
    writes: list[StoredWrite]
    values: dict[str, tuple[Any, Any]] | None = None
    sends: list[tuple[Any, Any]] | None = None  # pending on its parent, of versions that kept them only there


class Source(Protocol):
    """What an import needs of a database. Ids are in the order in which the database compares text."""

    def threads(self) -> Iterator[str]: ...

    def spaces(self, thread: str) -> Iterator[str]: ...

    def ids(self, thread: str, space: str, after: str | None, limit: int, *, backwards: bool = False) -> list[str]: ...

    def checkpoints(self, thread: str, space: str, ids: Sequence[str]) -> Iterator[Stored]:
        """Those that are (still) there, in the order of `ids`."""
        ...

    def write_keys(self, thread: str, space: str, ids: Sequence[str]) -> dict[str, set[WriteKey]]: ...

    def count(self, threads: Sequence[str] | None) -> int: ...

    def size_bytes(self) -> int: ...

    def is_file(self, path: str) -> bool: ...

    def close(self) -> None: ...


def open_source(url: str | os.PathLike[str]) -> Source:
    """The database of a stock saver: a path, `sqlite:///path` or `postgresql://…`. Raises if it is none."""
    text = os.fspath(url)
    if is_postgres(text):
        from perdure.langgraph.importing_postgres import PostgresSource

        return PostgresSource(text)
    if text == ":memory:":
        raise UsageError("a database in memory cannot be imported: name a file, or postgresql://…")
    return SqliteSource(sqlite_path(text))


def not_stock(what: str, why: str) -> UsageError:
    """The error for a database that no stock saver has made."""
    return UsageError(f"{what} is not a database of LangGraph's checkpointers: {why}")


def check_columns(what: str, table: str, found: set[str], needed: set[str]) -> None:
    """Raise unless a table has the columns that a stock saver gives it."""
    if not found:
        raise not_stock(what, f"it has no table {table!r}")
    if missing := sorted(needed - found):
        raise not_stock(
            what,
            f"its table {table!r} has no column {', '.join(missing)}; was it made by a very old version, or by a "
            "saver of another kind?",
        )


def each_once(rows: Callable[..., Rows], mark: str, column: str, where: str = "", *params: Any) -> Iterator[str]:
    """Each value of a column once, by jumping from one to the next in the index. `mark` stands for a parameter."""
    text = f"SELECT {column} FROM checkpoints WHERE {where} {column} {{}} {mark} ORDER BY {column} LIMIT 1"
    found = rows(text.format(">="), *params, "")
    while found:
        yield _text(found[0][0], column)
        found = rows(text.format(">"), *params, found[0][0])


class SqliteSource:
    """A file of SqliteSaver or AsyncSqliteSaver; also while the application has it open."""

    def __init__(self, path: str) -> None:
        if not os.path.isfile(path):
            raise OpenError(f"there is no file {path} to import: check the path")
        self._path = os.path.realpath(path)
        try:
            self._connection = self._connect()
            self._has_path = self._check()
        except (apsw.Error, UnicodeDecodeError) as error:
            raise self._explained(error) from error

    def _connect(self) -> apsw.Connection:
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        name = f"file:{quote(self._path)}?mode=ro"
        # Where its side files neither exist nor can be made, SQLite must be told that nobody writes the file.
        if not os.access(os.path.dirname(self._path), os.W_OK) and not os.path.exists(self._path + "-wal"):
            name += "&immutable=1"
        connection = apsw.Connection(name, flags=flags)
        connection.set_busy_timeout(_BUSY_MS)
        connection.pragma("trusted_schema", 0)
        connection.pragma("query_only", 1)
        return connection

    def _check(self) -> bool:
        """Raise unless the tables are a stock saver's. Whether writes have a path: old ones have none."""
        checkpoints, writes = self._columns("checkpoints"), self._columns("writes")
        if not checkpoints and self._columns("record") and self._columns("label"):
            raise not_stock(self._path, "it is a Perdure store; name the old database first, the store with --store")
        check_columns(self._path, "checkpoints", checkpoints, _CHECKPOINTS)
        check_columns(self._path, "writes", writes, _WRITES | {"value"})
        return "task_path" in writes

    def _columns(self, table: str) -> set[str]:
        # A view could compute anything; only a table is data.
        found = self._connection.execute("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?", (table,))
        if not found.fetchall():
            return set()
        return {name for (name,) in self._connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}

    def _rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, params).fetchall()
        except (apsw.Error, UnicodeDecodeError) as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> BaseException:
        if isinstance(error, apsw.NotADBError):
            return not_stock(self._path, "it is no SQLite file, or an encrypted one")
        if isinstance(error, UnicodeDecodeError):
            return OpenError(f"{self._path} holds text that is not text ({error})")
        return translate(error, self._path, _BUSY_MS / 1000)

    def threads(self) -> Iterator[str]:
        return each_once(self._rows, "?", "thread_id")

    def spaces(self, thread: str) -> Iterator[str]:
        return each_once(self._rows, "?", "checkpoint_ns", "thread_id = ? AND", thread)

    def ids(self, thread: str, space: str, after: str | None, limit: int, *, backwards: bool = False) -> list[str]:
        where = "" if after is None else f"AND checkpoint_id {'<' if backwards else '>'} ?"
        rows = self._rows(
            f"SELECT checkpoint_id FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ? {where} "
            f"ORDER BY checkpoint_id {'DESC' if backwards else ''} LIMIT ?",
            *(thread, space, *(() if after is None else (after,)), limit),
        )
        return [_text(id_, "checkpoint_id") for (id_,) in rows]

    def checkpoints(self, thread: str, space: str, ids: Sequence[str]) -> Iterator[Stored]:
        key = "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"
        path = "task_path" if self._has_path else "''"
        for id_ in ids:
            rows = self._rows(
                f"SELECT parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints {key}", thread, space, id_
            )
            if not rows:
                continue
            writes = self._rows(
                f"SELECT task_id, {path}, idx, channel, type, value FROM writes {key}", thread, space, id_
            )
            [(parent, kind, data, metadata)] = rows
            yield Stored(id_, parent or None, kind, data, metadata, [StoredWrite(*write) for write in writes])

    def write_keys(self, thread: str, space: str, ids: Sequence[str]) -> dict[str, set[WriteKey]]:
        found: dict[str, set[WriteKey]] = {}
        for id_, task, idx in self._rows(
            "SELECT checkpoint_id, task_id, idx FROM writes WHERE thread_id = ? AND checkpoint_ns = ? "
            "AND checkpoint_id BETWEEN ? AND ?",
            *(thread, space, min(ids), max(ids)),
        ):
            found.setdefault(id_, set()).add((task, idx))
        return found

    def count(self, threads: Sequence[str] | None) -> int:
        if threads is None:
            return int(self._rows("SELECT count(*) FROM checkpoints")[0][0])
        one = "SELECT count(*) FROM checkpoints WHERE thread_id = ?"
        return sum(int(self._rows(one, thread)[0][0]) for thread in threads)

    def size_bytes(self) -> int:
        [(pages, page_bytes)] = self._rows("SELECT page_count, page_size FROM pragma_page_count, pragma_page_size")
        return int(pages) * int(page_bytes)

    def is_file(self, path: str) -> bool:
        return os.path.exists(path) and os.path.samefile(path, self._path)

    def close(self) -> None:
        self._connection.close()


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise PerdureError(f"a {column} in this database is not text but {value!r}: correct or delete the row")
    return value
