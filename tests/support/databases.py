"""PostgreSQL databases for tests: copies of one that is migrated already, ten times as quick as migrating each.

A test that changed only rows gives its database back, and the next test gets it empty: that is quicker than a copy, and
what the server has cached of the catalog stays. A database whose catalog was changed, or that has grown, is dropped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psycopg

import perdure
from perdure.testing.postgres_server import PostgresServer

_TEMPLATE = "migrated"
_GROWN_BYTES = 2 << 20  # dead rows slow down later tests
_numbers = itertools.count(1)
_TABLES = "SELECT relname FROM pg_class WHERE relnamespace = 'perdure'::regnamespace AND relkind = 'r' ORDER BY oid"
_SEQUENCES = "SELECT format('perdure.%I', sequencename), last_value FROM pg_sequences WHERE schemaname = 'perdure'"
# Whatever a test can change besides rows: tables, rights, triggers, functions, settings, statistics of the planner.
_CATALOG = """SELECT md5(concat_ws('/',
    (SELECT string_agg(concat_ws(',', oid, relacl, relrowsecurity, relforcerowsecurity, reloptions, relnatts), ';'
        ORDER BY oid) FROM pg_class WHERE oid >= 16384 AND relkind <> 't'),
    (SELECT string_agg(concat_ws(',', oid, proacl, prosrc), ';' ORDER BY oid) FROM pg_proc WHERE oid >= 16384),
    (SELECT string_agg(concat_ws(',', oid, tgenabled), ';' ORDER BY oid) FROM pg_trigger),
    (SELECT string_agg(concat_ws(',', oid, nspacl), ';' ORDER BY oid) FROM pg_namespace),
    (SELECT string_agg(oid::text, ';' ORDER BY oid) FROM pg_policy),
    (SELECT string_agg(oid::text, ';' ORDER BY oid) FROM pg_constraint WHERE oid >= 16384),
    (SELECT count(*) FROM pg_default_acl), (SELECT count(*) FROM pg_db_role_setting),
    (SELECT count(*) FROM pg_extension),
    (SELECT count(*) FROM pg_statistic WHERE starelid >= 16384),
    (SELECT concat_ws(',', datacl, datconnlimit) FROM pg_database WHERE datname = current_database())))"""
_END_OTHERS = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""


def make_template(server: PostgresServer) -> None:
    """Migrate the database that all others are copied from. Each copy gets a store id of its own when it is opened."""
    perdure.open(server.create_database(_TEMPLATE)).close()
    server.execute("DELETE FROM perdure.meta WHERE key = 'store'", _TEMPLATE)


def new_database(server: PostgresServer, *, migrated: bool = True) -> str:
    """The name of a new database: one with the tables of a store, or an empty one."""
    name = f"test_{next(_numbers)}"
    server.create_database(name, template=_TEMPLATE if migrated else "template1")
    return name


class _Database:
    """A migrated database, and a connection that empties it after each test."""

    def __init__(self, server: PostgresServer) -> None:
        self.name = new_database(server)
        self._server = server
        self._connection: psycopg.Connection[Any] = psycopg.connect(server.url(self.name), autocommit=True)
        tables = [name for (name,) in self._rows(_TABLES)]
        self._catalog, self._bytes = self._rows(_CATALOG), self._size()
        sequences = [f"SELECT setval('{name}', {at or 1}, {at is not None})" for name, at in self._rows(_SEQUENCES)]
        contents = ((name, self._rows(f"SELECT json_agg(t)::text FROM perdure.{name} t")[0][0]) for name in tables)
        fill = "INSERT INTO perdure.{0} SELECT * FROM json_populate_recordset(NULL::perdure.{0}, $json${1}$json$)"
        rows = [fill.format(name, rows) for name, rows in contents if rows is not None]
        # Triggers and foreign keys would see rows of an earlier test go.
        deletes = [f"DELETE FROM perdure.{name}" for name in tables]
        self._empty = "; ".join(
            ["BEGIN", "SET LOCAL session_replication_role = replica", *deletes, *rows, *sequences, "COMMIT"]
        )

    def empty(self) -> bool:
        """Make it as it was when it was new. Return False if that cannot be, or not cheaply."""
        try:
            while self._rows(_END_OTHERS):
                time.sleep(0.002)  # the server ends a process soon after its connection was closed
            if self._rows(_CATALOG) != self._catalog or self._size() > self._bytes + _GROWN_BYTES:
                return False
            self._connection.execute(self._empty.encode())
        except psycopg.Error:  # the test restarted the server, or ended all connections
            return False
        return True

    def drop(self) -> None:
        self._connection.close()
        self._server.drop_database(self.name)

    def _rows(self, sql: str) -> list[Any]:
        return self._connection.execute(sql.encode()).fetchall()

    def _size(self) -> int:
        [(size,)] = self._rows("SELECT pg_database_size(current_database())")
        return int(size)


class DatabasePool:
    """The databases of a server that tests use one after the other, and the template that they are copied from."""

    _pools: ClassVar[dict[int, DatabasePool]] = {}  # by the port of the server

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._clean: list[_Database] = []
        make_template(server)
        self._pools[server.port] = self

    @classmethod
    def of(cls, server: PostgresServer) -> DatabasePool:
        return cls._pools[server.port]

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a database that has the tables of a store, and nothing in them."""
        database = self._clean.pop() if self._clean else _Database(self._server)
        yield self._server.url(database.name)
        if database.empty():
            self._clean.append(database)
        else:
            database.drop()

    def __enter__(self) -> DatabasePool:
        return self

    def __exit__(self, *_: object) -> None:
        del self._pools[self._server.port]
        while self._clean:
            self._clean.pop().drop()
