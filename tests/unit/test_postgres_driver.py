"""The PostgreSQL driver against a real server: transactions, round trips, retries, pools, opening."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from perdure.errors import (
    Busy,
    DiskFull,
    ForkedProcess,
    OpenError,
    OutcomeUnknown,
    ReadOnlyStore,
    StoreClosed,
    StoreError,
    Unavailable,
    UsageError,
)
from perdure.storage.postgres.driver import PostgresDriver, backoff_s
from perdure.storage.program import Batch, ConstraintFailed, Driver, Program, Rows, Sql, Transaction
from perdure.testing.postgres_server import PostgresServer

PUT = Sql("INSERT INTO note (id, body) VALUES (:id, :body) RETURNING id")
ALL = Sql("SELECT id, body FROM note ORDER BY id")
COUNT = Sql("SELECT count(*) FROM note")
ADD = Sql("UPDATE note SET hits = hits + 1 WHERE id = :id RETURNING hits")
SLOW = Sql("SELECT pg_sleep(:seconds)")


@pytest.fixture
def driver(postgres_url: str) -> Iterator[PostgresDriver]:
    driver = make_driver(postgres_url)
    yield driver
    driver.close()


def make_driver(url: str, **options: Any) -> PostgresDriver:
    driver = PostgresDriver(url, **options)
    with psycopg.connect(url, autocommit=True, options="-c search_path=perdure") as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS note (id bigint PRIMARY KEY, body bytea, hits bigint DEFAULT 0)")
    return driver


def once(sql: Sql, last: bool = True, **params: Any) -> Callable[[], Program[Rows]]:
    def op() -> Program[Rows]:
        [rows] = yield Batch(sql(**params), last=last)
        return rows

    return op


def write(driver: PostgresDriver, op: Callable[[], Program[Any]]) -> Any:
    return driver.run(Transaction(op, write=True))


def read(driver: PostgresDriver, op: Callable[[], Program[Any]]) -> Any:
    return driver.run(Transaction(op))


def count(driver: PostgresDriver) -> int:
    return int(read(driver, once(COUNT))[0][0])


def test_every_kind_of_value_arrives(driver: PostgresDriver) -> None:
    kinds = Sql(
        "SELECT CAST(:i AS bigint), CAST(:s AS text), CAST(:b AS bytea), CAST(:f AS float8), :t::boolean, "
        ":n::text, :l::bigint[], :w::text[], :flag::smallint, :v::bytea"
    )
    values: dict[str, Any] = {
        "i": -(2**63),
        "s": "ä'\\%s ::x",
        "b": bytes(range(256)),
        "f": float("inf"),
        "t": True,
        "n": None,
        "l": [1, 2, None],
        "w": ['a"b', "c\\d", "", "{,}"],
        "flag": True,
        "v": memoryview(b"view"),
    }
    [row] = read(driver, once(kinds, **values))
    assert row == tuple({**values, "flag": 1, "v": b"view"}.values())


# Transactions.


def test_it_is_a_driver(driver: PostgresDriver) -> None:
    typed: Driver = driver
    assert typed.dialect == "postgres"


def test_several_batches_are_one_transaction(driver: PostgresDriver) -> None:
    def op() -> Program[int]:
        yield Batch(PUT(id=1, body=b"a"), PUT(id=2, body=b"b"))
        [rows] = yield Batch(COUNT())
        return int(rows[0][0])

    assert write(driver, op) == 2
    assert read(driver, once(ALL)) == [(1, b"a"), (2, b"b")]


def test_a_program_that_raises_leaves_nothing(driver: PostgresDriver) -> None:
    def op() -> Program[None]:
        yield Batch(PUT(id=1, body=b"a"))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        write(driver, op)
    assert count(driver) == 0


@pytest.mark.parametrize("last", [True, False])
def test_a_broken_constraint_rolls_back_the_whole_batch(driver: PostgresDriver, last: bool) -> None:
    def op() -> Program[None]:
        yield Batch(PUT(id=1, body=b"secret row"), PUT(id=1, body=b"again"), last=last)

    with pytest.raises(ConstraintFailed) as caught:
        write(driver, op)
    assert caught.value.kind == "unique"
    assert isinstance(caught.value.__cause__, psycopg.errors.UniqueViolation)
    assert count(driver) == 0


def test_a_deferred_constraint_fails_the_single_statement(driver: PostgresDriver, postgres_url: str) -> None:
    """Its error comes with the Sync, after the statement was answered."""
    with psycopg.connect(postgres_url, autocommit=True, options="-c search_path=perdure") as connection:
        connection.execute("CREATE TABLE child (id bigint REFERENCES note (id) DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(ConstraintFailed):
        write(driver, once(Sql("INSERT INTO child VALUES (:id)"), id=7))
    assert count(driver) == 0


def test_reads_see_one_snapshot_and_cannot_write(driver: PostgresDriver) -> None:
    def op() -> Program[tuple[int, int]]:
        [[(before,)]] = yield Batch(COUNT())
        write(driver, once(PUT, id=1, body=b""))
        [[(after,)]] = yield Batch(COUNT())
        return before, after

    assert read(driver, op) == (0, 0)
    with pytest.raises(ReadOnlyStore):
        read(driver, once(PUT, last=False, id=2, body=b""))


def test_a_read_of_two_statements_in_one_batch_is_one_snapshot(driver: PostgresDriver) -> None:
    level = Sql("SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only')")

    def op() -> Program[list[Rows]]:
        return (yield Batch(level(), COUNT(), last=True))

    assert read(driver, op) == [[("repeatable read", "on")], [(0,)]]


def test_going_on_after_the_last_batch_is_a_defect(driver: PostgresDriver) -> None:
    def op() -> Program[None]:
        yield Batch(PUT(id=1, body=b""), last=True)
        yield Batch(COUNT())

    with pytest.raises(UsageError, match="committed"):
        write(driver, op)
    assert count(driver) == 1


def test_an_ambiguous_statement_says_what_to_write(driver: PostgresDriver) -> None:
    with pytest.raises(StoreError, match="CAST"):
        read(driver, once(Sql("SELECT 1 WHERE :x IS NULL"), x=1))


def test_large_batches_do_not_deadlock(driver: PostgresDriver) -> None:
    """More than fits into the socket's buffers in both directions."""
    echo = Sql("SELECT CAST(:b AS bytea)")
    body = os.urandom(4_000_000)

    def op() -> Program[int]:
        answers = yield Batch(*(echo(b=body) for _ in range(5)), last=True)
        return sum(rows == [(body,)] for rows in answers)

    assert read(driver, op) == 5
    assert asyncio.run(driver.arun(Transaction(op))) == 5


