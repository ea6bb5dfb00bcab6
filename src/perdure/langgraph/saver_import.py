"""`import_langgraph`: copy threads from the databases of LangGraph's own savers.

The stock saver reads its own tables, read-only, and `PerdureSaver.put` and `put_writes` write. Checkpoints are copied
from the oldest to the newest, so after a kill the next import continues where the last one stopped. No stored value is
ever called: a class is made only if it is LangGraph's own, registered, or a data class under a trusted prefix.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import quote

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.adapters import Codec, encode, is_postgres, sqlite_path
from perdure.errors import NotFound, OpenError, PerdureError, Undecodable, Unstorable, UsageError
from perdure.langgraph.safe_reader import safe_reader
from perdure.langgraph.saver import PerdureSaver
from perdure.langgraph.serde import PerdureSerde

_DIFFERENCES_MAX = 100


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The result of an import.

    `skipped` names threads that were left as they are, because the store has checkpoints of them that the source does
    not have. `differences` describes, one line each, checkpoints that read back differently.
    """

    threads: int
    checkpoints: int
    writes: int
    skipped: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.skipped and not self.differences


class _Source(NamedTuple):
    """A stock saver, and a function that runs SQL on its database."""

    saver: BaseCheckpointSaver[Any]
    rows: Callable[..., list[tuple[Any, ...]]]
    parameter: str
    writes: str  # the table of pending writes
    has_path: bool

    def threads(self) -> list[str]:
        return [name for (name,) in self.rows("SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id")]

    def checkpoints(self, thread: str) -> list[tuple[str, str]]:
        """Return the namespaces and ids of a thread's checkpoints, the oldest first."""
        order = 'ORDER BY checkpoint_id COLLATE "C"' if self.parameter == "%s" else "ORDER BY checkpoint_id"
        query = f"SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = {self.parameter} {order}"
        return [(namespace, id_) for namespace, id_ in self.rows(query, thread)]

    def paths(self, thread: str, namespace: str, id_: str) -> dict[str, str]:
        """Return the path of each task with writes on a checkpoint. Writes are ordered by it."""
        if not self.has_path:
            return {}
        where = (
            f"thread_id = {self.parameter} AND checkpoint_ns = {self.parameter} AND checkpoint_id = {self.parameter}"
        )
        return dict(self.rows(f"SELECT task_id, task_path FROM {self.writes} WHERE {where}", thread, namespace, id_))

    def get(self, thread: str, namespace: str, id_: str) -> CheckpointTuple:
        try:
            saved = self.saver.get_tuple(_config(thread, namespace, id_))
        except PerdureError:
            raise
        except Exception as error:  # stored bytes may be anything, and so may a serializer of the caller's
            raise Undecodable(f"it cannot be read: {error!r}"[:500]) from error
        if saved is None or type(saved.checkpoint) is not dict or saved.checkpoint.get("id") != id_:
            raise Undecodable("it cannot be read: its row does not hold the checkpoint of that id")
        return saved


