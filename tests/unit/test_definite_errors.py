"""Which errors of an effect's body say that it did not happen; and what `reconcile` may return.

Errors are made by real sockets and real clients; only those of SDKs that are not installed here are built by hand, with
the attributes of the real ones.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib.machinery
import socket
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pytest
import requests

from perdure.errors import UsageError
from perdure.runs.calls.outcome import Done, NotDone, Unknown, check_errors, check_verdict, is_definite

# --- real errors of real clients


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


def effect() -> None:
    """The effect whose body raises: its package is this module."""


class BookingFailed(Exception):
    """Of the effect's own package."""


class AirlineTimeout(TimeoutError):
    """Of the effect's own package, and what it inherits says that a connection broke."""


def definite(error: BaseException, *named: type[Exception]) -> bool:
    return is_definite(error, named, effect)


@pytest.mark.parametrize("post", CLIENTS)
@pytest.mark.parametrize(
    ("answer", "is_no"),
    [
        (None, False),  # no answer in time
        (b"", False),  # closed without an answer
        (b"HT", False),  # closed in the middle of the head
        (reply("200 OK", length=100), False),  # closed in the middle of the body
        (reply("503 Service Unavailable"), False),
        (reply("429 Too Many Requests"), False),
        (reply("402 Payment Required"), True),
    ],
    ids=["hangs", "closes", "half a head", "half a body", "503", "429", "402"],
)
def test_what_reached_the_receiver_is_unknown_unless_it_refused(
    post: Callable[[str], None], answer: bytes | None, is_no: bool
) -> None:
    receiver = Receiver(answer)
    try:
        error = error_of(lambda: post(receiver.url))
        assert receiver.requests == 1
        assert definite(error) is is_no
    finally:
        receiver.close()


@pytest.mark.parametrize(
    "error",
    [
        asyncio.IncompleteReadError(b"HTTP/1.1 20", 512),
        EOFError("end of stream"),
        psycopg.OperationalError("server closed the connection unexpectedly"),
        http.client.IncompleteRead(b"x"),
        ConnectionRefusedError(),  # of a client that tries again by itself, it is only the last error
        asyncio.CancelledError(),
        KeyError("booking"),  # perhaps of an answer that was read
        ZeroDivisionError(),
        ExceptionGroup("two requests", [BookingFailed()]),
        AirlineTimeout("no answer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_unknown_unless_it_is_definite(error: BaseException) -> None:
    assert not definite(error)


def with_attributes(**attributes: Any) -> Exception:
    error = Exception()
    vars(error).update(attributes)
    return error


@pytest.mark.parametrize("name", ["status_code", "http_status", "status", "response"])
def test_a_status_is_known_by_the_attributes_of_the_sdks(name: str) -> None:
    def with_status(status: Any) -> Exception:
        return with_attributes(**{name: httpx.Response(status) if name == "response" else status})

    tried = (200, 400, 404, 408, 409, 422, 425, 429, 499, 500)
    assert [status for status in tried if definite(with_status(status))] == [400, 404, 409, 422, 499]
    assert not definite(with_attributes(code=404))  # means something else in most libraries


def test_a_class_of_the_own_package_is_definite_and_one_of_another_only_if_named() -> None:
    assert definite(BookingFailed())
    assert not is_definite(BookingFailed(), (), pytest.raises)
    assert definite(ConnectionRefusedError(), ConnectionRefusedError)
    assert definite(AirlineTimeout(), TimeoutError)


def test_an_error_is_as_unknown_as_what_it_was_raised_from() -> None:
    assert not definite(raised(BookingFailed(), cause=httpx.ReadTimeout("x")))
    assert not definite(raised(BookingFailed(), during=TimeoutError()))
    assert not definite(raised(with_attributes(status=409), during=httpx.ReadTimeout("of the first request")))
    assert definite(raised(BookingFailed(), cause=with_attributes(status=409)))
    assert definite(raised(BookingFailed(), cause=TimeoutError()), BookingFailed)  # the effect's author says so

    def book() -> None:
        try:
            raise TimeoutError
        except TimeoutError:
            raise BookingFailed from None

    assert definite(error_of(book))


def test_what_the_caller_was_handling_does_not_count() -> None:
    first = TimeoutError("another effect, and the code catches it and books elsewhere")
    assert is_definite(raised(BookingFailed(), during=first), (), effect, first)


def test_the_error_itself_counts_also_if_the_caller_was_handling_it() -> None:
    same = TimeoutError("raised again by the body")
    assert not is_definite(same, (), effect, same)


class Several(ExceptionGroup[Exception]):
    """Of the effect's own package."""


def test_a_group_is_as_unknown_as_its_members() -> None:
    assert definite(Several("two requests", [BookingFailed(), with_attributes(status=409)]))
    assert not definite(Several("two requests", [BookingFailed(), TimeoutError()]))
    assert not definite(raised(BookingFailed(), cause=Several("nested", [Several("two", [TimeoutError()])])))


def test_what_was_being_handled_counts_beside_a_cause() -> None:
    def book() -> None:
        try:
            raise TimeoutError
        except TimeoutError:
            raise BookingFailed from BookingFailed("of an earlier check")

    assert not definite(error_of(book))


class Falsy(TimeoutError):
    def __len__(self) -> int:
        return 0


def test_a_cause_that_is_falsy_counts() -> None:
    assert not definite(raised(BookingFailed(), cause=Falsy()))


def test_a_package_is_the_same_one_under_python_m(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m airline.main`: the effect is in `__main__`, its errors in `airline.errors`."""
    main = types.ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec("airline.main", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(effect, "__module__", "__main__")
    declined = type("Declined", (Exception,), {"__module__": "airline.errors"})
    assert definite(declined())
    assert not definite(type("Other", (Exception,), {"__module__": "railway.errors"})())


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, other = BookingFailed(), BookingFailed()
    one.__cause__, other.__cause__ = other, one
    assert definite(one)


def test_definite_is_checked_where_it_is_given() -> None:
    assert check_errors(BookingFailed, "definite", "say so") == (BookingFailed,)
    assert check_errors([BookingFailed, OSError], "definite", "say so") == (BookingFailed, OSError)
    for wrong in ("TimeoutError", (BookingFailed, "x"), int, 3, None, (KeyboardInterrupt,), lambda error: True):
        with pytest.raises(UsageError, match="definite="):
            check_errors(wrong, "definite", "say so")


# --- verdicts


def test_verdicts_are_values() -> None:
    assert check_verdict(Done("x")) == Done("x")
    assert check_verdict(NotDone()) == NotDone()
    assert check_verdict(Unknown("no network")) == Unknown("no network")
    with pytest.raises(AttributeError):
        Done(1).result = 2  # type: ignore[misc]


async def never_awaited() -> Done:
    return Done(1)


def test_what_is_no_verdict_is_refused_with_what_to_return() -> None:
    for value in (None, True, Done, "ref-1", never_awaited()):  # a coroutine is closed, so that Python does not warn
        with pytest.raises(UsageError, match=r"find_booking returned .* is not a verdict") as caught:
            check_verdict(value, "find_booking")
        for name in ("perdure.outcome.Done(result)", "perdure.outcome.NotDone()", "perdure.outcome.Unknown()"):
            assert name in str(caught.value)
