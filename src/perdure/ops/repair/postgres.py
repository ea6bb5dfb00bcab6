"""Repairing a store on PostgreSQL: on a copy of its schema, in the same database, or in place.

The copy is made in one transaction, as of one moment; its indexes are made with it. What PostgreSQL itself cannot read
is not for us: the tools of its server, or a backup, are.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from perdure.errors import Damaged, UsageError
from perdure.storage.postgres import errors as meaning
from perdure.storage.postgres import opening as postgres_open
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.postgres.errors import Target

_TABLES = """SELECT c.relname::text, array_agg(a.attname::text ORDER BY a.attnum)
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r' AND a.attgenerated = ''
    GROUP BY c.relname ORDER BY c.relname"""
_SEQUENCES = (
    "SELECT relname::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'S' ORDER BY relname"
)
_FIRST = ("tenant", "blob")  # a foreign key wants what it refers to first
_PATIENCE = "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"


def target_of(url: str, options: dict[str, Any], schema: str | None = None) -> Target:
    chosen = schema or options.get("schema", "perdure")
    return postgres_open.parsed(url, schema=chosen, timeout_s=options.get("timeout_s", 30.0), durability="full")


def copy_schema(url: str, options: dict[str, Any], new: str) -> None:
    """Copy a store into a new schema of its database. Raises UsageError if that is there already."""
    target = target_of(url, options)
    connection, _ = postgres_open.first_connection(target)
    try:
        found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (new,)).fetchone()
        if found:
            raise UsageError(f'the schema "{new}" exists already: choose another one, or drop it first')
        PostgresDriver(url, schema=new, timeout_s=options.get("timeout_s", 30.0)).close()
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute(_PATIENCE)
            _copy(connection, target.schema, new)
    except psycopg.errors.DataCorrupted as error:
        drop_schema(url, options, new)
        raise Damaged(
            f"PostgreSQL itself cannot read {target} ({error}): restore a backup, or see its own documentation about "
            "damaged pages"
        ) from error
    except psycopg.Error as error:
        raise meaning.translated(error, target, options.get("timeout_s", 30.0)) from error
    finally:
        connection.close()


def _copy(connection: Any, old: str, new: str) -> None:
    tables = dict(connection.execute(_TABLES, (old,)).fetchall())
    for name in sorted(tables, key=lambda name: (name not in _FIRST, name)):
        if name == "migration":
            continue
        columns = sql.SQL(", ").join(map(sql.Identifier, tables[name]))
        source, target = sql.Identifier(old, name), sql.Identifier(new, name)
        connection.execute(sql.SQL("DELETE FROM {}").format(target))
        connection.execute(
            sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}").format(
                target, columns, columns, source
            )
        )
    for (name,) in connection.execute(_SEQUENCES, (old,)).fetchall():
        connection.execute(
            sql.SQL("SELECT setval({}, greatest(last_value, 1), is_called) FROM {}").format(
                sql.Literal(f'"{new}"."{name}"'), sql.Identifier(old, name)
            )
        )


def drop_schema(url: str, options: dict[str, Any], schema: str) -> None:
    """Remove a copy that is not wanted."""
    connection, _ = postgres_open.first_connection(target_of(url, options))
    try:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    finally:
        connection.close()
