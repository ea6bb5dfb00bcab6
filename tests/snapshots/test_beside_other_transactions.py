"""PostgreSQL: other transactions, poolers and missing rights. None makes a snapshot show the live store."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from pgbouncer import PgBouncer
from psycopg import sql
from role_kit import Roles, roles_of

import perdure
from perdure.errors import Busy, OpenError
from perdure.snapshots import store as taking
from perdure.testing.postgres_server import PostgresServer


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    yield from roles_of(postgres_url)


@pytest.mark.parametrize(
    ("is_first", "statement"),
    [(True, b"SELECT 1 FROM perdure.thread"), (False, b"UPDATE perdure.thread SET name = name")],
)
def test_a_transaction_that_stays_open_is_named_and_stops_no_other(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, is_first: bool, statement: bytes
) -> None:
    """A dump that reads for an hour is in the way of the first snapshot, one that writes of every other."""
    monkeypatch.setattr(taking, "_PATIENCE_S", 0.2)
    with perdure.open(postgres_url) as store, psycopg.connect(postgres_url, application_name="a dump") as other:
        store.thread("a").save({"n": 1})
        if not is_first:
            store.snapshot("first")
        other.execute(statement)
        with pytest.raises(Busy, match="'a dump', idle in transaction"):
            store.snapshot("s")
        store.thread("b").save({"n": 2})
        other.rollback()
        assert store.snapshot("s").thread("b").load().state == {"n": 2}


def test_what_cannot_be_read_at_a_snapshot_is_not_read_from_the_live_store(postgres_url: str) -> None:
    """PostgreSQL skips a schema that is not there, as after a dump of one schema, or that the role may not use."""
    with perdure.open(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        store.thread("a").save({"n": 1})
        snapshot = store.snapshot("s")
        store.thread("a").save({"n": 2})
        assert snapshot.thread("a").load().state == {"n": 1}
        other.execute("DROP SCHEMA perdure_at CASCADE")
        with pytest.raises(OpenError, match="missing"):
            snapshot.thread("a").load()


def test_a_schema_that_a_dropped_store_left_is_replaced(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        store.snapshot("s")
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("DROP SCHEMA perdure CASCADE")
    with perdure.open(postgres_url) as store:
        assert store.snapshot("s").threads() == []


def test_a_snapshot_is_read_behind_a_transaction_pooler(roles: Roles, postgres_server: PostgresServer) -> None:
    with perdure.open(roles.owner) as store:
        store.thread("a").save({"n": 1})
        store.snapshot("s")
        store.thread("a").save({"n": 2})
    role = roles.name("app")
    assert roles.app
    names = sql.Identifier(role), sql.Identifier(roles.database)
    roles.execute(sql.SQL("ALTER ROLE {} IN DATABASE {} SET search_path = perdure").format(*names))
    with (
        PgBouncer(postgres_server.port, role, roles.database) as pooler,
        perdure.open(pooler.address, prepare=False) as store,
    ):
        for _ in range(2):  # one session for both
            assert store.get_snapshot("s").thread("a").load().state == {"n": 1}
            assert store.thread("a").load().state == {"n": 2}
