"""The helpers of runs that need no database: doubt, resources, and the key as a header.

Errors are made by real sockets and real clients; only of libraries that are not installed here (aiohttp, grpc) the
classes are built by hand, with the names and parents of the real ones.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import smtplib
import socket
import ssl
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import httpx
import pytest
import requests

from holdfast.errors import UsageError
from holdfast.runs.calls.doubt import (
    Done,
    NotDone,
    Unknown,
    check_ambiguous,
    check_verdict,
    is_ambiguous,
)

# --- doubt: real errors of real clients


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


# --- doubt: errors by themselves


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


# --- doubt: verdicts


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
