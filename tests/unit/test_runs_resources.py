"""Resources that steps share, opened when needed and closed at the end; and the key as a header."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import perdure
from perdure.errors import NotInRun, Unstorable, UsageError
from perdure.runs.agents.http import HEADERS, KEY_LENGTH_MAX, idempotency_headers
from perdure.runs.agents.resources import Resource, resource
from perdure.runs.functions.keys import Key
from perdure.values.codec import Codec, encode

# --- resources


class Connection:
    """Counts, and knows the process and the loop it was opened in."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def open_connection() -> Connection:
    return Connection()


async def aopen_connection() -> Connection:
    await asyncio.sleep(0)
    return Connection()


def test_a_resource_is_opened_when_it_is_first_called_and_once() -> None:
    opened: list[Connection] = []

    def connect() -> Connection:
        opened.append(Connection())
        return opened[-1]

    db = resource(connect)
    assert not opened
    assert not db.is_open()
    assert "not open" in repr(db)
    assert db() is db() is opened[0]
    assert db.is_open()
    db.close()
    assert opened[0].closed == 1
    db.close()
    assert opened[0].closed == 1
    assert db() is opened[1]


def test_threads_that_come_together_open_it_once() -> None:
    together = threading.Barrier(8)
    opened: list[Connection] = []

    def connect() -> Connection:
        opened.append(Connection())
        return opened[-1]

    db = resource(connect)
    found: list[Connection] = []

    def use() -> None:
        together.wait()
        found.append(db())

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert set(found) == {opened[0]}


def test_a_factory_that_fails_is_tried_again() -> None:
    attempts: Iterator[OSError | Connection] = iter([OSError("down"), Connection()])

    def connect() -> Connection:
        item = next(attempts)
        if isinstance(item, OSError):
            raise item
        return item

    db = resource(connect)
    with pytest.raises(OSError, match="down"):
        db()
    assert db().closed == 0


def test_a_factory_that_calls_its_own_resource_is_told() -> None:
    db: Resource[Any] = resource(lambda: db())
    with pytest.raises(UsageError, match="calls the resource"):
        db()


def test_close_is_given_or_found() -> None:
    closed: list[str] = []
    with resource(lambda: "text", close=closed.append) as text:
        assert text == "text"
    assert closed == ["text"]
    with resource(lambda: 3) as number:
        assert number == 3
    with resource(open_connection) as connection:
        assert connection.closed == 0
    assert connection.closed == 1


def test_reset_lets_go_of_a_broken_one_and_only_of_that() -> None:
    def broken(connection: Connection) -> None:
        connection.close()
        raise OSError("the line is dead")

    db = resource(open_connection, close=broken)
    first = db()
    db.reset(first)
    second = db()
    assert first.closed == 1
    assert second is not first
    db.reset(first)  # by another thread that failed with the first one too
    assert db() is second
    db.reset()
    assert db() is not second


async def test_an_async_factory_has_an_instance_per_loop_opened_once() -> None:
    opened = 0

    async def connect() -> Connection:
        nonlocal opened
        opened += 1
        await asyncio.sleep(0)
        return Connection()

    db = resource(connect)
    found = await asyncio.gather(*(db() for _ in range(5)))
    assert opened == 1
    assert len(set(found)) == 1

    async def elsewhere() -> Connection:
        return await db()

    other = await asyncio.to_thread(asyncio.run, elsewhere())
    assert other is not found[0]
    assert await db() is found[0]
    await db.aclose()
    assert found[0].closed == 1
    assert other.closed == 0
    assert await db() not in (found[0], other)


def test_what_a_closed_loop_left_is_forgotten() -> None:
    db = resource(aopen_connection)

    async def use() -> Connection:
        return await db()

    found = [asyncio.run(use()) for _ in range(5)]
    assert len(set(found)) == 5
    assert len(db._loops) == 1


async def test_whoever_waits_opens_it_if_the_first_is_cancelled() -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def connect() -> Connection:
        reached.set()
        await go.wait()
        return Connection()

    db = resource(connect)
    first = asyncio.ensure_future(db())
    second = asyncio.ensure_future(db())
    await reached.wait()
    first.cancel()
    go.set()
    assert (await second).closed == 0
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_blocking_factory_of_something_that_closes_async() -> None:
    db = resource(lambda: httpx.AsyncClient())
    async with db as client:
        assert client is db()
        with pytest.raises(UsageError, match="aclose"):
            db.close()
        assert db() is client
    assert client.is_closed
    second = db()
    await db.areset(second)
    assert second.is_closed
    await db.aclose()


async def test_async_resources_say_how_they_are_used() -> None:
    db = resource(aopen_connection)
    with pytest.raises(UsageError, match="async with"), db:
        pass
    async with db as connection:
        assert connection.closed == 0
        with pytest.raises(UsageError, match="aclose"):
            db.close()
    assert connection.closed == 1


async def test_areset_opens_a_new_one_for_this_loop() -> None:
    async def dead(connection: Connection) -> None:
        connection.close()
        raise OSError("dead")

    db = resource(aopen_connection, close=dead)
    first = await db()
    await db.areset(first)
    assert first.closed == 1
    second = await db()
    assert second is not first
    await db.areset(first)
    assert await db() is second