# Retries.


def test_deadlocks_are_run_again(driver: PostgresDriver) -> None:
    write(driver, lambda: _put_two())
    meet = threading.Barrier(2)
    calls: list[int] = []

    def crossing(first: int, second: int) -> Callable[[], Program[None]]:
        def op() -> Program[None]:
            calls.append(first)
            yield Batch(ADD(id=first))
            if len(calls) <= 2:
                meet.wait()
            yield Batch(ADD(id=second), last=True)

        return op

    with psycopg.connect(driver._target.conninfo, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET deadlock_timeout = '20ms'")
        connection.execute("SELECT pg_reload_conf()")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: write(driver, crossing(*pair)), [(1, 2), (2, 1)]))
    assert len(calls) >= 3
    assert read(driver, once(Sql("SELECT hits FROM note"))) == [(2,), (2,)]


def _put_two() -> Program[None]:
    yield Batch(PUT(id=1, body=b""), PUT(id=2, body=b""), last=True)


def test_retries_end(driver: PostgresDriver) -> None:
    calls = []
    fail = Sql("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$")

    def op() -> Program[None]:
        calls.append(1)
        yield Batch(fail(), last=True)

    with pytest.raises(Busy, match="again and again"):
        write(driver, op)
    assert len(calls) == 12


def test_backoff_grows_is_capped_and_spread() -> None:
    assert backoff_s(0, lambda: 1.0) == 0.002
    assert backoff_s(20, lambda: 1.0) == 0.2
    assert backoff_s(0, lambda: 0.0) == 0.001


