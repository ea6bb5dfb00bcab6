"""PostgreSQL databases for tests: copies of one that is migrated already, ten times as quick as migrating each."""

from __future__ import annotations

import itertools

import perdure
from perdure.testing.postgres_server import PostgresServer

_TEMPLATE = "migrated"
_numbers = itertools.count(1)


def make_template(server: PostgresServer) -> None:
    """Migrate the database that all others are copied from. Each copy gets a store id of its own when it is opened."""
    perdure.open(server.create_database(_TEMPLATE)).close()
    server.execute("DELETE FROM perdure.meta WHERE key = 'store'", _TEMPLATE)


def new_database(server: PostgresServer, *, migrated: bool = True) -> str:
    """The name of a new database: one with the tables of a store, or an empty one."""
    name = f"test_{next(_numbers)}"
    server.create_database(name, template=_TEMPLATE if migrated else "template1")
    return name