def child(db: Resource[Connection], inherited: int, answers: Any) -> None:
    found = db()
    answers.put((found.pid == os.getpid(), id(found) != inherited, found is db()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_its_own_even_if_the_parent_was_opening() -> None:
    context = multiprocessing.get_context("fork")
    db = resource(open_connection)
    mine = db()
    db._lock.acquire()  # as if another thread of the parent were opening it
    answers = context.Queue()
    process = context.Process(target=child, args=(db, id(mine), answers))
    process.start()
    db._lock.release()
    assert answers.get(timeout=30) == (True, True, True)
    process.join()
    answers.close()
    assert db() is mine
    assert mine.closed == 0


def test_pickling_takes_the_factory_and_nothing_else() -> None:
    db = resource(open_connection)
    mine = db()
    twin = pickle.loads(pickle.dumps(db))
    assert isinstance(twin, Resource)
    assert not twin.is_open()
    assert twin() is not mine
    assert copy.copy(db) is db
    assert copy.deepcopy({"db": db})["db"] is db


def test_a_resource_is_refused_where_values_are_stored() -> None:
    with pytest.raises(Unstorable) as caught:
        encode({"tools": [resource(open_connection)]}, Codec())
    assert caught.value.path == 'state["tools"][0]'
    assert "never stored" in str(caught.value)
    assert "ignore=" in str(caught.value)


def test_a_resource_takes_functions() -> None:
    with pytest.raises(UsageError, match="a function that opens it"):
        resource(Connection())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="close="):
        resource(open_connection, close="close")  # type: ignore[arg-type]


# --- http


def test_the_key_is_sent_in_the_header_of_the_api() -> None:
    key = Key("run-1/3/book")
    assert idempotency_headers(key) == {"Idempotency-Key": "run-1/3/book"}
    assert idempotency_headers(key, api="PayPal") == {"PayPal-Request-Id": "run-1/3/book"}
    assert idempotency_headers(key, api="mercado-pago") == {"X-Idempotency-Key": "run-1/3/book"}
    assert idempotency_headers(key, header="X-Request-Id") == {"X-Request-Id": "run-1/3/book"}
    assert type(idempotency_headers(key)["Idempotency-Key"]) is str


@perdure.effect(name="helpers.pay")
def pay(cents: int, key: Key) -> list[str]:
    return [str(key), idempotency_headers(api="stripe")["Idempotency-Key"]]


@perdure.durable
def buy() -> list[list[str]]:
    return [pay(1), pay(2), pay(1)]


def test_without_a_key_it_is_the_key_of_the_effect_that_runs() -> None:
    with perdure.open(":memory:") as store:
        keys = store.run(buy, id="order-1").result()
    assert all(given == sent for given, sent in keys)
    assert len({given for given, _ in keys}) == 3
    with pytest.raises(NotInRun):
        idempotency_headers()


def test_the_key_of_an_effect_fits_the_usual_apis() -> None:
    with perdure.open(":memory:") as store:
        key = store.run(buy, id="order-2").result()[0][0]
    for name in ("adyen", "klarna", "mercado_pago", "mollie", "paypal", "resend", "stripe"):
        assert idempotency_headers(key, api=name) == {HEADERS[name]: key}


def test_an_api_that_is_not_known_is_answered_with_those_that_are() -> None:
    with pytest.raises(UsageError) as caught:
        idempotency_headers("k", api="acme")
    for name in HEADERS:
        assert name in str(caught.value)
    with pytest.raises(UsageError, match="idempotency_key in the body"):
        idempotency_headers("k", api="Square")
    with pytest.raises(UsageError, match="leave out header"):
        idempotency_headers("k", api="stripe", header="X-Key")


@pytest.mark.parametrize("name", sorted(KEY_LENGTH_MAX))
def test_a_key_that_is_too_long_for_the_api_is_refused(name: str) -> None:
    longest = "k" * KEY_LENGTH_MAX[name]
    assert idempotency_headers(longest, api=name) == {HEADERS[name]: longest}
    with pytest.raises(UsageError, match=f"takes {len(longest)}"):
        idempotency_headers(longest + "k", api=name)


@pytest.mark.parametrize("key", ["", "a\r\nX-Admin: 1", "ключ", " a", 3])
def test_a_key_that_cannot_stand_in_a_header_is_refused(key: Any) -> None:
    with pytest.raises(UsageError, match="idempotency key"):
        idempotency_headers(key)


@pytest.mark.parametrize("header", ["", "X Key", "X:Key", "X\nKey"])
def test_a_header_that_cannot_be_one_is_refused(header: str) -> None:
    with pytest.raises(UsageError, match="name of a header"):
        idempotency_headers("k", header=header)


def test_importing_the_helpers_is_cheap() -> None:
    code = (
        "import sys; import perdure; before = set(sys.modules);"
        "import perdure.runs.calls.doubt, perdure.runs.agents.http;"
        "import perdure.runs.agents.resources, perdure.runs.agents.progress_file;"
        "print({'asyncio', 'subprocess', 'ssl', 'socket', 'httpx', 'requests'} & (set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
