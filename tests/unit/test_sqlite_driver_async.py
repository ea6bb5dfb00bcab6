"""The SQLite driver with event loops: grouped commits, cancellation, blocking calls on a loop's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import StoreClosed
from perdure.storage.program import Batch, ConstraintFailed, Program, Sql, Transaction
from perdure.storage.sqlite.driver import SqliteDriver

PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, 'v')")
COUNT = Sql("SELECT count(*) FROM meta WHERE key <> 'store'")


def put(key: str) -> Program[str]:
    yield Batch(PUT(key=key), last=True)
    return key


def count() -> Program[int]:
    [[(number,)]] = yield Batch(COUNT(), last=True)
    return int(number)


def write(key: str) -> Transaction:
    return Transaction(partial(put, key), write=True)


class Commits:
    """Counts commits, and can hold the next one back."""

    def __init__(self) -> None:
        self.number = 0
        self.go = threading.Event()
        self.go.set()

    def __call__(self, name: str) -> None:
        if name == "commit":
            self.number += 1
            self.go.wait()


@pytest.fixture
def commits() -> Commits:
    return Commits()


@pytest.fixture(params=["file", "memory"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path, commits: Commits) -> AsyncIterator[SqliteDriver]:
    driver = SqliteDriver(":memory:" if request.param == "memory" else tmp_path / "a.db", hook=commits)
    yield driver
    await driver.aclose()


async def test_writes_and_reads(driver: SqliteDriver) -> None:
    assert await driver.arun(write("a")) == "a"
    assert await driver.arun(Transaction(count)) == 1
    with pytest.raises(ConstraintFailed):
        await driver.arun(write("a"))
    assert driver.run(Transaction(count)) == 1


async def test_a_group_looks_once_for_a_prepared_transaction(driver: SqliteDriver, commits: Commits) -> None:
    looks = 0

    def trace(_cursor: Any, text: str, _values: Any) -> bool:
        nonlocal looks
        looks += "FROM prepared" in text
        return True

    driver._writer._cursor.exec_trace = trace
    await asyncio.gather(*(driver.arun(write(str(number))) for number in range(64)))
    assert looks == commits.number < 64


async def test_64_savers_share_their_commits(driver: SqliteDriver, commits: Commits) -> None:
    async def saver(name: int) -> None:
        for index in range(10):
            await driver.arun(write(f"{name}-{index}"))

    await asyncio.gather(*(saver(name) for name in range(64)))
    assert await driver.arun(Transaction(count)) == 640
    assert commits.number <= 640 / 16


async def test_an_error_reaches_its_own_task_only(driver: SqliteDriver) -> None:
    keys = ["a", "b", "a", "c", "b", "d"]
    answers = await asyncio.gather(*(driver.arun(write(key)) for key in keys), return_exceptions=True)
    assert [type(answer) for answer in answers] == [str, str, ConstraintFailed, str, ConstraintFailed, str]
    assert await driver.arun(Transaction(count)) == 4


async def test_a_blocking_call_on_the_loops_thread_does_not_deadlock(driver: SqliteDriver) -> None:
    tasks = [asyncio.create_task(driver.arun(write(f"task-{index}"))) for index in range(50)]
    await asyncio.sleep(0)  # all of them are in the queue now
    for index in range(20):
        assert driver.run(write(f"blocking-{index}")) == f"blocking-{index}"
        driver.run(Transaction(count))
    await asyncio.gather(*tasks)
    assert driver.run(Transaction(count)) == 70


async def test_a_cancelled_waiter_does_not_disturb_the_group(driver: SqliteDriver, commits: Commits) -> None:
    commits.go.clear()
    first = asyncio.create_task(driver.arun(write("first")))
    while commits.number == 0:
        await asyncio.sleep(0)
    # The first commit is under way; these wait behind it.
    waiting = [asyncio.create_task(driver.arun(write(f"{index}"))) for index in range(10)]
    await asyncio.sleep(0)
    first.cancel()
    for task in waiting[::2]:
        task.cancel()
    await asyncio.sleep(0)
    commits.go.set()
    answers = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, str)] == ["1", "3", "5", "7", "9"]
    # The first was written all the same; those not started were dropped.
    assert await driver.arun(Transaction(count)) == 6


def test_several_loops_and_threads_share_one_store(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db")

    def loop(name: str) -> None:
        async def main() -> None:
            await asyncio.gather(*(driver.arun(write(f"{name}-{index}")) for index in range(50)))

        asyncio.run(main())

    def blocking(name: str) -> None:
        for index in range(50):
            driver.run(write(f"{name}-{index}"))

    threads = [threading.Thread(target=loop, args=(f"loop-{number}",)) for number in range(3)]
    threads += [threading.Thread(target=blocking, args=(f"thread-{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.run(Transaction(count)) == 300
    driver.close()


def test_a_loop_that_ended_early_does_not_disturb_the_others(tmp_path: Path, commits: Commits) -> None:
    driver = SqliteDriver(tmp_path / "a.db", hook=commits)
    commits.go.clear()

    async def begin() -> asyncio.Task[str]:
        task = asyncio.create_task(driver.arun(write("late")))
        while commits.number == 0:
            await asyncio.sleep(0)
        return task

    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(begin())
    loop.close()  # without asking its task
    commits.go.set()
    driver.run(write("next"))
    assert driver.run(Transaction(count)) == 2
    driver.close()
    left._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_closing_finishes_what_was_queued(tmp_path: Path) -> None:
    driver = SqliteDriver(tmp_path / "a.db")
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(driver.arun(write(f"{index}"))) for index in range(20)]
    await asyncio.sleep(0)
    await driver.aclose()
    await asyncio.gather(*tasks)
    for transaction in (write("x"), Transaction(count)):
        with pytest.raises(StoreClosed):
            await driver.arun(transaction)
    again = SqliteDriver(tmp_path / "a.db")
    assert again.run(Transaction(count)) == 20
    again.close()
