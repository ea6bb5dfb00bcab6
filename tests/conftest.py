"""Fixtures shared by all tests: a real PostgreSQL, started once, and a fresh database for each test.

A server that cannot start fails the tests that need it, here and in CI. It never skips them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from holdfast.testing.postgres import PostgresServer

# Before any test imports them: their assertions are shown as those of tests are.
pytest.register_assert_rewrite(
    *(f"holdfast.testing.contract_{part}" for part in ("arranging", "history", "saving", "sharing", "values")),
    "holdfast.testing.harness",
)

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for the whole test run. fsync is off: tests that pull the plug start a server of their own."""
    with PostgresServer(fsync=False) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database that is dropped after the test."""
    name = f"test_{next(_numbers)}"
    url = postgres_server.create_database(name)
    yield url
    postgres_server.drop_database(name)