def test_a_lock_that_is_held_too_long_is_busy(postgres_url: str) -> None:
    driver = make_driver(postgres_url, timeout_s=0.5)
    write(driver, once(PUT, id=1, body=b""))
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SELECT 1 FROM perdure.note FOR UPDATE")
        with pytest.raises(Busy, match="Nothing was written"):
            write(driver, once(ADD, id=1))
    assert write(driver, once(ADD, id=1)) == [(1,)]
    driver.close()


def test_an_exhausted_pool_is_busy(postgres_url: str) -> None:
    driver = make_driver(postgres_url, pool_size=1, timeout_s=0.5)

    def nested() -> Program[None]:
        yield Batch(COUNT())
        read(driver, once(COUNT))

    with pytest.raises(Busy, match="pool_size"):
        read(driver, nested)
    driver.close()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("53100", DiskFull),
        ("53300", Unavailable),
        ("25006", ReadOnlyStore),
        ("42501", OpenError),
        ("23514", ConstraintFailed),
        ("55P03", Busy),
        ("XX000", StoreError),
    ],
)
def test_what_the_server_says_is_told_in_our_words(
    driver: PostgresDriver, state: str, expected: type[Exception]
) -> None:
    fail = Sql(f"DO $$ BEGIN RAISE EXCEPTION 'told' USING ERRCODE = '{state}'; END $$")
    with pytest.raises(expected, match="told") as caught:
        write(driver, once(fail))
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, psycopg.Error)


# Pools, loops, threads, processes.


def test_one_driver_serves_one_loop_after_another_without_warnings(driver: PostgresDriver) -> None:
    async def puts(base: int) -> None:
        ops = [once(PUT, id=base + number, body=b"") for number in range(20)]
        await asyncio.gather(*(driver.arun(Transaction(op, write=True)) for op in ops))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(4):
            asyncio.run(puts(turn * 100))
            gc.collect()
    assert count(driver) == 80
    asyncio.run(puts(1000))


async def test_a_blocking_call_on_the_loop_does_not_deadlock(driver: PostgresDriver) -> None:
    await driver.arun(Transaction(once(PUT, id=1, body=b"")))
    assert count(driver) == 1
    assert await driver.arun(Transaction(once(COUNT))) == [(1,)]
    await driver.aclose()


async def test_cancelling_a_waiter_leaves_the_pool_whole(postgres_url: str) -> None:
    driver = make_driver(postgres_url, pool_size=2)
    for _ in range(3):
        tasks = [asyncio.create_task(driver.arun(Transaction(once(SLOW, seconds=0.3)))) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await driver.arun(Transaction(once(COUNT))) == [(0,)]
    await driver.aclose()
    await driver.aclose()
    with pytest.raises(StoreClosed):
        await driver.arun(Transaction(once(COUNT)))


def test_threads_share_the_blocking_pool(driver: PostgresDriver) -> None:
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda number: write(driver, once(PUT, id=number, body=b"")), range(300)))
    assert count(driver) == 300


def test_closing_twice_is_fine_and_later_calls_say_so(driver: PostgresDriver) -> None:
    driver.close()
    driver.close()
    with pytest.raises(StoreClosed):
        count(driver)


async def test_closing_while_tasks_write_refuses_the_rest(driver: PostgresDriver) -> None:
    writes = [Transaction(once(PUT, id=number, body=b""), write=True) for number in range(200)]
    tasks = [asyncio.ensure_future(driver.arun(write)) for write in writes]
    await asyncio.sleep(0)  # each has begun
    driver.close()
    await asyncio.wait(tasks)
    assert {type(task.exception()) for task in tasks if task.exception()} <= {StoreClosed}


def test_a_forked_child_is_refused_and_harms_nobody(driver: PostgresDriver) -> None:
    backend = Sql("SELECT pg_backend_pid()")
    before = read(driver, once(backend))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            read(driver, once(backend))
        except ForkedProcess:
            driver.close()
            driver._pool._idle.clear()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(driver, once(backend)) == before


