"""The built-in types that JSON cannot hold as they are: for each, how its tag is written and how it is read.

Stored text is not trusted: reading a tag checks that its content has exactly the right shape.
"""

from __future__ import annotations

import re
import struct
from binascii import a2b_base64, b2a_base64
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from math import isfinite, isnan
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import orjson

from perdure.errors import Undecodable
from perdure.values.plain import ATOMS, OPTIONS, has_surrogates, is_plain_dict
from perdure.values.registry import default_name
from perdure.values.unstorable import Trail, refuse

if TYPE_CHECKING:
    from perdure.values.revive import Reviver
    from perdure.values.tagged import Lowering

_HEX = re.compile(r"-?0x[0-9a-f]+")
_ESCAPE = re.compile(r"\\(?:\\|u(d[89a-f][0-9a-f]{2})|)")
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_FLOATS: Final = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_PATHS: Final[dict[str, type[PurePath]]] = {"path": Path, "posix": PurePosixPath, "windows": PureWindowsPath}
_NAN_BITS: Final = struct.pack(">d", float("nan"))
# Every container down to this level is tried as plain text as a whole. Below it, only containers without containers are
# tried: otherwise the deepest part would be walked once per level.
WHOLE_MAX: Final = 3


def need(condition: bool) -> None:
    if not condition:
        raise ValueError("its content has the wrong shape")


def text_of_tag(content: Any) -> str:
    need(type(content) is str)
    return str(content)


def _read_exactly(run: Reviver, content: Any, depth: int, kind: type) -> Any:
    value = run.revive(content, depth)
    need(type(value) is kind)
    return value


def _write_str(run: Lowering, value: str, depth: int, trail: Trail) -> Any:
    if value.isascii() or not has_surrogates(value):
        return value
    # Readable, and a change stays local: only the surrogates and the backslashes are escaped.
    return {"^s": value.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode()}


def _read_str(run: Reviver, content: Any, depth: int) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        need(match[0] == "\\\\")
        return "\\"

    return _ESCAPE.sub(replace, text_of_tag(content))


def _write_int(run: Lowering, value: int, depth: int, trail: Trail) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return {"^int": hex(value)}  # decimal takes quadratic time, and Python limits its digits


def _read_int(run: Reviver, content: Any, depth: int) -> int:
    need(_HEX.fullmatch(text_of_tag(content)) is not None)
    return int(content, 16)


def _write_float(run: Lowering, value: float, depth: int, trail: Trail) -> Any:
    if isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"^f": bits.hex() if isnan(value) and bits != _NAN_BITS else repr(value)}


def _read_float(run: Reviver, content: Any, depth: int) -> float:
    named = _FLOATS.get(text_of_tag(content))
    if named is not None:
        return named
    need(len(content) == 16)
    [value] = struct.unpack(">d", bytes.fromhex(content))
    need(isnan(value))
    return float(value)


def _write_bytes(value: bytes | bytearray) -> str:
    return b2a_base64(value, newline=False).decode("ascii")


def _read_bytes(content: Any) -> bytes:
    return a2b_base64(text_of_tag(content), strict_mode=True)


def _write_dict(run: Lowering, value: dict[Any, Any], depth: int, trail: Trail) -> Any:
    if depth <= WHOLE_MAX or ATOMS.issuperset(map(type, value.values())):
        text = run.whole(value, depth)
        if text is not None:
            return text
    if not is_plain_dict(value):
        return {"^dict": run.pairs(value, depth + 1, trail)}
    run.enter(value, depth + 1, trail)
    lowered = {key: run.lower(item, depth + 1, (trail, "item", key)) for key, item in value.items()}
    run.leave(value)
    return lowered