def import_langgraph(
    source: str | os.PathLike[str],
    saver: PerdureSaver,
    *,
    trust: Sequence[str] = (),
    threads: Sequence[str] | None = None,
    serde: SerializerProtocol | None = None,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> MigrationReport:
    """Copy the threads of a stock saver's database, SQLite (a path) or PostgreSQL (`postgresql://…`), into a saver.

    `trust` names module prefixes whose data classes may be loaded and stored, in addition to those that the saver
    trusts. Any other class ends the import with an error that names it. `threads` selects threads. `serde` reads values
    that LangGraph's default serializer did not write, such as encrypted ones. `verify` reads every checkpoint back and
    compares it: see `.differences`. `progress` is called with (done, total) checkpoints.

    It can be called again after a failure, or when the source has grown. A thread that has continued in the store is
    left as it is, and named in `.skipped`. In async code, call it with `asyncio.to_thread`.
    """
    if isinstance(threads, str):
        raise UsageError(f"threads is a list of thread ids, such as threads=[{threads!r}], not a str")
    known = saver.serde.codec if isinstance(saver.serde, PerdureSerde) else saver._codec
    codec = Codec((*known.trust, *trust), classes=known.classes)
    # Another saver on the same store: `single_writer` is for runs, not for imports.
    target = PerdureSaver(
        saver.store, serde=PerdureSerde(codec) if isinstance(saver.serde, PerdureSerde) else saver.serde
    )
    with open_source(source, safe_reader(serde, codec)) as opened:
        names = opened.threads() if threads is None else list(dict.fromkeys(map(str, threads)))
        places = {name: len(opened.checkpoints(name)) for name in names}
        if missing := [name for name, count in places.items() if not count]:
            raise NotFound(f"the source has no thread {missing[0]!r}")
        total, done = sum(places.values()), 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(done, total)

        work = _Import(opened, target, codec, verify, advance)
        for name in names:
            work.copy_thread(name)
    return work.report(len(names))


class _Import:
    """One import: its source, its target, and its progress."""

    def __init__(
        self, source: _Source, target: PerdureSaver, codec: Codec, verify: bool, progress: Callable[[int], None]
    ) -> None:
        self._source, self._target, self._codec, self._verify = source, target, codec, verify
        self._advance = progress
        self._checkpoints = self._writes = 0
        self._skipped: list[str] = []
        self._differences: list[str] = []

    def report(self, threads: int) -> MigrationReport:
        return MigrationReport(
            threads, self._checkpoints, self._writes, tuple(self._skipped), tuple(self._differences[:_DIFFERENCES_MAX])
        )

    def copy_thread(self, thread: str) -> None:
        places = self._source.checkpoints(thread)
        known, present = set(places), self._present(thread)
        if present is None or not (present <= known or known <= present):
            self._skipped.append(thread)
            self._advance(len(places))
            return
        # The newest checkpoint of a namespace may have new writes, or an import was killed before it copied them.
        newest = dict(place for place in places if place in present) if present <= known else {}
        for place in places:
            if place not in present:
                self._copy(thread, place, known)
            elif newest.get(place[0]) == place[1]:
                with _naming(thread, place[1]):
                    self._put_writes(thread, place, self._source.get(thread, *place))
            self._advance(1)

    def _present(self, thread: str) -> set[tuple[str, str]] | None:
        """Return the checkpoints of a thread that the store has, or None if its thread of that name is no graph's."""
        try:
            next(self._target.store.thread(thread).history(limit=1))
        except NotFound:
            return set()
        places = [one.config["configurable"] for one in self._target.list({"configurable": {"thread_id": thread}})]
        return {(place["checkpoint_ns"], place["checkpoint_id"]) for place in places} or None

    def _copy(self, thread: str, place: tuple[str, str], places: set[tuple[str, str]]) -> None:
        namespace, id_ = place
        with _naming(thread, id_):
            saved = self._source.get(thread, namespace, id_)
            parent = _parent(saved)
            if (namespace, parent) not in places:
                parent = None  # it was pruned in the source
            checkpoint = saved.checkpoint
            self._target.put(
                _config(thread, namespace, parent), checkpoint, saved.metadata, checkpoint["channel_versions"]
            )
            self._checkpoints += 1
            self._writes += self._put_writes(thread, place, saved)
            if self._verify and (differences := self._compare(thread, place, parent, saved)):
                self._differences.append(f"thread {thread!r}, checkpoint {id_}: {', '.join(differences)} differ")

    def _put_writes(self, thread: str, place: tuple[str, str], saved: CheckpointTuple) -> int:
        pending = saved.pending_writes or []
        paths = self._source.paths(thread, *place) if pending else {}
        for task, writes in groupby(pending, key=lambda write: write[0]):
            pairs = [(channel, value) for _, channel, value in writes]
            self._target.put_writes(_config(thread, *place), pairs, task, paths.get(task, ""))
        return len(pending)

    def _compare(self, thread: str, place: tuple[str, str], parent: str | None, expected: CheckpointTuple) -> list[str]:
        """Return the parts of a checkpoint that read back differently."""
        read = self._target.get_tuple(_config(thread, *place))
        if read is None:
            return ["all of it"]
        parts = {
            "the checkpoint": (_ordered(read.checkpoint), _ordered(expected.checkpoint)),
            "its metadata": (read.metadata, expected.metadata),
            "its parent": (_parent(read), parent),
            "its pending writes": (read.pending_writes or [], expected.pending_writes or []),
        }
        return [name for name, (one, other) in parts.items() if not self._same(one, other)]

    def _same(self, one: Any, other: Any) -> bool:
        try:
            return encode(one, self._codec) == encode(other, self._codec)
        except Unstorable:  # values that only the assigned serializer can store
            return bool(one == other)


# --- opening


@contextmanager
def open_source(source: str | os.PathLike[str], serde: SerializerProtocol | None = None) -> Iterator[_Source]:
    """Open the database of a stock saver, read-only. Raises OpenError, or UsageError if it is no such database."""
    place = os.fspath(source)
    opened = _open_postgres(place, serde) if is_postgres(place) else _open_sqlite(sqlite_path(place), serde)
    with opened as reader:
        yield reader


def check_apart(source: str | os.PathLike[str], store: str) -> None:
    """Raise UsageError if the store would be created in the file to import."""
    place = os.fspath(source)
    if is_postgres(place) or is_postgres(store):
        return
    one, other = sqlite_path(place), sqlite_path(store)
    if os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other):
        raise UsageError("the source and the store are the same file: name another file for the store; it is made new")


