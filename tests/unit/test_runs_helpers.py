"""The helpers of runs that need no database: doubt, resources, and the key as a header.

Errors are made by real sockets and real clients; only of libraries that are not installed here (aiohttp, grpc) the
classes are built by hand, with the names and parents of the real ones.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import http.client
import multiprocessing
import os
import pickle
import smtplib
import socket
import ssl
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import httpx
import pytest
import requests

import holdfast
from holdfast.errors import NotInRun, Unstorable, UsageError
from holdfast.runs.agents.http import HEADERS, KEY_LENGTH_MAX, idempotency_headers
from holdfast.runs.agents.resources import Resource, resource
from holdfast.runs.calls.doubt import (
    Done,
    NotDone,
    Unknown,
    check_ambiguous,
    check_verdict,
    is_ambiguous,
)
from holdfast.runs.functions.keys import Key
from holdfast.values.codec import Codec, encode

# -- doubt: real errors of real clients


def post_httpx(url: str) -> None:
    httpx.post(url, content=b"{}", timeout=0.5, trust_env=False).raise_for_status()


def post_httpx_async(url: str) -> None:
    async def send() -> None:
        async with httpx.AsyncClient(timeout=0.5, trust_env=False) as client:
            (await client.post(url, content=b"{}")).raise_for_status()

    asyncio.run(send())


def post_requests(url: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.post(url, data=b"{}", timeout=0.5).raise_for_status()


def post_urllib(url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, b"{}", timeout=0.5) as reply:
        reply.read()


CLIENTS = [post_httpx, post_httpx_async, post_requests, post_urllib]


def error_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        # urllib's HTTP error is a reply, and holds a file.
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return error
    raise AssertionError("no error")


class Receiver:
    """Takes one request at a time, counts it, and answers with the given bytes, or (None) not at all."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.requests = 0
        self.arrived = threading.Event()
        self.kept: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            text = b""
            while not text.endswith(b"{}"):
                text += connection.recv(4096)
            self.requests += 1
            if self.answer is None:
                self.kept.append(connection)
            else:
                connection.sendall(self.answer)
                connection.close()
            self.arrived.set()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        for connection in self.kept:
            connection.close()


