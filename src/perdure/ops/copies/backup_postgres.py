"""A copy of a live store on PostgreSQL: every table of its schema, in one snapshot, streamed into one file.

    H   what it is: id, store, snapshot, schema version, tables with their columns, sequences
    T   a table begins: its name
    R   so many bytes of `COPY … TO STDOUT (FORMAT binary)`

One transaction, REPEATABLE READ and READ ONLY: it blocks nobody and is blocked by nobody but a change of the schema.
Sequences are read last: they may be ahead of the tables, never behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg import sql

from perdure.errors import OpenError, UsageError
from perdure.ops.copies.places import Part
from perdure.ops.copies.sections import SectionReader, SectionWriter
from perdure.storage import migrate
from perdure.storage.postgres import errors as meaning
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.program import Progress

T = TypeVar("T")
KIND = "backup"
_BLOCK_BYTES = 4 << 20
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# A long copy is no hung statement.
_PATIENCE = "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
TABLES = """SELECT c.relname::text, array_agg(a.attname::text ORDER BY a.attnum),
        array_agg(format_type(a.atttypid, NULL) ORDER BY a.attnum)
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r' AND a.attgenerated = ''
    GROUP BY c.relname ORDER BY c.relname"""
_BYTES = """SELECT coalesce(sum(pg_table_size(c.oid)), 0)::bigint FROM pg_class c
    WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r'"""
SEQUENCES = (
    "SELECT relname::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'S' ORDER BY relname"
)
# A foreign key wants what it refers to first.
FIRST = ("tenant", "blob")


class Table(msgspec.Struct, array_like=True):
    name: str
    columns: list[str]
    types: list[str]


class Header(msgspec.Struct):
    id: str
    store: str
    at: int
    stamp: int
    snapshot: str
    version: int
    server_version: int
    tables: list[Table]


class Footer(msgspec.Struct):
    """What is known only at the end."""

    sequences: dict[str, int]  # the last number that was given out; 0: none


def copy_tables(
    driver: PostgresDriver, part: Part, made: str, at: int, progress: Progress | None
) -> tuple[int, str | None]:
    """Copy the store's tables to the part: the point of the commit order, and the snapshot."""
    if driver.tenancy is not None:
        raise UsageError(
            "a backup is of all tenants, and this role does not see all of them: make it as the owner of the tables, "
            "or as a role of the kind `operator` (perdure store role)"
        )
    try:
        connection = driver._connect_plain()
        try:
            connection.execute(_BEGIN)
            connection.execute(_PATIENCE.encode())
            return _copy(connection, driver._target.schema, part, made, at, progress)
        finally:
            connection.close()
    except psycopg.Error as error:
        raise meaning.translated(error, driver._target, driver._timeout_s) from error


def _copy(
    connection: Any, schema: str, part: Part, made: str, at: int, progress: Progress | None
) -> tuple[int, str | None]:
    snapshot, stamp = connection.execute(
        "SELECT pg_current_snapshot()::text, pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    ).fetchone()
    tables = [Table(*row) for row in connection.execute(TABLES, (schema,))]
    tables.sort(key=lambda table: table.name not in FIRST)
    [store] = connection.execute("SELECT value FROM meta WHERE key = 'store'").fetchone() or ("",)
    [version] = connection.execute("SELECT coalesce(max(version), 0) FROM migration").fetchone()
    [total] = connection.execute(_BYTES, (schema,)).fetchone()
    header = Header(made, store, at, stamp, snapshot, version, connection.info.server_version, tables)
    writer = SectionWriter(part.file, KIND)
    writer.block("H", msgspec.msgpack.encode(header))
    done = 0
    for table in tables:
        writer.block("T", table.name.encode())
        done = _copy_table(connection, schema, table, writer, done, int(total), progress)
    sequences: dict[str, int] = {}
    for (name,) in connection.execute(SEQUENCES, (schema,)).fetchall():
        look = sql.SQL("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {}")
        [sequences[name]] = connection.execute(look.format(sql.Identifier(schema, name))).fetchone()
    writer.block("F", msgspec.msgpack.encode(Footer(sequences)))
    writer.end()
    return int(stamp), str(snapshot)


def _copy_table(
    connection: Any, schema: str, table: Table, writer: SectionWriter, done: int, total: int, progress: Progress | None
) -> int:
    columns = sql.SQL(", ").join(map(sql.Identifier, table.columns))
    text = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT binary)")
    buffer = bytearray()
    with connection.cursor() as cursor, cursor.copy(text.format(columns, sql.Identifier(schema, table.name))) as rows:
        for data in rows:
            buffer += data
            if len(buffer) >= _BLOCK_BYTES:
                writer.block("R", bytes(buffer))
                done += len(buffer)
                buffer.clear()
                if progress is not None:
                    progress(min(done, total), total)
    if buffer:
        writer.block("R", bytes(buffer))
    return done + len(buffer)


class BackupFile:
    """A backup, read from its first table to its last."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._reader = SectionReader(path, KIND, "restored")
        try:
            self._reader.check(progress)
            self._blocks = self._reader.blocks()
            self.header: Header = self._decoded("H", next(self._blocks, ("", b"")), Header)
            self.tables = {table.name: table for table in self.header.tables}
            try:
                migrate.pending("postgres", range(1, self.header.version + 1))
            except OpenError as error:
                raise self._reader.refused(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.sequences: dict[str, int] = {}  # known after the last table

    def close(self) -> None:
        self._reader.close()

    def rows(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Each table's name, and its rows as COPY wrote them."""
        block = next(self._blocks, None)
        while block is not None and block[0] == "T":
            name = block[1].decode()
            if name not in self.tables:
                raise self._reader.damaged(f"it has a table {name!r} that it does not describe")
            following: list[tuple[str, bytes] | None] = [None]
            chunks = self._chunks(following)
            yield name, chunks
            for _ in chunks:  # what the caller did not want
                pass
            [block] = following
        if block is None:
            raise self._reader.damaged("it has no end")
        self.sequences = self._decoded("F", block, Footer).sequences

    def _chunks(self, following: list[tuple[str, bytes] | None]) -> Iterator[bytes]:
        for section, data in self._blocks:
            if section != "R":
                following[0] = section, data
                return
            yield data

    def _decoded(self, section: str, block: tuple[str, bytes], kind: type[T]) -> T:
        try:
            if block[0] == section:
                return msgspec.msgpack.decode(block[1], type=kind)
        except msgspec.MsgspecError as error:
            raise self._reader.damaged(f"what it says cannot be: {error}") from error
        raise self._reader.damaged("its parts are not in order")
