"""The oldest PostgreSQL that is promised: what the SQL of every domain needs is there.

`make soak` runs every test of PostgreSQL on it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from contracts import Harness, StoreSmoke
from databases import DatabasePool

import perdure
from perdure.storage.postgres.opening import SERVER_VERSION_MIN
from perdure.testing.postgres_server import PostgresServer

PROGRAMS = Path(sys.prefix) / "postgres15" / "pgserver" / "pginstall" / "bin"


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    """The server of `postgres_url` in this module."""
    assert PROGRAMS.is_dir(), "`make test` installs this server: make .venv/.postgres15"
    with PostgresServer(fsync=False, programs=PROGRAMS) as server, DatabasePool(server):
        yield server


@pytest.fixture
async def harness(postgres_url: str) -> AsyncIterator[Harness]:
    harness = Harness(partial(perdure.open, postgres_url, durability="normal"), "blocking")
    yield harness
    await harness.finish()


class TestStoreOnTheOldestServer(StoreSmoke):
    """One of everything that threads promise."""


def test_the_server_is_the_oldest_that_is_promised(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url()) as connection:
        assert connection.info.server_version // 10_000 * 10_000 == SERVER_VERSION_MIN


@perdure.effect(name="oldest pay")
def pay(cents: int) -> str:
    return f"paid {cents}"


@perdure.durable(name="oldest checkout")
def checkout(cents: int) -> str:
    receipt = pay(cents)
    return str(perdure.ask(f"{receipt}: ship it?"))


def test_runs_memory_snapshots_and_erasure(postgres_url: str) -> None:
    with perdure.open(postgres_url, tenant="acme") as store:
        store.run(checkout, 5, id="c-1")
        notes = store.memory("users", "ann")
        notes.put("color", {"fact": "Ann likes blue"})
        snapshot = store.snapshot("before")
        notes.put("color", {"fact": "Ann likes red"})
        store.answer("c-1", "yes")
        assert store.run(checkout, 5, id="c-1").result() == "yes"
        assert notes.search("likes red")[0].key == "color"
        assert {str(change) for change in snapshot.diff()} >= {"~ item users/ann/color"}
        store.restore(snapshot, namespaces=[("users", "ann")])
        item = notes.get("color")
        assert item is not None
        assert item.value == {"fact": "Ann likes blue"}
        notes.erase("color")
        assert notes.get("color") is None
        assert store.ops.verify().ok
