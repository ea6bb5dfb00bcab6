"""Opening a store on PostgreSQL: its schema, its settings, and what is said when it cannot be opened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from perdure.errors import OpenError, ReadOnlyStore, Unavailable, UsageError
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.program import Batch, Program, Rows, Sql, Transaction
from perdure.testing.postgres_server import PostgresServer

PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, :value)")
SLOW = Sql("SELECT pg_sleep(:seconds)")


def once(sql: Sql, last: bool = True, **params: Any) -> Callable[[], Program[Rows]]:
    def op() -> Program[Rows]:
        [rows] = yield Batch(sql(**params), last=last)
        return rows

    return op


def read(driver: PostgresDriver, op: Callable[[], Program[Any]]) -> Any:
    return driver.run(Transaction(op))


def test_openers_at_the_same_time_do_not_clash(empty_postgres_url: str) -> None:
    def open_and_close(_: int) -> str:
        driver = PostgresDriver(empty_postgres_url)
        driver.close()
        return driver.store_id

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(open_and_close, range(8)))
    assert len(ids) == 1
    with psycopg.connect(empty_postgres_url) as connection:
        [row] = connection.execute("SELECT value FROM perdure.meta WHERE key = 'store'").fetchall()
    assert {row[0]} == ids


def test_two_schemas_are_two_stores(empty_postgres_url: str) -> None:
    one, two = PostgresDriver(empty_postgres_url, schema="one"), PostgresDriver(empty_postgres_url, schema="two")
    assert one.store_id != two.store_id
    one.close()
    two.close()
    for name in ("Upper", "pg_mine", "a b", 'x"; DROP', ""):
        with pytest.raises(UsageError):
            PostgresDriver(empty_postgres_url, schema=name)


def test_an_empty_database_is_not_a_store_unless_asked(empty_postgres_url: str) -> None:
    with pytest.raises(OpenError, match="has no Perdure store"):
        PostgresDriver(empty_postgres_url, create=False)
    PostgresDriver(empty_postgres_url).close()
    PostgresDriver(empty_postgres_url, create=False).close()


def test_a_newer_store_is_refused(empty_postgres_url: str) -> None:
    PostgresDriver(empty_postgres_url).close()
    with psycopg.connect(empty_postgres_url) as connection:
        connection.execute("INSERT INTO perdure.migration VALUES (999, 0)")
    with pytest.raises(OpenError, match="newer Perdure"):
        PostgresDriver(empty_postgres_url)


def test_durability_and_settings_hold_for_each_connection(empty_postgres_url: str) -> None:
    setting = Sql("SELECT current_setting('synchronous_commit'), current_setting('search_path')")
    for durability, expected in (("full", "on"), ("normal", "off")):
        driver = PostgresDriver(empty_postgres_url, durability=durability)  # type: ignore[arg-type]
        assert read(driver, once(setting)) == [(expected, "perdure")]
        assert asyncio.run(driver.arun(Transaction(once(setting)))) == [(expected, "perdure")]
        driver.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:sesame@127.0.0.1:1/none",
        "postgresql://app:sesame@127.0.0.1:{port}/nowhere",
        "postgresql://app:sesame@127.0.0.1:{port}/postgres",
        "postgresql://app:sesame@127.0.0.1:sesame/none",
        "postgresql://app:x@sesame@127.0.0.1/none",
        "postgresql://app:sesame@host.invalid/none",
        "mysql://app:sesame@127.0.0.1/none",
        "postgresql://app:ses ame%zz@127.0.0.1/none",
    ],
)
def test_what_cannot_be_opened_says_why_and_never_the_password(
    postgres_server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    with pytest.raises(OpenError) as caught:
        PostgresDriver(url.format(port=postgres_server.port), timeout_s=2)
    assert "?" not in str(caught.value)  # libpq asks whether the server runs; the advice says to look
    error: BaseException | None = caught.value
    while error is not None:
        assert "ses" not in f"{error} {error!r}".replace("session", "")
        error = error.__cause__
    assert "sesame" not in caplog.text


def test_an_unknown_table_and_a_read_only_server(empty_postgres_url: str) -> None:
    driver = PostgresDriver(empty_postgres_url)
    with pytest.raises(OpenError, match="no Perdure store"):
        read(driver, once(Sql("SELECT 1 FROM nothing_here")))
    frozen = PostgresDriver(f"{empty_postgres_url}?options=-c%20default_transaction_read_only%3Don", create=False)
    with pytest.raises(ReadOnlyStore):
        frozen.run(Transaction(once(PUT, key="a", value="b"), write=True))
    frozen.close()
    driver.close()


def test_a_silent_server_is_given_up_on(empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the statement and never answers: by our clock, since its own does not tick."""
    monkeypatch.setattr("perdure.storage.postgres.connection.GRACE_S", 0.1)
    driver = PostgresDriver(empty_postgres_url, timeout_s=0.5)
    asleep = Sql("SELECT set_config('statement_timeout', '0', false)")
    read(driver, once(asleep))
    start = time.monotonic()
    with pytest.raises(Unavailable, match="no answer"):
        read(driver, once(SLOW, seconds=60, last=False))
    assert time.monotonic() - start < 30
    driver.close()