@contextmanager
def _open_sqlite(path: str, serde: SerializerProtocol | None) -> Iterator[_Source]:
    try:
        from langgraph.checkpoint.sqlite import SqliteSaver
    except ImportError as error:
        raise UsageError("reading its file needs the stock saver: pip install langgraph-checkpoint-sqlite") from error
    if not os.path.isfile(path):
        raise OpenError(f"there is no file {path} to import: check the path")
    with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, check_same_thread=False)) as connection:

        def rows(query: str, *parameters: Any) -> list[tuple[Any, ...]]:
            try:
                return connection.execute(query, parameters).fetchall()
            except sqlite3.Error as error:
                raise _not_stock(path, error) from error

        _harden(connection)
        columns: set[str] = set()
        for name in ("checkpoints", "writes"):
            # A view, a virtual table or a computed column would run code that the file's author wrote.
            tables = rows("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", name)
            described = rows("SELECT name, hidden FROM pragma_table_xinfo(?, 'main')", name)
            if [str(sql)[:13].upper() for (sql,) in tables] != ["CREATE TABLE "] or any(
                hidden for _, hidden in described
            ):
                raise _not_stock(path, f"{name} is no plain table in it")
            columns = {column for column, _ in described}
        rows("SELECT parent_checkpoint_id, metadata FROM checkpoints LIMIT 0")
        rows("SELECT task_id, idx, value FROM writes LIMIT 0")
        yield _Source(SqliteSaver(connection, serde=serde), rows, "?", "writes", "task_path" in columns)


def _harden(connection: sqlite3.Connection) -> None:
    """Keep SQL in the file from having effects outside of it. Call this before anything is read."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_VIEW, False)
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_TRIGGER, False)


@contextmanager
def _open_postgres(url: str, serde: SerializerProtocol | None) -> Iterator[_Source]:
    try:
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.rows import dict_row, tuple_row
    except ImportError as error:
        raise UsageError(
            "reading its tables needs the stock saver: pip install langgraph-checkpoint-postgres"
        ) from error
    try:
        opened = psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row)
    except psycopg.OperationalError as error:
        raise OpenError(f"cannot open the PostgreSQL database to import: {error}") from None
    except psycopg.Error:  # the text of this one may repeat a password
        raise OpenError("cannot open the PostgreSQL database to import: its URL is not valid") from None
    with opened as connection:
        connection.execute("SET default_transaction_read_only = on")

        def rows(query: str, *parameters: Any) -> list[tuple[Any, ...]]:
            try:
                with connection.cursor(row_factory=tuple_row) as cursor:
                    return cursor.execute(query, parameters).fetchall()
            except psycopg.Error as error:
                raise _not_stock("this database", error) from error

        rows("SELECT c.checkpoint_id, b.blob FROM checkpoints c, checkpoint_blobs b LIMIT 0")
        rows("SELECT task_path FROM checkpoint_writes LIMIT 0")
        yield _Source(PostgresSaver(connection, serde=serde), rows, "%s", "checkpoint_writes", True)


def _not_stock(source: str, error: Exception | str) -> UsageError:
    return UsageError(f"{source} is not a database of LangGraph's checkpointers: {error}")


def _config(thread: str, namespace: str, id_: str | None) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": id_}}


def _parent(saved: CheckpointTuple) -> str | None:
    return ((saved.parent_config or {}).get("configurable") or {}).get("checkpoint_id") or None


def _ordered(checkpoint: Any) -> dict[str, Any]:
    """Return a checkpoint with its parts and channels sorted: their order in a database means nothing."""
    values = checkpoint.get("channel_values") or {}
    return {**{key: checkpoint[key] for key in sorted(checkpoint)}, "channel_values": dict(sorted(values.items()))}


@contextmanager
def _naming(thread: str, id_: str) -> Iterator[None]:
    """Add the thread and checkpoint to the message of errors that are raised inside."""
    where = f"thread {thread[:200]!r}, checkpoint {id_[:100]}"
    try:
        yield
    except PerdureError as error:
        error.args = (f"{where}: {error}", *error.args[1:])
        raise
