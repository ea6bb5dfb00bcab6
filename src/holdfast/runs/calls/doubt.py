"""Did it happen? What `reconcile` answers, and which errors leave the outcome of an effect unknown.

An error is *definite* if it says that the effect did not happen, and *ambiguous* if it may have. The two
mistakes do not cost the same: an ambiguous error taken for definite can lose or repeat a booking, a definite
one taken for ambiguous costs a look at the receiver. So whatever may have reached the receiver is ambiguous.

    error                                                            taken as, and why
    ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    anything that is no Exception: asyncio.CancelledError,           ambiguous: the body was stopped from
      KeyboardInterrupt, SystemExit, GeneratorExit                     outside, wherever it was
    TimeoutError (also socket's, asyncio's, concurrent.futures')     ambiguous: nobody knows when it lands
    ConnectionError: reset, aborted, broken pipe                     ambiguous: the request may be through
    ConnectionRefusedError                                           definite: there was no connection
    OSError: host or network down, unreachable, reset                ambiguous: also met after the request
    OSError: any other (socket.gaierror, FileNotFoundError …)        definite
    ssl.SSLCertVerificationError                                     definite: nothing is sent before it
    ssl.SSLError, any other                                          ambiguous: the stream may break later
    http.client: IncompleteRead, BadStatusLine, LineTooLong          ambiguous: the answer is lost
    smtplib.SMTPServerDisconnected                                   ambiguous: the mail may be accepted
    subprocess.TimeoutExpired                                        ambiguous: stopped in the middle
    concurrent.futures.BrokenExecutor                                ambiguous: its process died at it
    urllib.error.URLError                                            as its reason, by the lines above
    httpx, httpcore: ConnectError, ConnectTimeout, PoolTimeout,      definite: no connection was had
      ProxyError, UnsupportedProtocol
    httpx, httpcore: every other TransportError                      ambiguous
    requests: ConnectTimeout; ConnectionError about a connection     definite: no connection was had
      that could not be made (urllib3.NewConnectionError)
    requests: any other ConnectionError, Timeout,                    ambiguous
      ChunkedEncodingError
    urllib3: NewConnectionError, ConnectTimeoutError                 definite
    urllib3: TimeoutError, ProtocolError                             ambiguous
    urllib3: MaxRetryError, SSLError, ProxyError                     as what they were made from
    aiohttp: ClientConnectorError (DNS, TLS, proxy),                 definite: no connection was had
      ConnectionTimeoutError
    aiohttp: any other ClientConnectionError, ClientPayloadError     ambiguous
    grpc.RpcError: UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED         ambiguous: UNAVAILABLE also comes when
                                                                       the stream broke
    grpc: FutureTimeoutError, FutureCancelledError                   ambiguous
    an HTTP status as an error: 502, 504, 520, 524                   ambiguous: a gateway lost the answer
    an HTTP status as an error: any other, 500 and 503 too           definite: the receiver itself said so
    a group of errors                                                ambiguous if one of its members is
    everything else                                                  definite

**Wrapped errors.** `raise BookingFailed() from timeout` is as ambiguous as the timeout, and so is an error that
was raised while a timeout was being handled: the whole chain of causes and contexts is looked at, because SDKs
wrap, and so does careful code. `raise … from None` says that the error before was dealt with. Beneath a definite
error its causes are not looked at: a connect timeout has a TimeoutError inside.

**What cannot be seen here.** A client that repeats requests by itself shows only its last error: switch its
retries off inside an effect (Holdfast has them), and let one effect send one request.

Libraries are known by name, so nothing is imported: an error of a library that is not installed does not occur.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Final

from msgspec import Struct

from holdfast.errors import UsageError

__all__ = [
    "AMBIGUOUS_DEFAULT",
    "Ambiguous",
    "Done",
    "NotDone",
    "Unknown",
    "Verdict",
    "check_ambiguous",
    "check_verdict",
    "is_ambiguous",
]


class Done(Struct, frozen=True):
    """It happened, and this is what the effect would have returned."""

    result: Any


class NotDone(Struct, frozen=True):
    """It did not happen, and the request can no longer arrive."""


class Unknown(Struct, frozen=True):
    """It cannot be told now. The effect's `on_doubt` decides."""

    reason: str = ""


