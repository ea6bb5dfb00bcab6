"""Names of asyncio tasks in paths. A name depends on the task alone, not on other tasks.

It consists of the function's name and a hash of the plain values among its arguments. Objects of other classes are left
out, because their repr may differ between processes. The hash is keyed by a secret of the run: otherwise an argument
such as a customer's number could be found by trying all of them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from types import CodeType
from typing import Any

from blake3 import blake3

_NAME_MAX = 32  # characters of a function's name
_HASH_BYTES = 6
_ITEMS_MAX = 64  # items of a list or dict that are hashed
_DEPTH_MAX = 3
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
_VARIADIC = (0x04, 0x08)  # inspect.CO_VARARGS, CO_VARKEYWORDS


def task_name(coro: Any, key: bytes) -> str:
    """Return the name of the task that runs a coroutine, as a part of a path."""
    name = plain_part(str(getattr(coro, "__name__", type(coro).__name__)))
    text = _arguments(coro, _DEPTH_MAX)
    return f"{name}-{keyed_hash(text, key)}" if text else name


@lru_cache(1024)
def plain_part(name: str) -> str:
    """Return the letters, digits and underscores of a name, as a part of a path."""
    return re.sub(r"\W", "", name, flags=re.ASCII)[:_NAME_MAX]


def keyed_hash(text: bytes, key: bytes) -> str:
    """Return a hash, as text, that only a holder of the key can compute."""
    return blake3(text, key=key).hexdigest(_HASH_BYTES)


def _arguments(coro: Any, depth: int) -> bytes:
    """Return the plain arguments of a coroutine that has not begun, as bytes."""
    frame = getattr(coro, "cr_frame", None)
    if frame is None:
        return b""
    values = frame.f_locals
    return b"".join([_plain(values[name], depth) for name in _parameters(frame.f_code) if name in values])


@lru_cache(1024)
def _parameters(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in _VARIADIC)
    return code.co_varnames[:count]


def _plain(value: Any, depth: int) -> bytes:
    """Return a plain value as bytes; b"" for any other value."""
    kind: type = type(value)
    if kind in _PLAIN:
        return repr(value).encode("utf-8", "backslashreplace") + b","
    if depth == 0:
        return b""
    if kind in (tuple, list):
        return b"(" + b"".join([_plain(item, depth - 1) for item in value[:_ITEMS_MAX]]) + b")" if value else b""
    if kind is dict:
        items = list(value.items())[:_ITEMS_MAX]
        return (
            b"{" + b"".join([_plain(key, 0) + _plain(item, depth - 1) for key, item in items]) + b"}" if items else b""
        )
    if _is_coroutine(kind):  # the function is a helper that runs this coroutine
        return str(value.__name__).encode() + b"(" + _arguments(value, depth - 1) + b")"
    return b""


@lru_cache(1024)  # an attribute that a model of pydantic does not have is looked for in Python code, for every value
def _is_coroutine(kind: type) -> bool:
    return hasattr(kind, "cr_frame")
