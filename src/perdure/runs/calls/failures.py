"""Errors of a run's own code, written down and raised again.

An error is kept as its class's name, its text and its arguments. It is raised again as the same class, found by name
among what is imported and made without running any code of it. If that cannot be done, `Unresolved` says why: an
`except` of the run's code would not match a substitute, and the run would fail and be undone for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.errors import StepFailed, ValueProblem
from perdure.runs.calls.evidence import traceback_of
from perdure.values.codec import decode, encode
from perdure.values.names import class_name, find_class
from perdure.values.registry import Codec

_RECORDED = "__perdure_recorded__"
_TEXT_MAX = 10_000
_DEPTH_MAX = 4
_MEMBERS_MAX = 100  # of a group; what comes after them is not kept


def describe_error(error: BaseException, codec: Codec, depth: int = 0) -> dict[str, Any]:
    """An error as plain data. Never raises: whatever a foreign class does, its failure is kept."""
    name = ":".join(class_name(type(error))).encode("utf-8", "replace").decode()
    found: dict[str, Any] = {"type": name, "text": safe_text(error)}
    if (args := _kept(lambda: _arguments(error), codec)) is not None:
        found["args"] = args
    if attributes := {name: text for name in _attributes(error) if (text := _kept_attribute(error, name, codec))}:
        found["attributes"] = attributes
    if not depth and (traceback := traceback_of(error)) is not None:
        found["traceback"] = traceback
    if depth < _DEPTH_MAX:
        if isinstance(error, BaseExceptionGroup):
            members = _own(BaseExceptionGroup.exceptions, error)[:_MEMBERS_MAX]
            found["errors"] = [describe_error(member, codec, depth + 1) for member in members]
        cause = _own(BaseException.__cause__, error)
        if cause is not None:
            found["cause"] = describe_error(cause, codec, depth + 1)
    return found


def _own(descriptor: Any, error: BaseException) -> Any:
    """What the built-in class itself says, whatever the error's own class puts over it."""
    return descriptor.__get__(error)


def _arguments(error: BaseException) -> list[Any]:
    """What the constructor of the built-in class makes the same error from."""
    if isinstance(error, BaseExceptionGroup):
        return [_own(BaseExceptionGroup.message, error)]  # its members are described one by one
    args = list(_own(BaseException.args, error))
    if isinstance(error, OSError) and len(args) == 2 and error.filename is not None:
        args.append(error.filename)
        if error.filename2 is not None:
            args += [None, error.filename2]
    return args


def _attributes(error: BaseException) -> list[str]:
    """The names of what its class, or the code that raised it, has added."""
    try:
        own = list(vars(error))
    except Exception:  # a class that hides them
        own = []
    slots = (getattr(base, "__slots__", ()) for base in type(error).__mro__ if base.__module__ != "builtins")
    names = [*own, *(name for given in slots for name in ((given,) if isinstance(given, str) else given))]
    return [name for name in names if not name.startswith("__")]


def _kept_attribute(error: BaseException, name: str, codec: Codec) -> bytes | None:
    return _kept(lambda: getattr(error, name), codec)


def _kept(given: Callable[[], Any], codec: Codec) -> bytes | None:
    """A part of an error as text. None if it cannot be stored, or not even be asked for: the others are kept."""
    try:
        return encode(given(), codec)
    except Exception:
        return None


def safe_text(error: object) -> str:
    """The text of an error, or of what user code gave as text, in bounds and fit for both databases. Never raises."""
    try:
        text = str(error)[:_TEXT_MAX]
    except Exception:  # a broken __str__ must not hide the failure
        text = object.__repr__(error)
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def line_of(error: BaseException) -> str:
    """An error in one line, for people. Never raises."""
    text = safe_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def recorded(error: BaseException) -> bool:
    """Whether an error is on record as the end of a call: then it is the run's own, whatever its class."""
    try:
        return bool(getattr(error, _RECORDED, False))
    except Exception:
        return False


def mark_recorded(error: BaseException) -> None:
    """Say that an error is on record."""
    try:
        setattr(error, _RECORDED, True)
    except Exception:  # an error that takes no attributes is just not known as one
        pass


def error_name(found: dict[str, Any]) -> str:
    """The class's name, for people."""
    return str(found.get("type", "?")).rpartition(":")[2]


def error_text(found: dict[str, Any]) -> str:
    """One line for people."""
    text = found.get("text") or ""
    return f"{error_name(found)}: {text}" if text else error_name(found)


class Unresolved(Exception):
    """A recorded error that cannot be made again here. The text says why, and what helps."""


def rebuild(found: dict[str, Any], codec: Codec) -> Exception:
    """The error, to be raised again. Raises Unresolved."""
    module, _, qualname = str(found.get("type", "")).partition(":")
    cls = find_class(module, qualname, codec.home)
    if cls is None or not issubclass(cls, Exception):
        raise Unresolved(
            f"there is no class {module}:{qualname} in this process. If it was renamed or moved, keep its old name as "
            "an alias; if it is defined inside a function, define it outside; else import its module before the run"
        )
    args = _decoded(found.get("args"), codec)
    arguments = tuple(args) if isinstance(args, list) else (found.get("text", ""),)
    if issubclass(cls, BaseExceptionGroup):
        members: list[dict[str, Any]] = found.get("errors") or [{}]
        arguments = (*arguments[:1], [rebuild(member, codec) for member in members])
    try:
        made = _made(cls, arguments)
    except Exception as error:
        raise Unresolved(
            f"{module}:{qualname} cannot be made without its own constructor ({line_of(error)}). Raise an error of "
            "your own from it in the step"
        ) from error
    for name, text in (found.get("attributes") or {}).items():
        try:
            object.__setattr__(made, name, decode(text, codec))
        except (ValueProblem, AttributeError, TypeError):  # a class that changed: what it has no place for is left out
            continue
    _add_cause(made, found, codec)
    return made


def rebuilt(found: dict[str, Any], codec: Codec) -> Exception:
    """The error for those who only look at it: `StepFailed`, which names the class, stands for one that is not here."""
    try:
        return rebuild(found, codec)
    except Unresolved:
        failed = StepFailed(
            f"a step had failed with {error_text(found)} (its class is not known here)", type_name=error_name(found)
        )
        _add_cause(failed, found, codec)
        return failed


def _made(cls: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    """Made by the constructor of the built-in class below it: no code of the error's own class runs."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    made: Exception = builtin.__new__(cls, *arguments)
    try:
        builtin.__init__(made, *arguments)  # type: ignore[misc]  # an OSError has its filename from there
    except Exception:  # a class that calls it otherwise
        made.args = arguments
    return made


def _add_cause(error: Exception, found: dict[str, Any], codec: Codec) -> None:
    cause = found.get("cause")
    if isinstance(cause, dict):
        error.__cause__ = rebuilt(cause, codec)


def _decoded(text: Any, codec: Codec) -> Any:
    if not isinstance(text, bytes):
        return None
    try:
        return decode(text, codec)
    except ValueProblem:
        return None
