"""Turn values into types that JSON can hold, and into JSON, for people.

Values that JSON cannot hold become text or lists. On a value of an unknown class only `str` is called. Text that could
steer a terminal (escape sequences, direction overrides) is escaped.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from typing import Any

from perdure.values.safe_repr import shown

BYTES_SHOWN = 32
_INT_BITS_MAX = 14_000  # 4,214 digits
_STEERING = r"\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069"
_UNSAFE_JSON = re.compile(f"[{_STEERING}]")
_UNSAFE_TEXT = re.compile(rf"[\x00-\x1f{_STEERING}]")


def readable(value: Any) -> Any:
    """Convert a value of a raw state, or a result of the library, to types that JSON can hold."""
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
    if (merging := shown_as(value)) is not None:
        return {name: readable(part) for name, part in merging.items()}
    if is_dataclass(value):  # a result of the library: a raw state has no dataclasses
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
    except Exception:  # for example a range of ints too long for decimal
        return shown(value)


def shown_as(value: Any) -> dict[str, Any] | None:
    """Return what to show of a value that merges, or of its raw form: without writers and numbers. None: another."""
    name = value.get("<type>") if isinstance(value, Mapping) else f"{type(value).__module__}."
    if type(name) is not str or not name.startswith(("perdure.crdt.", "perdure.values.crdts.")):
        return None
    from perdure.values.crdts import KINDS, Mergeable  # late: most commands show none

    if isinstance(value, Mapping) and name in KINDS:
        with suppress(Exception):  # hostile text can take any shape: then it is shown as it is
            value = KINDS[name]._load(value)
    return {"<type>": type(value).__name__, "value": value.value} if isinstance(value, Mergeable) else None


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if type(key) is str else str(readable(key))
        if name in result or (name is not key and name in value):
            name = f"{name} ({type(key).__name__})"  # 1 and "1" are two keys
        result[name] = readable(item)
    return result


def _octets(value: bytes) -> str:
    more = "…" if len(value) > BYTES_SHOWN else ""
    return f"<{len(value)} bytes: {value[:BYTES_SHOWN].hex()}{more}>"


def _array(value: Any) -> Any:
    """Convert a numpy scalar to its value, and an array to a dict with its type, shape and items."""
    if not getattr(value, "shape", ()):
        plain = value.tolist()
        return str(value) if hasattr(plain, "dtype") else readable(plain)
    return {
        "<type>": "ndarray",
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "items": readable(value.tolist()) if value.size else [],  # tolist() would make a list per empty row
    }


def to_json(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """Return a readable value as JSON. Characters that could steer a terminal are escaped as JSON allows."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    return _UNSAFE_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(text: str) -> str:
    """Return text as one line that cannot steer a terminal."""
    return _UNSAFE_TEXT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
