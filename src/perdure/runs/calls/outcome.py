"""The verdicts that `reconcile` returns, and which errors of an effect's body prove that it did not happen.

An error out of the body leaves the outcome *unknown*, unless it is *definite*: it says that the effect did not happen.
The two mistakes do not cost the same. An unknown outcome taken for a failure can lose or repeat a booking; a failure
taken for unknown costs a look at the receiver. So only these are definite:

    a class named in the effect's `definite=`              the author of the effect says so, whatever caused it
    a class of the effect's own package (a single file:    its code raised it on purpose. Not one that is an OSError
      of the same module)                                    or an EOFError: those say that a connection broke
    an HTTP response with a 4xx status                     the receiver refused it. Not 408, 425 and 429, which
                                                             gateways also give for requests that went through

A failure before the body began is definite too. It is no error of the body: `effects.py` handles it.

The last two hold only if every error beneath is definite as well: `raise BookingFailed() from timeout`, and an error
raised while a timeout was handled, are as unknown as the timeout, and so is a group with a timeout in it.
`raise … from None` declares that the code has handled the error beneath.

HTTP statuses are recognised by their attributes, so no client library is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import Any, Final

from msgspec import Struct

from perdure.errors import UsageError
from perdure.values.names import module_name
from perdure.values.safe_repr import shown

__all__ = ["Done", "NotDone", "Unknown"]


class Done(Struct, frozen=True):
    """The effect happened. `result` is what its body would have returned."""

    result: Any


class NotDone(Struct, frozen=True):
    """The effect did not happen, and its request can no longer arrive."""


class Unknown(Struct, frozen=True):
    """Whether the effect happened cannot be determined now. The effect's `on_doubt` decides."""

    reason: str = ""


Verdict = Done | NotDone | Unknown
Classes = tuple[type[BaseException], ...]

_NOT_REFUSED: Final = frozenset({408, 425, 429})


def check_verdict(value: object, name: str = "reconcile") -> Verdict:
    """Return the verdict of a reconcile function. Raises UsageError, which says what to return, for another value."""
    if isinstance(value, Done | NotDone | Unknown):
        return value
    how = (
        "perdure.outcome.Done(result) if it happened (with the effect's result), perdure.outcome.NotDone() if it did "
        "not and no longer can, perdure.outcome.Unknown() if it cannot be told"
    )
    if isinstance(value, CoroutineType):
        value.close()  # or Python warns of a coroutine that was never awaited, beside the real error
    raise UsageError(f"{name} returned {shown(value)}, which is not a verdict; return {how}")


def check_errors(value: object, option: str, meaning: str) -> Classes:
    """Return the error classes that an option names, one or several. Raises UsageError."""
    classes = (value,) if isinstance(value, type) else value
    if isinstance(classes, tuple | list) and all(isinstance(c, type) and issubclass(c, Exception) for c in classes):
        return tuple(classes)
    raise UsageError(
        f"{option}={value!r}: classes of errors that {meaning}, for example {option}=(SoldOut, ConnectionRefusedError)"
    )


def is_definite(
    error: BaseException, definite: Classes, fn: Callable[..., Any], outside: BaseException | None = None
) -> bool:
    """Return whether an error out of an effect's body proves that the effect did not happen.

    `outside` is the error that the caller was handling when the body began. Python makes it the context of every error
    inside, and it says nothing about them.
    """
    if issubclass(type(error), definite):
        return True
    try:
        return all(_is_refusal(link) or _is_own(link, fn) for link in _errors(error, outside))
    except Exception:  # an error whose attributes cannot be read proves nothing
        return False


def _errors(error: BaseException, outside: BaseException | None) -> list[BaseException]:
    """Return the error with all its causes, contexts and group members, and theirs."""
    errors = {id(error): error}
    left = [error]
    while left:
        link = left.pop()
        beneath = [link.__cause__]
        if link.__cause__ is not None or not link.__suppress_context__:  # only `from None` drops the context
            beneath.append(link.__context__)
        if isinstance(link, BaseExceptionGroup):
            beneath += link.exceptions
        for other in beneath:
            if other is not None and other is not outside and id(other) not in errors:
                errors[id(other)] = other
                left.append(other)
    return list(errors.values())


def _is_own(error: BaseException, fn: Callable[..., Any]) -> bool:
    return _package(type(error)) == _package(fn) and not issubclass(type(error), OSError | EOFError)


def _package(definition: Any) -> str:
    return module_name(definition.__module__).partition(".")[0]


def _is_refusal(error: BaseException) -> bool:
    """Return whether an error stands for an HTTP response that refuses the request."""
    status = _status(error)
    return issubclass(type(status), int) and 400 <= status < 500 and status not in _NOT_REFUSED


def _status(error: BaseException) -> Any:
    """Return the HTTP status of an error of httpx, requests, aiohttp, urllib, or an SDK on top of them; else None.

    `code` is read from urllib's errors alone: other libraries use that name for other things.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    for name in ("status_code", "http_status", "status"):
        status = getattr(error, name, None) if status is None else status
    if status is None and any((c.__module__, c.__name__) == ("urllib.error", "HTTPError") for c in type(error).__mro__):
        status = getattr(error, "code", None)
    return status
