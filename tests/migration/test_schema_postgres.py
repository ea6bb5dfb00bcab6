"""PostgreSQL's schema equals its migrations, replayed one by one. (SQLite's: tests/unit/test_migrate.py.)"""

from __future__ import annotations

import time
from typing import Any

import psycopg

import perdure
from perdure.storage import migrate

_DESCRIBE = {
    "columns": """SELECT table_name, ordinal_position, column_name, data_type, is_nullable, column_default, is_identity
        FROM information_schema.columns WHERE table_schema = %s ORDER BY 1, 2""",
    "indexes": "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = %s ORDER BY 1, 2",
    "constraints": """SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = %s::regnamespace ORDER BY 1, 2""",
    "sequences": """SELECT sequence_name, data_type FROM information_schema.sequences
        WHERE sequence_schema = %s ORDER BY 1""",
    "storage": """SELECT c.relname, a.attname, a.attstorage::text, c.reloptions::text FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        WHERE c.relnamespace = %s::regnamespace ORDER BY 1, 2""",
}


def describe(url: str, schema: str) -> dict[str, list[tuple[Any, ...]]]:
    with psycopg.connect(url) as connection:
        connection.execute(f'SET search_path TO "{schema}"'.encode())
        return {
            what: [
                tuple(part.replace(schema, "the schema") if isinstance(part, str) else part for part in row)
                for row in connection.execute(sql.encode(), [schema])
            ]
            for what, sql in _DESCRIBE.items()
        }


def replay(url: str, schema: str) -> None:
    """Each migration in a session and a transaction of its own, with its row."""
    with psycopg.connect(url) as connection:
        connection.execute(f'CREATE SCHEMA "{schema}"'.encode())
        connection.execute(f'SET search_path TO "{schema}"'.encode())
        connection.execute(migrate.CREATE_TABLE.encode())
    for migration in migrate.migrations("postgres"):
        with psycopg.connect(url) as connection:
            connection.execute(f'SET search_path TO "{schema}"'.encode())
            connection.execute(f"{migration.adds};{migration.changes}".encode())
            connection.execute(
                "INSERT INTO migration (version, applied_at) VALUES (%s, %s)",
                (migration.version, time.time_ns() // 1000),
            )


def test_the_newest_schema_is_all_migrations_replayed_one_by_one(empty_postgres_url: str) -> None:
    perdure.open(empty_postgres_url, schema="fresh").close()
    replay(empty_postgres_url, "replayed")
    fresh = describe(empty_postgres_url, "fresh")
    assert fresh["columns"]
    assert describe(empty_postgres_url, "replayed") == fresh


def test_a_replayed_schema_is_a_store(empty_postgres_url: str) -> None:
    replay(empty_postgres_url, "replayed")
    with perdure.open(empty_postgres_url, schema="replayed") as store:
        store.thread("t").save({"n": 1})
        assert store.thread("t").load().state == {"n": 1}
        assert store.ops.verify().ok
