"""Errors of a run's own code, written down and raised again.

An error is kept as its class's name, its text and its arguments. It is raised again as the same class if that class is
known to this process: found by name among what is imported, an exception, and made without running any code of it.
Otherwise it becomes `StepFailed`, which names the class.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.errors import StepFailed, ValueProblem
from holdfast.values.codec import decode, encode
from holdfast.values.registry import Codec

_RECORDED = "__holdfast_recorded__"
_TEXT_MAX = 10_000
_DEPTH_MAX = 4


def describe_error(error: BaseException, codec: Codec, depth: int = 0) -> dict[str, Any]:
    """An error as plain data."""
    cls = type(error)
    found: dict[str, Any] = {"type": f"{cls.__module__}:{cls.__qualname__}", "text": _text(error)}
    try:
        found["args"] = encode(list(error.args), codec)
    except ValueProblem:
        pass  # its text must do
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
    if attributes:
        try:
            found["attributes"] = encode(attributes, codec)
        except ValueProblem:
            pass
    if error.__cause__ is not None and depth < _DEPTH_MAX:
        found["cause"] = describe_error(error.__cause__, codec, depth + 1)
    return found


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the failure
        text = object.__repr__(error)
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode().replace("\0", "�")


def recorded(error: BaseException) -> bool:
    """Whether an error is on record as the end of a call: then it is the run's own, whatever its class."""
    return bool(getattr(error, _RECORDED, False))


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


def rebuild(found: dict[str, Any], codec: Codec) -> Exception:
    """The error, to be raised again."""
    cls = _class_of(str(found.get("type", "")))
    if cls is None:
        failed = StepFailed(
            f"a step had failed with {error_text(found)} (its class is not known here)",
            type_name=error_name(found),
        )
        _add_cause(failed, found, codec)
        return failed
    args = _decoded(found.get("args"), codec)
    arguments = tuple(args) if isinstance(args, list) else (found.get("text", ""),)
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    try:
        # The constructor of the built-in class below it: no code of the error's own class runs.
        made: Exception = builtin.__new__(cls, *arguments)
        made.args = arguments
    except Exception:
        return StepFailed(f"a step had failed with {error_text(found)}", type_name=error_name(found))
    attributes = _decoded(found.get("attributes"), codec)
    if isinstance(attributes, dict):
        for name, value in attributes.items():
            if isinstance(name, str):
                made.__dict__[name] = value
    _add_cause(made, found, codec)
    return made


def _add_cause(error: Exception, found: dict[str, Any], codec: Codec) -> None:
    cause = found.get("cause")
    if isinstance(cause, dict):
        error.__cause__ = rebuild(cause, codec)


def _decoded(text: Any, codec: Codec) -> Any:
    if not isinstance(text, bytes):
        return None
    try:
        return decode(text, codec)
    except ValueProblem:
        return None


def _class_of(name: str) -> type[Exception] | None:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None) if found is not None and part != "<locals>" else None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