def _write_set(run: Lowering, values: Iterable[Any], depth: int, trail: Trail) -> list[orjson.Fragment]:
    run.enter(values, depth + 1, trail)
    # In the order of their texts: a set has none, and equal states must have equal texts.
    texts = sorted(
        orjson.dumps(run.lower(item, depth + 1, (trail, "member", item)), option=OPTIONS) for item in list(values)
    )
    run.leave(values)
    return [orjson.Fragment(text) for text in texts]


def _read_set(run: Reviver, content: Any, depth: int, kind: type) -> Any:
    items = run.array(content, depth)
    try:
        elements = kind(items)
    except TypeError:
        if run.raw:
            return {"<type>": kind.__name__, "items": items}
        raise
    need(len(elements) == len(items))
    return elements


def _write_timedelta(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _read_timedelta(content: Any) -> timedelta:
    need(type(content) is list and len(content) == 3 and all(type(item) is int for item in content))
    days, seconds, microseconds = content
    return timedelta(days, seconds, microseconds)


def _write_timezone(run: Lowering, value: timezone, depth: int, trail: Trail) -> Any:
    if value is UTC:
        return {"^tz": "utc"}
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return {"^tz": [_write_timedelta(offset), _write_str(run, name[0], depth, trail) if name else None]}


def _read_timezone(run: Reviver, content: Any, depth: int) -> timezone:
    if content == "utc":
        return UTC
    offset, name = content
    if name is None:
        return timezone(_read_timedelta(offset))
    return timezone(_read_timedelta(offset), _read_exactly(run, name, depth, str))


def _write_zone(run: Lowering, value: ZoneInfo, depth: int, trail: Trail) -> Any:
    if value.key is None:
        refuse("it is a ZoneInfo without a key; make it with ZoneInfo(name)", trail)
    return {"^zone": value.key}


def _read_zone(run: Reviver, content: Any, depth: int) -> ZoneInfo:
    # The key becomes a file name below the time zone directories; nothing else may.
    need(_ZONE.fullmatch(text_of_tag(content)) is not None)
    try:
        return ZoneInfo(content)
    except ZoneInfoNotFoundError as problem:
        raise Undecodable(
            f"the time zone {content[:50]!r} is not known on this machine: pip install tzdata"
        ) from problem


def _write_moment(run: Lowering, value: datetime | time, trail: Trail) -> Any:
    text = value.replace(tzinfo=None, fold=0).isoformat()
    if value.tzinfo is None and not value.fold:
        return text
    if value.tzinfo is UTC and not value.fold:
        return text + "Z"
    zone = value.tzinfo
    if zone is not None and type(zone) not in (timezone, ZoneInfo):
        refuse(
            f"its time zone is a {default_name(type(zone))}; use datetime.timezone or zoneinfo.ZoneInfo",
            trail,
        )
    return [text, None if zone is None else run.lower(zone, 0, trail), value.fold]


def _read_moment(run: Reviver, content: Any, depth: int, kind: type[datetime] | type[time]) -> Any:
    if type(content) is str:
        value = kind.fromisoformat(content.removesuffix("Z"))
        zone: tzinfo | None = UTC if content.endswith("Z") else None
        fold = 0
    else:
        text, lowered, fold = content
        value = kind.fromisoformat(text_of_tag(text))
        zone = run.revive(lowered, depth)
        need((zone is None or isinstance(zone, (timezone, ZoneInfo))) and type(fold) is int and fold in (0, 1))
    need(value.tzinfo is None)
    return value.replace(tzinfo=zone, fold=fold)


def _read_decimal(run: Reviver, content: Any, depth: int) -> Decimal:
    value = Decimal(text_of_tag(content))
    need(not value.is_nan() or "nan" in content.lower())  # a context that does not raise turns garbage into NaN
    return value


def _read_path(run: Reviver, content: Any, depth: int) -> PurePath:
    kind, text = content
    return _PATHS[text_of_tag(kind)](_read_exactly(run, text, depth, str))


def _read_unset(run: Reviver, content: Any, depth: int) -> Any:
    need(content is None)
    return msgspec.UNSET


class EncodedText(msgspec.Struct, frozen=True):
    """The text of an encoded value, which becomes a part of another text unchanged."""

    text: bytes


def _write_encoded(run: Lowering, value: EncodedText, depth: int, trail: Trail) -> Any:
    run.count_bytes(value.text)
    return orjson.Fragment(value.text)


Writer = Callable[["Lowering", Any, int, Trail], Any]
Reader = Callable[["Reviver", Any, int], Any]

# By exact type: a subclass has no writer here.
WRITERS: Final[dict[type, Writer]] = {
    type(None): lambda run, value, depth, trail: None,
    bool: lambda run, value, depth, trail: value,
    int: _write_int,
    float: _write_float,
    str: _write_str,
    list: lambda run, value, depth, trail: run.items(value, value, depth, trail),
    dict: _write_dict,
    tuple: lambda run, value, depth, trail: {"^tuple": run.items(value, list(value), depth + 1, trail)},
    set: lambda run, value, depth, trail: {"^set": _write_set(run, value, depth + 1, trail)},
    frozenset: lambda run, value, depth, trail: {"^frozenset": _write_set(run, value, depth + 1, trail)},
    bytes: lambda run, value, depth, trail: {"^bytes": _write_bytes(value)},
    bytearray: lambda run, value, depth, trail: {"^bytearray": _write_bytes(value)},
    datetime: lambda run, value, depth, trail: {"^datetime": _write_moment(run, value, trail)},
    time: lambda run, value, depth, trail: {"^time": _write_moment(run, value, trail)},
    date: lambda run, value, depth, trail: {"^date": value.isoformat()},
    timedelta: lambda run, value, depth, trail: {"^timedelta": _write_timedelta(value)},
    timezone: _write_timezone,
    ZoneInfo: _write_zone,
    Decimal: lambda run, value, depth, trail: {"^decimal": str(value)},
    UUID: lambda run, value, depth, trail: {"^uuid": str(value)},
    PurePosixPath: lambda run, value, depth, trail: {"^path": ["posix", _write_str(run, str(value), depth, trail)]},
    PureWindowsPath: lambda run, value, depth, trail: {"^path": ["windows", _write_str(run, str(value), depth, trail)]},
    # The class behind `Path` depends on the system.
    type(Path()): lambda run, value, depth, trail: {"^path": ["path", _write_str(run, str(value), depth, trail)]},
    OrderedDict: lambda run, value, depth, trail: {"^odict": run.pairs(value, depth + 1, trail)},
    EncodedText: _write_encoded,
}
READERS: Final[dict[str, Reader]] = {
    "^s": _read_str,
    "^int": _read_int,
    "^f": _read_float,
    "^dict": lambda run, content, depth: run.mapping("dict", {}, run.pairs(content, depth)),
    "^tuple": lambda run, content, depth: tuple(run.array(content, depth)),
    "^set": lambda run, content, depth: _read_set(run, content, depth, set),
    "^frozenset": lambda run, content, depth: _read_set(run, content, depth, frozenset),
    "^bytes": lambda run, content, depth: _read_bytes(content),
    "^bytearray": lambda run, content, depth: bytearray(_read_bytes(content)),
    "^datetime": lambda run, content, depth: _read_moment(run, content, depth, datetime),
    "^time": lambda run, content, depth: _read_moment(run, content, depth, time),
    "^date": lambda run, content, depth: date.fromisoformat(text_of_tag(content)),
    "^timedelta": lambda run, content, depth: _read_timedelta(content),
    "^tz": _read_timezone,
    "^zone": _read_zone,
    "^decimal": _read_decimal,
    "^uuid": lambda run, content, depth: UUID(text_of_tag(content)),
    "^path": _read_path,
    "^odict": lambda run, content, depth: run.mapping("OrderedDict", OrderedDict(), run.pairs(content, depth)),
    "^unset": _read_unset,
}
