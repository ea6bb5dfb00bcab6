"""Behind a pooler in transaction mode: the tenant of one client never reaches the next one on the same session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from pgbouncer import PgBouncer
from psycopg import sql
from role_kit import Roles, fill

import perdure
from perdure.errors import StoreError
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.testing.postgres_server import PostgresServer

NAMES = ("acme", "globex", "initech")


@pytest.fixture
def pooler(roles: Roles, postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """One session of the server for all clients that log in as the application's role."""
    role = roles.name("app")
    assert roles.app
    database = sql.Identifier(roles.database)
    roles.execute(
        sql.SQL("ALTER ROLE {} IN DATABASE {} SET search_path = perdure").format(sql.Identifier(role), database)
    )
    with PgBouncer(postgres_server.port, role, roles.database) as made:
        yield made


@contextmanager
def stranger(pooler: PgBouncer) -> Iterator[psycopg.Connection[Any]]:
    """Another client of the same pool, that sets nothing."""
    with psycopg.connect(pooler.address, autocommit=True, prepare_threshold=None) as connection:
        yield connection


def sees_nothing(connection: psycopg.Connection[Any]) -> bool:
    setting = "current_setting('perdure.tenant', true), current_setting('perdure.tenant_name', true)"
    rows = "(SELECT count(*) FROM thread) + (SELECT count(*) FROM record) + (SELECT count(*) FROM tenant)"
    [tenant, name, count] = connection.execute(f"SELECT {setting}, {rows}".encode()).fetchone() or [0, 0, 0]
    return {tenant, name} <= {None, ""} and count == 0


def test_after_every_operation_the_next_client_sees_nothing(pooler: PgBouncer) -> None:
    with stranger(pooler) as watcher, perdure.open(pooler.address, tenant="acme", prepare=False) as store:
        assert sees_nothing(watcher)
        thread = store.thread("t", metadata={"who": "acme"})
        for number in range(3):
            thread.save({"n": number})
            assert sees_nothing(watcher)
        for look in (thread.load, thread.branches, store.threads, store.ops.verify, store.ops.stats, store.runs):
            look()
            assert sees_nothing(watcher)
        fill(store, "acme")
        assert sees_nothing(watcher)
        thread.prune(keep=1)
        store.delete_thread("t")
        assert sees_nothing(watcher)


def test_after_a_transaction_that_failed_too(pooler: PgBouncer) -> None:
    broken = Sql("SELECT 1 / :zero + count(*) FROM thread")
    with stranger(pooler) as watcher, perdure.open(pooler.address, tenant="acme", prepare=False) as store:
        store.thread("t").save({"n": 1})
        driver: Any = store._context.driver

        def program(last: bool) -> Program[None]:
            yield Batch(Sql("SELECT 1")(tenant=1))
            yield Batch(broken(tenant=1, zero=0), last=last)

        for last in (True, False):
            with pytest.raises(StoreError, match="division by zero"):
                driver.run(Transaction(lambda last=last: program(last), write=True))  # type: ignore[misc]
            assert sees_nothing(watcher)
        assert store.thread("t").load().state == {"n": 1}


def test_after_a_fault_at_every_statement(pooler: PgBouncer) -> None:
    """A client that dies in the middle of a transaction, wherever: the pooler rolls back, and the tenant is gone."""
    points: list[str] = []
    faults: set[int] = set()

    def hook(point: str) -> None:
        points.append(point)
        if len(points) in faults:
            raise RuntimeError(point)

    with stranger(pooler) as watcher, perdure.open(pooler.address, tenant="acme", prepare=False, hook=hook) as store:
        store.thread("t").save({"n": 0})
        before = 0
        for number in range(1, 40):
            points.clear()
            faults = {number}
            with suppress(RuntimeError):
                store.thread("t").save({"n": number})
            struck, faults = len(points) >= number, set()
            assert sees_nothing(watcher)
            found = store.thread("t").load().state["n"]
            assert found == number or (struck and found == before)
            before = found
        assert not struck  # there was none left: every point of a save was struck


def test_tenants_that_take_turns_on_one_session_never_meet(pooler: PgBouncer) -> None:
    stores = {name: perdure.open(pooler.address, tenant=name, prepare=False) for name in NAMES}

    def work(name: str) -> list[Any]:
        thread = stores[name].thread("same name")
        for number in range(20):
            thread.save({"whose": name, "number": number})
            assert thread.load().state == {"whose": name, "number": number}
        return [info.name for info in stores[name].threads()]

    def watch(_: str) -> list[Any]:
        with stranger(pooler) as connection:
            assert all(sees_nothing(connection) for _ in range(60))
        return ["same name"]

    with ThreadPoolExecutor(len(NAMES) + 1) as pool:
        found = list(pool.map(lambda job: job[0](job[1]), [*((work, name) for name in NAMES), (watch, "")]))
    assert found == [["same name"]] * (len(NAMES) + 1)
    assert pooler.transactions() > 100
    for store in stores.values():
        assert store.ops.verify().ok
        store.close()


def test_async_and_cancelled_clients_leave_nothing_behind(pooler: PgBouncer) -> None:
    async def work(store: perdure.Store) -> None:
        thread = store.thread("t")
        for number in range(1000):
            await thread.asave({"n": number})

    async def main() -> None:
        async with perdure.open(pooler.address, tenant="acme", prepare=False) as store:
            await store.thread("t").asave({"n": -1})
            for _ in range(5):
                task = asyncio.create_task(work(store))
                while (await store.thread("t").aload()).state["n"] < 1 and not task.done():
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await store.thread("t").asave({"n": -1})

    asyncio.run(main())
    with stranger(pooler) as watcher:
        assert sees_nothing(watcher)


def test_a_setting_that_outlives_its_transaction_would_be_seen(pooler: PgBouncer) -> None:
    """The test of the test: the pooler does hand sessions on, with all that was set in them."""
    with stranger(pooler) as careless, stranger(pooler) as watcher:
        careless.execute("SELECT set_config('perdure.tenant', '1', false)")
        assert not sees_nothing(watcher)
