"""Values as people and JSON can read them: states, sizes, times.

What JSON cannot hold becomes text or a list; nothing is ever called on a value of an unknown class but `str`, and no
text leaves here that could steer a terminal (escape sequences, direction overrides).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from typing import Any

from perdure.values.amounts import plural as plural
from perdure.values.amounts import size as size
from perdure.values.safe_repr import shown

BYTES_SHOWN = 32
_INT_BITS_MAX = 14_000  # 4,214 digits
_STEERING = r"\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069"
_UNSAFE_JSON = re.compile(f"[{_STEERING}]")
_UNSAFE_TEXT = re.compile(rf"[\x00-\x1f{_STEERING}]")


def readable(value: Any) -> Any:
    """Any value of a raw state, or a result of the library, made of what JSON can hold."""
    if type(value) is int and value.bit_length() > _INT_BITS_MAX:
        return hex(value)  # Python refuses to write it in decimal
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date | time):
        return value.isoformat()
    if is_dataclass(value):  # a result of the library: states are raw and have none
        names = [field.name for field in fields(value) if not field.name.startswith("_")]
        return {name: readable(getattr(value, name)) for name in names}
    if hasattr(value, "_asdict"):
        return readable(value._asdict())
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, list | tuple | deque):
        return [readable(item) for item in value]
    if isinstance(value, Set):
        return sorted((readable(item) for item in value), key=lambda item: (type(item).__name__, str(item)))
    if isinstance(value, bytes | bytearray):
        return _octets(bytes(value))
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _array(value)
    try:
        return str(value)
    except Exception:  # a range of such ints
        return shown(value)


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, item in value.items():
        name = key if type(key) is str else str(readable(key))
        if name in made or (name is not key and name in value):
            name = f"{name} ({type(key).__name__})"  # 1 and "1" are two keys
        made[name] = readable(item)
    return made


def _octets(value: bytes) -> str:
    more = "…" if len(value) > BYTES_SHOWN else ""
    return f"<{len(value)} bytes: {value[:BYTES_SHOWN].hex()}{more}>"


def _array(value: Any) -> Any:
    """numpy's, if it is installed here: a scalar as its value, an array with its type and shape."""
    if not getattr(value, "shape", ()):
        plain = value.tolist()
        return str(value) if hasattr(plain, "dtype") else readable(plain)
    return {
        "<type>": "ndarray",
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "items": readable(value.tolist()) if value.size else [],  # as a list, a million empty rows are a million lists
    }


def to_json(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """JSON text of a readable value; what could steer a terminal is escaped, and it stays valid JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    return _UNSAFE_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable(text: str) -> str:
    """One line of text that cannot steer a terminal."""
    return _UNSAFE_TEXT.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def local(at: datetime) -> str:
    """A stored time for people: local, to the second."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ago(at: datetime, now: datetime) -> str:
    """How long ago: `just now`, `5 min ago`, `3 h ago`, `12 days ago`, and a date when it is longer."""
    seconds = (now - at).total_seconds()
    if seconds < 10:  # also a clock that is a little ahead
        return "just now"
    if seconds < 60:
        return f"{seconds:.0f} s ago"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 86_400:
        return f"{seconds // 3600:.0f} h ago"
    days = int(seconds // 86_400)
    if days <= 30:
        return f"{plural(days, 'day')} ago"
    return at.astimezone().strftime("%Y-%m-%d")


def nearest(kind: str, name: str, known: list[str], command: str) -> str:
    """The message about a name that does not exist."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`{command}` lists what is there"
    return f"there is no {kind} {name!r}; {hint}"


def complain(text: str) -> None:
    """One line on stderr, with our name in front. An argument that a message quotes may hold a password."""
    from perdure.storage.urls import redacted

    sys.stderr.write(f"perdure: {printable(redacted(' '.join(text.split())))}\n")