Verdict = Done | NotDone | Unknown

#: Types of errors, or a function of the error: True means in doubt, `NotDone()` means definite, and anything else
#: leaves it to the table above.
Ambiguous = tuple[type[BaseException], ...] | Callable[[BaseException], object]

#: The built-in part of the table; cancellation needs no entry, for it is no Exception.
AMBIGUOUS_DEFAULT: Final[tuple[type[BaseException], ...]] = (TimeoutError, ConnectionError)

_DOWN: Final = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET})
_GATEWAY: Final = frozenset({502, 504, 520, 524})
_GRPC: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
_CHAIN_MAX: Final = 1000

# By top-level package and class. httpx and httpcore have the same names.
_HTTPX: Final = {
    "ConnectError": False,
    "ConnectTimeout": False,
    "PoolTimeout": False,
    "ProxyError": False,
    "UnsupportedProtocol": False,
    "TransportError": True,  # httpx: the root of the rest
    "TimeoutException": True,
    "NetworkError": True,
    "ProtocolError": True,
}
_KNOWN: Final[dict[str, dict[str, bool]]] = {
    "httpx": _HTTPX,
    "httpcore": _HTTPX,
    "httpx2": _HTTPX,
    "httpcore2": _HTTPX,
    "requests": {
        "ConnectTimeout": False,
        "ConnectionError": True,
        "Timeout": True,
        "ChunkedEncodingError": True,
    },
    "urllib3": {
        "NewConnectionError": False,
        "ConnectTimeoutError": False,
        "TimeoutError": True,
        "ProtocolError": True,
        "SSLError": True,
        "ProxyError": True,
    },
    "aiohttp": {
        "ClientConnectorError": False,
        "ClientConnectorCertificateError": False,
        "ConnectionTimeoutError": False,
        "ClientConnectionError": True,
        "ClientPayloadError": True,
    },
    "grpc": {"FutureTimeoutError": True, "FutureCancelledError": True},
    "ssl": {"SSLCertVerificationError": False, "SSLError": True},
    "http": {"IncompleteRead": True, "BadStatusLine": True, "LineTooLong": True},
    "smtplib": {"SMTPServerDisconnected": True},
    "subprocess": {"TimeoutExpired": True},
    "concurrent": {"BrokenExecutor": True},
}
# Errors that hold the one they were made from: in this attribute, or else as their first argument.
_MADE_FROM: Final = {
    ("urllib", "URLError"): "reason",
    ("urllib3", "MaxRetryError"): "reason",
    ("urllib3", "ProxyError"): "original_error",
    ("urllib3", "SSLError"): "",
    ("requests", "ConnectionError"): "",
}


def check_verdict(value: object, name: str = "reconcile") -> Verdict:
    """What a reconcile function returned, if it is a verdict; else a UsageError that says what to return."""
    if isinstance(value, Done | NotDone | Unknown):
        return value
    how = (
        "hf.Done(result) if it happened (with what the effect would have returned), hf.NotDone() if it did not and "
        "no longer can, hf.Unknown() if it cannot be told"
    )
    if isinstance(value, type) and issubclass(value, Done | NotDone | Unknown):
        slip = f"the class hf.{value.__name__} instead of an instance"
    elif value is None:
        slip = "None, which could mean that it did not happen, or that nothing was found out"
    elif isinstance(value, bool):
        slip = f"{value}, and a bool has no result and no third case"
    elif hasattr(value, "__await__"):
        slip = "something to await, which nobody awaits: give an async function itself, not one that calls it"
        if isinstance(value, CoroutineType):
            value.close()  # so that Python does not warn beside the real error
    else:
        slip = f"a {type(value).__qualname__}, which is not a verdict"
    raise UsageError(f"{name} returned {slip}; return {how}")


