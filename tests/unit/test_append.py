"""`Driver.append`: statements in one transaction, straight; all of them or none, by how many rows each changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from perdure.errors import StoreClosed, StoreError
from perdure.storage.program import Batch, Driver, Program, Sql, Statement, Transaction
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.urls import open_driver

PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, :value)")
MOVE = Sql("UPDATE meta SET value = :value WHERE key = :key AND value = :was")
# PostgreSQL commits whatever the statements did: one statement that does nothing where the condition does not hold.
GUARDED = Sql(
    sqlite=(
        "UPDATE meta SET value = :value WHERE key = 'guard' AND value = :was",
        "INSERT INTO meta (key, value) SELECT :key, :value WHERE changes() = 1",
    ),
    postgres="""WITH moved AS (UPDATE meta SET value = :value WHERE key = 'guard' AND value = :was RETURNING 1)
        INSERT INTO meta (key, value) SELECT :key, :value FROM moved""",
)


@pytest.fixture(params=["sqlite", "memory", "postgres"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    places = {"sqlite": str(tmp_path / "a.db"), "memory": ":memory:"}
    url = places.get(request.param) or request.getfixturevalue("postgres_url")
    made = open_driver(url, durability="full", timeout_s=10, create=True)
    made.run(Transaction(lambda: run_all(PUT(key="guard", value="0")), write=True))
    yield made
    made.close()


def run_all(*statements: Statement) -> Program[list[Any]]:
    return (yield Batch(*statements))


def keys(driver: Driver) -> dict[str, str]:
    [rows] = driver.run(Transaction(lambda: run_all(Sql("SELECT key, value FROM meta")())))
    return {key: value for key, value in rows if key != "store"}


def test_it_is_written_if_every_count_is_right(driver: Driver) -> None:
    assert driver.append([GUARDED(key="a", value="1", was="0")], [1])
    assert driver.append([PUT(key="b", value="2"), PUT(key="c", value="3")], [1, None])
    assert keys(driver) == {"guard": "1", "a": "1", "b": "2", "c": "3"}


def test_nothing_is_written_if_a_count_is_wrong(driver: Driver) -> None:
    assert not driver.append([GUARDED(key="a", value="1", was="another")], [1])
    assert keys(driver) == {"guard": "0"}
    assert driver.append([GUARDED(key="a", value="1", was="0")], [1])


def test_sqlite_takes_back_what_came_before_the_wrong_count(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db")
    assert not driver.append([PUT(key="a", value="1"), MOVE(key="none", value="1", was="0")], [1, 1])
    assert keys(driver) == {}
    driver.close()


def test_errors_are_those_of_run(driver: Driver) -> None:
    with pytest.raises(StoreError) as caught:
        driver.append([PUT(key="guard", value="again")], [1])
    assert getattr(caught.value, "kind", None) == "unique"
    assert driver.append([PUT(key="a", value="1")], [1])
    driver.close()
    with pytest.raises(StoreClosed):
        driver.append([PUT(key="b", value="1")], [1])


async def test_the_async_twin(driver: Driver) -> None:
    done = await asyncio.gather(*(driver.aappend([PUT(key=f"k{n}", value="1")], [1]) for n in range(40)))
    assert all(done)
    assert not await driver.aappend([GUARDED(key="a", value="1", was="another")], [1])
    assert len(keys(driver)) == 41


def test_threads_that_append_and_run_at_once_lose_nothing(driver: Driver) -> None:
    def work(name: str) -> None:
        for number in range(25):
            statement = PUT(key=f"{name}{number}", value="1")
            if number % 2:
                assert driver.append([statement], [1])
            else:
                driver.run(Transaction(lambda: run_all(statement), write=True))  # noqa: B023

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys(driver)) == 101


@pytest.mark.parametrize("count", [1, 2])
def test_a_fault_at_any_point_writes_all_or_nothing(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the short path, which the queue of writers does not see: the fault loops of other tests reach it too."""
    points: list[str] = []
    strike_at = 0

    def hook(name: str) -> None:
        points.append(name)
        if len(points) == strike_at:
            raise OSError(name)

    driver = SqliteDriver(tmp_path / "a.db", hook=hook)
    monkeypatch.setattr(driver._queue, "run", None)
    puts = [PUT(key=key, value="1") for key in "ab"[:count]]
    expected = ["begin", *(f"statement:{number}" for number in range(count)), "commit", "committed"]
    for strike_at, point in enumerate(expected, 1):
        points.clear()
        with pytest.raises(OSError, match=point):
            driver.append(puts, [1] * count)
        assert points == expected[:strike_at]
        strike_at = 0
        assert list(keys(driver)) == (["a", "b"][:count] if point == "committed" else [])
    driver.close()


def test_a_second_process_sees_it_at_once(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db")
    driver.append([PUT(key="a", value="1")], [1])
    other = apsw.Connection(str(tmp_path / "a.db"))
    assert other.execute("SELECT value FROM meta WHERE key = 'a'").fetchall() == [("1",)]
    other.close()
    driver.close()


async def test_gathered_writes_fail_one_by_one(postgres_url: str) -> None:
    """Concurrent writes share a transaction on PostgreSQL; one that violates a constraint takes none with it."""
    driver = open_driver(postgres_url, durability="full", timeout_s=10, create=True)

    async def put(number: int) -> Any:
        statement = PUT(key=f"k{number % 30}", value="1")
        if number % 2:
            return await driver.aappend([statement], [1])

        def program() -> Program[list[Any]]:
            return (yield Batch(statement, last=True))

        return await driver.arun(Transaction(program, write=True))

    done = await asyncio.gather(*(put(number) for number in range(60)), return_exceptions=True)
    assert sum(isinstance(one, StoreError) for one in done) == 30
    assert len(keys(driver)) == 30
    driver.close()


async def test_a_write_that_waits_for_a_lock_does_not_hold_up_later_ones(postgres_url: str) -> None:
    driver = open_driver(postgres_url, durability="full", timeout_s=10, create=True)
    assert await driver.aappend([PUT(key="guard", value="0")], [1])
    with psycopg.connect(postgres_url, options="-c search_path=perdure") as other:
        other.execute("SELECT 1 FROM meta WHERE key = 'guard' FOR UPDATE")
        blocked = []
        for waiting in range(1, 4):
            blocked.append(asyncio.create_task(driver.aappend([MOVE(key="guard", value="1", was="0")], [1])))
            while other.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() != (waiting,):
                await asyncio.sleep(0)  # until it has been sent: what is sent with it waits with it
        async with asyncio.timeout(5):  # before they give up
            for number in range(5):
                assert await driver.aappend([PUT(key=f"k{number}", value="1")], [1])
        other.rollback()
    assert sorted(await asyncio.gather(*blocked)) == [False, False, True]
    driver.close()