def reply(status: str, body: str = "{}", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n{body}".encode()


@pytest.mark.parametrize("post", CLIENTS)
@pytest.mark.parametrize(
    ("answer", "ambiguous"),
    [
        (None, True),  # no answer in time
        (b"", True),  # closed without an answer
        (b"HT", True),  # closed in the middle of the head
        (reply("200 OK", length=100), True),  # closed in the middle of the body
        (reply("504 Gateway Timeout"), True),
        (reply("502 Bad Gateway"), True),
        (reply("500 Internal Server Error"), False),
        (reply("503 Service Unavailable"), False),
        (reply("402 Payment Required"), False),
    ],
    ids=["hangs", "closes", "half a head", "half a body", "504", "502", "500", "503", "402"],
)
def test_what_reached_the_receiver_is_in_doubt_unless_it_said_no(
    post: Callable[[str], None], answer: bytes | None, ambiguous: bool
) -> None:
    receiver = Receiver(answer)
    try:
        error = error_of(lambda: post(receiver.url))
        assert receiver.requests == 1
        assert is_ambiguous(error) is ambiguous
    finally:
        receiver.close()


@pytest.mark.parametrize("post", CLIENTS)
def test_a_refused_connection_is_definite(post: Callable[[str], None]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = error_of(lambda: post(f"http://127.0.0.1:{unused.getsockname()[1]}/"))
    assert not is_ambiguous(error)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops what does not fit into the queue")
@pytest.mark.parametrize(("post", "ambiguous"), [*((post, False) for post in CLIENTS[:3]), (post_urllib, True)])
def test_a_connection_that_was_not_made_in_time_is_definite_where_the_client_tells(
    post: Callable[[str], None], ambiguous: bool
) -> None:
    """urllib does not tell it from a request that was not sent in time."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:  # nobody accepts, and the queue is full
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        error = error_of(lambda: post(f"http://127.0.0.1:{listener.getsockname()[1]}/"))
        for each in waiting:
            each.close()
    assert is_ambiguous(error) is ambiguous


def test_a_pool_without_a_free_connection_is_definite() -> None:
    receiver = Receiver(None)
    client = httpx.Client(limits=httpx.Limits(max_connections=1), timeout=httpx.Timeout(30, pool=0.1), trust_env=False)
    try:
        holder = threading.Thread(target=lambda: error_of(lambda: client.post(receiver.url, content=b"{}")))
        holder.start()
        assert receiver.arrived.wait(30)
        assert not is_ambiguous(error_of(lambda: client.post(receiver.url, content=b"{}")))
        receiver.close()
        holder.join()
    finally:
        client.close()


# -- doubt: errors by themselves


def raised(error: BaseException, *, cause: BaseException | None = None, during: BaseException | None = None) -> Any:
    """An error as it is when it was raised: from a cause, or while another one was being handled."""
    try:
        try:
            if during is not None:
                raise during
            raise error from cause
        except BaseException as handled:
            if handled is error:
                raise
            raise error  # noqa: B904
    except BaseException as done:
        return done


@pytest.mark.parametrize(
    ("error", "ambiguous"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (ConnectionAbortedError(), True),
        (BrokenPipeError(), True),
        (ConnectionRefusedError(), False),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (OSError(errno.ENETDOWN, "down"), True),
        (OSError(errno.ETIMEDOUT, "timed out"), True),
        (FileNotFoundError(), False),
        (socket.gaierror(-2, "unknown name"), False),
        (asyncio.CancelledError(), True),
        (KeyboardInterrupt(), True),
        (SystemExit(1), True),
        (GeneratorExit(), True),
        (ValueError("sold out"), False),
        (ssl.SSLCertVerificationError(1, "bad certificate"), False),
        (ssl.SSLEOFError(8, "eof"), True),
        (http.client.IncompleteRead(b"x"), True),
        (http.client.RemoteDisconnected("gone"), True),
        (http.client.InvalidURL("x"), False),
        (smtplib.SMTPServerDisconnected("gone"), True),
        (smtplib.SMTPRecipientsRefused({}), False),
        (subprocess.TimeoutExpired("cmd", 1), True),
        (subprocess.CalledProcessError(1, "cmd"), False),
        (BrokenProcessPool("died"), True),
        (urllib.error.URLError(ConnectionRefusedError()), False),
        (urllib.error.URLError(ConnectionResetError()), True),
        (urllib.error.URLError("unknown url type"), False),
        (httpx.ConnectError("x"), False),
        (httpx.ConnectTimeout("x"), False),
        (httpx.PoolTimeout("x"), False),
        (httpx.UnsupportedProtocol("x"), False),
        (httpx.ReadTimeout("x"), True),
        (httpx.WriteTimeout("x"), True),
        (httpx.ReadError("x"), True),
        (httpx.RemoteProtocolError("x"), True),
        (httpx.LocalProtocolError("x"), True),
        (httpx.TooManyRedirects("x"), False),
        (requests.ConnectTimeout(), False),
        (requests.ReadTimeout(), True),
        (requests.ConnectionError("reset"), True),
        (requests.exceptions.InvalidURL(), False),
        (requests.exceptions.JSONDecodeError("x", "", 0), False),
        (ExceptionGroup("g", [ValueError(), httpx.ReadTimeout("x")]), True),
        (ExceptionGroup("g", [ValueError(), httpx.ConnectError("x")]), False),
        (BaseExceptionGroup("g", [ValueError(), asyncio.CancelledError()]), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_error_is_taken_as_the_table_says(error: BaseException, ambiguous: bool) -> None:
    assert is_ambiguous(error) is ambiguous


class BookingFailed(Exception):
    pass


def test_a_wrapped_error_is_as_ambiguous_as_what_it_wraps() -> None:
    assert is_ambiguous(raised(BookingFailed(), cause=httpx.ReadTimeout("x")))
    assert is_ambiguous(raised(BookingFailed(), cause=raised(BookingFailed(), cause=TimeoutError())))
    assert not is_ambiguous(raised(BookingFailed(), cause=httpx.ConnectTimeout("x")))
    assert not is_ambiguous(raised(BookingFailed(), cause=ValueError()))


def test_an_error_while_a_timeout_was_handled_is_ambiguous() -> None:
    assert is_ambiguous(raised(BookingFailed(), during=TimeoutError()))
    assert is_ambiguous(raised(ConnectionRefusedError(), during=httpx.ReadTimeout("of the first provider")))
    assert not is_ambiguous(raised(BookingFailed(), during=KeyError("cache")))


def test_from_none_says_that_the_error_before_was_dealt_with() -> None:
    def book() -> None:
        try:
            raise TimeoutError
        except TimeoutError:
            raise BookingFailed("looked it up: there is no booking") from None

    assert not is_ambiguous(error_of(book))


def test_beneath_a_definite_error_its_causes_do_not_count() -> None:
    assert not is_ambiguous(raised(httpx.ConnectTimeout("x"), cause=TimeoutError()))
    assert not is_ambiguous(
        raised(httpx.ConnectTimeout("x"), cause=raised(TimeoutError(), cause=asyncio.CancelledError()))
    )
    assert not is_ambiguous(raised(httpx.ConnectTimeout("x"), cause=raised(OSError(), during=asyncio.CancelledError())))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert not is_ambiguous(first)


def foreign(package: str, name: str, *bases: type[BaseException], **attributes: object) -> type[Any]:
    return type(name, bases or (Exception,), {"__module__": package, **attributes})


def test_errors_of_aiohttp() -> None:
    module = "aiohttp.client_exceptions"
    client_error = foreign(module, "ClientError")
    connection = foreign(module, "ClientConnectionError", client_error)
    os_error = foreign(module, "ClientOSError", connection, OSError)
    connector = foreign(module, "ClientConnectorError", os_error)
    server = foreign(module, "ServerConnectionError", connection)
    timeout = foreign(module, "ServerTimeoutError", server, TimeoutError)
    response = foreign(module, "ClientResponseError", client_error)
    assert is_ambiguous(os_error(104, "reset"))
    assert not is_ambiguous(connector(111, "refused"))
    assert not is_ambiguous(foreign(module, "ClientConnectorDNSError", connector)(1, "dns"))
    assert is_ambiguous(timeout())
    assert is_ambiguous(foreign(module, "SocketTimeoutError", timeout)())
    assert not is_ambiguous(foreign(module, "ConnectionTimeoutError", timeout)())
    assert is_ambiguous(foreign(module, "ServerDisconnectedError", server)())
    assert is_ambiguous(foreign(module, "ClientPayloadError", client_error)())
    for status, ambiguous in ((504, True), (500, False), (400, False)):
        error = response()
        error.status = status
        assert is_ambiguous(error) is ambiguous


@pytest.mark.parametrize(
    ("code", "ambiguous"),
    [("UNAVAILABLE", True), ("DEADLINE_EXCEEDED", True), ("CANCELLED", True), ("INVALID_ARGUMENT", False)],
)
def test_errors_of_grpc(code: str, ambiguous: bool) -> None:
    rpc_error = foreign("grpc", "RpcError")
    status = types.SimpleNamespace(name=code)
    error = foreign("grpc._channel", "_InactiveRpcError", rpc_error, code=lambda self: status)()
    assert is_ambiguous(error) is ambiguous
    assert not is_ambiguous(rpc_error("without a code"))
    assert is_ambiguous(foreign("grpc", "FutureTimeoutError")())


def test_extra_classes_add_to_the_table_also_when_wrapped() -> None:
    assert is_ambiguous(BookingFailed(), (BookingFailed,))
    assert is_ambiguous(raised(ValueError(), cause=BookingFailed()), (BookingFailed,))
    assert is_ambiguous(TimeoutError(), (BookingFailed,))
    assert not is_ambiguous(ValueError(), (BookingFailed,))


def test_an_extra_function_can_say_in_doubt_or_definite_or_nothing() -> None:
    assert is_ambiguous(BookingFailed(), lambda error: True)
    assert not is_ambiguous(TimeoutError(), lambda error: NotDone())
    assert is_ambiguous(TimeoutError(), lambda error: None)
    assert is_ambiguous(TimeoutError(), lambda error: isinstance(error, BookingFailed))
    assert not is_ambiguous(ValueError(), lambda error: False)


def test_an_extra_function_that_fails_has_not_decided() -> None:
    error = ValueError("declined")
    assert is_ambiguous(error, lambda error: error.status == 504)  # type: ignore[attr-defined]
    assert "AttributeError" in error.__notes__[0]


def test_ambiguous_is_checked_where_it_is_given() -> None:
    assert check_ambiguous(BookingFailed) == (BookingFailed,)
    assert check_ambiguous([BookingFailed, OSError]) == (BookingFailed, OSError)
    assert callable(check_ambiguous(lambda error: True))
    for wrong in ("TimeoutError", (BookingFailed, "x"), int, 3, None):
        with pytest.raises(UsageError, match="ambiguous="):
            check_ambiguous(wrong)


# -- doubt: verdicts


def test_verdicts_are_values() -> None:
    assert check_verdict(Done("x")) == Done("x")
    assert check_verdict(NotDone()) == NotDone()
    assert check_verdict(Unknown("no network")) == Unknown("no network")
    with pytest.raises(AttributeError):
        Done(1).result = 2  # type: ignore[misc]


async def never_awaited() -> Done:
    return Done(1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None, which could mean"),
        (True, "a bool has no result"),
        (Done, "the class hf.Done"),
        (NotDone, "the class hf.NotDone"),
        ("ref-1", "a str, which is not a verdict"),
        ([], "a list"),
    ],
)
def test_what_is_no_verdict_is_refused_with_what_to_return(value: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_verdict(value, "find_booking")
    assert str(caught.value).startswith("find_booking returned ")
    assert words in str(caught.value)
    for name in ("hf.Done(result)", "hf.NotDone()", "hf.Unknown()"):
        assert name in str(caught.value)


def test_a_verdict_that_nobody_awaits_is_named_as_such() -> None:
    with pytest.raises(UsageError, match="something to await"):
        check_verdict(never_awaited())


# -- resources


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


# -- http


def test_the_key_is_sent_in_the_header_of_the_api() -> None:
    key = Key("run-1/3/book")
    assert idempotency_headers(key) == {"Idempotency-Key": "run-1/3/book"}
    assert idempotency_headers(key, api="PayPal") == {"PayPal-Request-Id": "run-1/3/book"}
    assert idempotency_headers(key, api="mercado-pago") == {"X-Idempotency-Key": "run-1/3/book"}
    assert idempotency_headers(key, header="X-Request-Id") == {"X-Request-Id": "run-1/3/book"}
    assert type(idempotency_headers(key)["Idempotency-Key"]) is str


@holdfast.effect(name="helpers.pay")
def pay(cents: int, key: Key) -> list[str]:
    return [str(key), idempotency_headers(api="stripe")["Idempotency-Key"]]


@holdfast.durable
def buy() -> list[list[str]]:
    return [pay(1), pay(2), pay(1)]


def test_without_a_key_it_is_the_key_of_the_effect_that_runs() -> None:
    with holdfast.open(":memory:") as store:
        keys = store.run(buy, id="order-1").result()
    assert all(given == sent for given, sent in keys)
    assert len({given for given, _ in keys}) == 3
    with pytest.raises(NotInRun):
        idempotency_headers()


def test_the_key_of_an_effect_fits_the_usual_apis() -> None:
    with holdfast.open(":memory:") as store:
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
        "import sys; import holdfast; before = set(sys.modules);"
        "import holdfast.runs.calls.doubt, holdfast.runs.agents.http;"
        "import holdfast.runs.agents.resources, holdfast.runs.agents.progress_file;"
        "print({'asyncio', 'subprocess', 'ssl', 'socket', 'httpx', 'requests'} & (set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
