"""Restoring into PostgreSQL: schema, rows, sequences and what settles them, in one transaction.

The schema is made as it was when the backup was made; opening the store brings it up to date. A schema that is there
must hold an empty store. Row-level security is lifted inside the transaction, which only the tables' owner can, and
COPY needs; nobody else sees that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
import psycopg
from psycopg import sql

from perdure.errors import UsageError
from perdure.ops.copies.backup import kind_of
from perdure.ops.copies.backup_postgres import FIRST, SEQUENCES, TABLES, BackupFile, Table
from perdure.ops.copies.backup_sqlite import damaged_file, open_backup, read_mark
from perdure.ops.copies.copy_format import pack_rows
from perdure.ops.copies.settling import FORGET, JUMP, Loaded, remember, settle, taken_up
from perdure.storage import migrate
from perdure.storage.postgres import errors as meaning
from perdure.storage.postgres import opening as postgres_open
from perdure.storage.postgres.errors import Target
from perdure.storage.program import Progress

_UNCOUNTED = ("meta", "copy", "migration", "size_sample", "tenant_role")
_SECURED = "SELECT relname::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relrowsecurity"
_PATIENCE = "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
# SQLite gives these numbers itself.
_COUNTED = {"number": None, "body_id_seq": ("body", "id"), "pack_pack_seq": ("pack", "pack")}

Source = Iterator[tuple[str, Iterator[bytes]]]


def target_of(url: str, options: dict[str, Any]) -> Target:
    return postgres_open.parsed(
        url, schema=options.get("schema", "perdure"), timeout_s=options.get("timeout_s", 30.0), durability="full"
    )


def shown(url: str, options: dict[str, Any]) -> str:
    """Where it was restored to, without a password."""
    target = target_of(url, options)
    return f'{target}, schema "{target.schema}"'


def load_tables(backup: Path, url: str, options: dict[str, Any], at: int, progress: Progress | None) -> Loaded:
    """Fill a schema from a backup, all or nothing. What the same restore has filled before it was interrupted is taken
    as it is."""
    with _connected(url, options) as (connection, target), connection.transaction():
        connection.execute(_PATIENCE.encode())
        postgres_open._lock(connection, target)
        if kind_of(backup) == "postgres":
            return _load_from_postgres(connection, target, backup, at, progress)
        return _load_from_sqlite(connection, target, backup, at)


def forget(url: str, options: dict[str, Any]) -> None:
    """The restore has come to its end."""
    with _connected(url, options) as (connection, _):
        connection.execute(FORGET)


@contextmanager
def _connected(url: str, options: dict[str, Any]) -> Iterator[tuple[Any, Target]]:
    target = target_of(url, options)
    connection, _ = postgres_open.first_connection(target)
    try:
        yield connection, target
    except psycopg.errors.InsufficientPrivilege as error:
        raise UsageError(
            f'a backup is restored by the owner of the schema "{target.schema}" and its tables: {error}'
        ) from error
    except psycopg.Error as error:
        raise meaning.translated(error, target, options.get("timeout_s", 30.0)) from error
    finally:
        connection.close()


def _load_from_postgres(connection: Any, target: Any, backup: Path, at: int, progress: Progress | None) -> Loaded:
    file = BackupFile(backup, progress)
    try:
        made = file.header.id
        if (found := _taken_up(connection, target, made)) is not None:
            return found
        _prepare(connection, target, file.header.version)
        rows = _copy_in(connection, target, file.rows(), file.tables)
        return _finish(connection, target, file.sequences, made, at, rows)
    finally:
        file.close()


def _load_from_sqlite(connection: Any, target: Any, backup: Path, at: int) -> Loaded:
    mark = read_mark(backup)
    made = str(mark["id"]) if mark else ""
    if (taken := _taken_up(connection, target, made)) is not None:
        return taken
    source = open_backup(backup)
    try:
        source.execute("BEGIN")
        [(version,)] = source.execute("SELECT max(version) FROM migration")
        migrate.pending("postgres", range(1, version + 1))  # refuses a newer one
        _prepare(connection, target, version)
        tables = {row[0]: Table(*row) for row in connection.execute(TABLES, (target.schema,))}
        rows = _copy_in(connection, target, _rows_of_sqlite(source, tables), tables)
        [(number,)] = source.execute("SELECT number FROM clock")
        sequences = {"number": int(number)}
        for sequence, place in _COUNTED.items():
            if place is not None and place[0] in tables:
                [(last,)] = source.execute(f"SELECT coalesce(max({place[1]}), 0) FROM {place[0]}")
                sequences[sequence] = int(last)
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise damaged_file(backup, error) from error
    except apsw.Error as error:
        raise UsageError(f"{backup} cannot be read as a backup: {error}") from error
    finally:
        source.close()
    return _finish(connection, target, sequences, made, at, rows)


def _rows_of_sqlite(source: apsw.Connection, tables: dict[str, Table]) -> Source:
    there = {name for (name,) in source.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    for table in sorted(tables.values(), key=lambda table: table.name not in FIRST):
        if table.name in there and table.name != "migration":
            names = ", ".join(f'"{column}"' for column in table.columns)
            yield table.name, pack_rows(source.execute(f'SELECT {names} FROM "{table.name}"'), table.types)


def _prepare(connection: Any, target: Any, version: int) -> None:
    """The schema of that version, without a row."""
    applied = postgres_open._applied(connection, target)
    if applied is None:
        postgres_open._create_schema(connection, target)
        applied = []
    elif max(applied, default=0) > version:
        raise UsageError(
            f'the schema "{target.schema}" of {target} is newer than the backup: drop it first, it is made anew'
        )
    for migration in migrate.migrations("postgres")[len(applied) : version]:
        postgres_open._apply(connection, migration)
    for table in ("thread", "run", "tenant"):
        look = sql.SQL("SELECT 1 FROM {} LIMIT 1").format(sql.Identifier(target.schema, table))
        if _exists(connection, target, table) and connection.execute(look).fetchone():
            raise UsageError(
                f'the store in schema "{target.schema}" of {target} is not empty: restore into another schema '
                "(schema=…, --schema), or drop this one first"
            )


def _taken_up(connection: Any, target: Any, made: str) -> Loaded | None:
    return taken_up(connection.execute, made) if _exists(connection, target, "meta") else None


def _exists(connection: Any, target: Any, table: str) -> bool:
    [found] = connection.execute("SELECT to_regclass(%s)", (f"{target.schema}.{table}",)).fetchone()
    return found is not None


def _copy_in(connection: Any, target: Any, source: Source, tables: dict[str, Table]) -> dict[str, int]:
    """Every table's rows. How many each got."""
    secured = [name for (name,) in connection.execute(_SECURED, (target.schema,)).fetchall()]
    _secure(connection, target, secured, "DISABLE")
    counts: dict[str, int] = {}
    with connection.cursor() as cursor:
        for name, chunks in source:
            place = sql.Identifier(target.schema, name)
            cursor.execute(sql.SQL("DELETE FROM {}").format(place))
            columns = sql.SQL(", ").join(map(sql.Identifier, tables[name].columns))
            text = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(place, columns)
            with cursor.copy(text) as copying:
                for chunk in chunks:
                    copying.write(chunk)
            if name not in _UNCOUNTED:
                counts[name] = int(cursor.rowcount)
    _secure(connection, target, secured, "ENABLE")
    return counts