# Faults.


@pytest.mark.parametrize("point", ["begin", "statement:0", "statement:1", "commit", "committed"])
@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_fault_at_each_point_leaves_all_or_nothing(postgres_url: str, point: str, mode: str) -> None:
    seen: list[str] = []

    def strike(name: str) -> None:
        seen.append(name)
        if name == point:
            raise KeyboardInterrupt

    plain = make_driver(postgres_url)
    driver = PostgresDriver(postgres_url, hook=strike)
    transaction = Transaction(_put_two, write=True)
    with pytest.raises(KeyboardInterrupt):
        driver.run(transaction) if mode == "blocking" else asyncio.run(driver.arun(transaction))
    assert seen[-1] == point
    assert count(plain) == (2 if point == "committed" else 0)
    driver.close()
    plain.close()


def test_a_server_that_restarted_is_found_again_without_an_error(postgres_server: PostgresServer) -> None:
    with PostgresServer() as server:
        driver = make_driver(server.url())
        write(driver, once(PUT, id=1, body=b""))
        server.stop()
        with pytest.raises(Unavailable, match=server.host):
            count(driver)
        server.start()
        write(driver, once(PUT, id=2, body=b""))
        server.kill()
        server.start()
        assert count(driver) == 2
        driver.close()


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_connection_lost_before_commit_is_made_anew_once(driver: PostgresDriver, mode: str) -> None:
    calls = []
    kill = Sql("SELECT pg_terminate_backend(pg_backend_pid())")

    def op(times: int) -> Callable[[], Program[int]]:
        def attempt() -> Program[int]:
            calls.append(1)
            yield Batch(PUT(id=1, body=b""))
            if len(calls) <= times:
                yield Batch(kill())
            return len(calls)

        return attempt

    def run(times: int) -> Any:
        calls.clear()
        transaction = Transaction(op(times), write=True)
        return driver.run(transaction) if mode == "blocking" else asyncio.run(driver.arun(transaction))

    with pytest.raises(Unavailable, match="terminating connection"):
        run(2)
    assert count(driver) == 0
    assert run(1) == 2
    assert count(driver) == 1


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_lost_answer_to_a_commit_is_unknown_and_never_repeated(driver: PostgresDriver, mode: str) -> None:
    calls = []
    kill = Sql("INSERT INTO note (id) SELECT :id WHERE pg_terminate_backend(pg_backend_pid())")

    def op() -> Program[None]:
        calls.append(1)
        yield Batch(kill(id=1), last=True)

    transaction = Transaction(op, write=True)
    with pytest.raises(OutcomeUnknown, match="may or may not"):
        driver.run(transaction) if mode == "blocking" else asyncio.run(driver.arun(transaction))
    assert calls == [1]


def test_a_table_that_changed_under_a_prepared_statement_is_prepared_again(
    driver: PostgresDriver, postgres_url: str
) -> None:
    star = Sql("SELECT * FROM note")
    write(driver, once(PUT, id=1, body=b"x"))
    assert len(read(driver, once(star))[0]) == 3
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE perdure.note ADD COLUMN more text")
    assert len(read(driver, once(star))[0]) == 4


def test_prepared_statements_that_vanish_are_done_without(driver: PostgresDriver) -> None:
    """As behind a pooler that hands out another session."""
    assert count(driver) == 0
    read(driver, once(Sql("DEALLOCATE ALL")))
    assert count(driver) == 0
    assert not driver._statements.prepare


def test_a_batch_that_repeats_a_new_statement_keeps_preparing_on(driver: PostgresDriver) -> None:
    """The same text twice in one pipeline is prepared once; twice would be an error, and switch preparing off."""

    def op() -> Program[int]:
        rows = yield Batch(*(PUT(id=number, body=b"x") for number in range(5)))
        return len(rows)

    assert driver.run(Transaction(op, write=True)) == 5
    assert driver._statements.prepare