def check_ambiguous(value: object) -> Ambiguous:
    """An effect's `ambiguous=`, checked when the effect is defined: a type, a tuple of types, or a function."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return (value,)
    if isinstance(value, tuple | list | set | frozenset):
        for kind in value:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise UsageError(f"ambiguous= takes classes of errors, and {kind!r} is none")
        return tuple(value)
    if callable(value) and not isinstance(value, type):
        return value
    raise UsageError(
        f"ambiguous= takes classes of errors, (GatewayTimeout, …), or a function of the error that returns True "
        f"when it leaves the outcome unknown, not {value!r}"
    )


def is_ambiguous(error: BaseException, extra: Ambiguous = ()) -> bool:
    """Whether this error of an effect's body leaves unknown if the effect happened.

    `extra` adds to the table of this module: classes, or a function that returns True (in doubt), `NotDone()`
    (definite, whatever the table says) or anything else (the table decides). A function that fails has not
    decided, and then the outcome is unknown.
    """
    kinds: tuple[type[BaseException], ...] = ()
    if isinstance(extra, tuple):
        kinds = extra
    else:
        try:
            answer = extra(error)
        except Exception as problem:
            error.add_note(f"the function given as ambiguous= failed ({problem!r}), so the outcome counts as unknown")
            return True
        if answer is True or isinstance(answer, NotDone):
            return answer is True
    try:
        return _chain_in_doubt(error, kinds)
    except Exception:  # an error that cannot be looked at says nothing
        return True


def _chain_in_doubt(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether one link of the chain of causes and contexts is ambiguous, unless a definite one explains it."""
    link: BaseException | None = error
    explained = False  # a definite error above says what this link led to
    seen: set[int] = set()
    while link is not None and id(link) not in seen and len(seen) < _CHAIN_MAX:
        seen.add(id(link))
        opinion = None
        if not explained:
            opinion = True if isinstance(link, kinds) else _opinion(link)
            if opinion is None and isinstance(link, BaseExceptionGroup):
                opinion = any(_chain_in_doubt(member, kinds) for member in link.exceptions) or None
            if opinion:
                return True
        if link.__cause__ is not None:
            explained = explained or opinion is False
            link = link.__cause__
        elif link.__suppress_context__:
            return False
        else:
            # What was being handled when this was raised is another matter, and is judged for itself; except the
            # cancellation by which a connect timeout of asyncio is made.
            link = link.__context__
            explained = explained and link is not None and not isinstance(link, Exception)
    return False


def _opinion(error: BaseException) -> bool | None:
    """Ambiguous, definite, or (None) an error that is not about the connection."""
    if not isinstance(error, Exception):
        # A group with a cancellation among its members is judged by them.
        return None if isinstance(error, BaseExceptionGroup) else True
    status = _status(error)
    if status is not None:
        return status in _GATEWAY or None
    for cls in type(error).__mro__:
        package = cls.__module__.partition(".")[0]
        made_from = _MADE_FROM.get((package, cls.__name__))
        if made_from is not None:
            inner = getattr(error, made_from, None) if made_from else next(iter(error.args), None)
            opinion = _opinion(inner) if isinstance(inner, BaseException) and inner is not error else None
            # A library's own ConnectionError without an opinion from within is a connection that broke.
            return opinion if opinion is not None else _KNOWN.get(package, {}).get(cls.__name__)
        known = _KNOWN.get(package)
        if known is not None and cls.__name__ in known:
            return known[cls.__name__]
        if package == "grpc" and cls.__name__ == "RpcError":
            return _grpc_code(error) in _GRPC or None
    if isinstance(error, ConnectionRefusedError):
        return False
    if isinstance(error, AMBIGUOUS_DEFAULT):
        return True
    return (isinstance(error, OSError) and error.errno in _DOWN) or None


def _status(error: Exception) -> int | None:
    """The HTTP status that an error stands for, in the forms of httpx, requests, urllib and aiohttp."""
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(error).__mro__}
    if names & {("httpx", "HTTPStatusError"), ("httpx2", "HTTPStatusError"), ("requests", "HTTPError")}:
        status = getattr(getattr(error, "response", None), "status_code", None)
    elif ("urllib", "HTTPError") in names:
        status = getattr(error, "code", None)
    elif ("aiohttp", "ClientResponseError") in names:
        status = getattr(error, "status", None)
    else:
        return None
    return status if isinstance(status, int) else None


def _grpc_code(error: Exception) -> str:
    code = getattr(error, "code", None)
    try:
        return str(getattr(code() if callable(code) else code, "name", ""))
    except Exception:
        return ""