def _secure(connection: Any, target: Any, tables: list[str], verb: str) -> None:
    for name in tables:
        text = sql.SQL("ALTER TABLE {} {} ROW LEVEL SECURITY")
        connection.execute(text.format(sql.Identifier(target.schema, name), sql.SQL(verb)))


def _finish(
    connection: Any, target: Any, sequences: dict[str, int], made: str, at: int, rows: dict[str, int]
) -> Loaded:
    known = {name for (name,) in connection.execute(SEQUENCES, (target.schema,))}
    for name, last in sequences.items():
        number = last + JUMP if name == "number" else last
        if number and name in known:
            place = sql.Identifier(target.schema, name).as_string(connection)
            connection.execute("SELECT setval(%s::regclass, %s)", (place, number))
    with connection.cursor() as cursor:
        has_runs = _exists(connection, target, "run")
        requeued = settle(cursor.execute, made, at, lambda: int(cursor.rowcount), "%s", has_runs=has_runs)
        loaded = Loaded(made, requeued, rows)
        remember(cursor.execute, loaded, "%s")
        return loaded


@contextmanager
def temporary_schema(driver: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema of the store's own database, dropped afterwards."""
    name = f"perdure_restore_{os.urandom(6).hex()}"
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(driver._target.conninfo)
    try:
        yield _url(given), {"schema": name}
    finally:
        connection = driver._connect_plain()
        try:
            connection.execute("SET statement_timeout = 0")
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))
        finally:
            connection.close()


def _url(given: dict[str, Any]) -> str:
    """A URL with the same parameters, all of them behind the question mark."""
    return "postgresql://?" + "&".join(f"{key}={quote(str(value), safe='')}" for key, value in given.items())
