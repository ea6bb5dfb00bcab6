"""The tagged encoder: values that JSON cannot hold as they are.

A tag is an object with exactly one key, which starts with "^": `{"^tuple":[1,2]}`. A dict that looks like
one is itself written with a tag (`^dict`), so the two cannot be confused. Values are *lowered* into a tree
that JSON can hold; plain parts of it become finished text on the way, at the speed of `plain`. The tags are
read in `revive`.

Nothing may be lost here in silence: what cannot be kept exactly is Unstorable, with its path and the fix.
Shared references are the exception: a list that occurs twice comes back as two equal lists.
"""

from __future__ import annotations

import struct
from binascii import b2a_base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import chain
from math import isfinite, isnan
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import CoroutineType
from typing import Any, Final, NoReturn
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import orjson

from perdure.errors import Unstorable
from perdure.values import arrays
from perdure.values.limits import DEPTH_MAX, NODES_MAX, SIZE_MAX
from perdure.values.messages import EXTRA, Shape, text_of
from perdure.values.plain import (
    ATOMS,
    CONTAINERS,
    OPTIONS,
    PLAIN,
    TooMany,
    has_caret_key,
    has_surrogates,
    is_plain,
    is_plain_dict,
    plain_text,
)
from perdure.values.registry import Codec, Entry, default_name
from perdure.values.sorts import CannotTake
from perdure.values.still import Moving, still

# A path is a chain, the innermost part first: (outer, kind of part, key). It is rendered only for an error.
Trail = tuple[Any, str, object] | None

FACTORIES: Final[dict[str, type]] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)
}
# The class behind `Path` differs by system, and with it what can be made here.
_PATH: Final = type(Path())
_NAN_BITS: Final = struct.pack(">d", float("nan"))

# Down to this level every container is tried as plain text as a whole. Below it only those without containers
# in them are, because trying at each level would walk the deepest part as many times as it is deep.
_WHOLE_MAX: Final = 3

# So many values are looked at to say where a value that has too many holds itself.
_HUNT_MAX: Final = 100_000

# So many messages are written at once: enough to be fast, and few enough that one which is not plain costs little.
_BATCH: Final = 128


def lower_to_text(value: object, codec: Codec, *, moving: bool = False) -> bytes:
    """The text of any storable value. `moving`: other threads may be changing it."""
    try:
        text = orjson.dumps(_lowered(value, codec, moving), option=OPTIONS)
    except RecursionError:
        _refuse("it is nested too deeply for this thread's stack; flatten it", None)
    if len(text) > SIZE_MAX:
        _refuse(f"its text has {len(text):,} bytes, and the limit is {SIZE_MAX:,}; keep large data elsewhere", None)
    return text


def _lowered(value: object, codec: Codec, moving: bool) -> Any:
    try:
        return Lowering(codec, moving=moving).lower(value, 0, None)
    except TooMany:
        # The usual cause is a value that holds itself. Going down one by one meets it soon, with its path.
        Lowering(codec, hunting=True).lower(value, 0, None)
        raise AssertionError("a value with too many parts has too few") from None


class Lowering:
    """One pass over one value. `depth` is the number of levels of text around the value at hand."""

    def __init__(self, codec: Codec, *, hunting: bool = False, moving: bool = False) -> None:
        self.codec = codec
        self.moving = moving  # other threads may be changing it: each part is copied before it is looked at
        self.hunting = hunting  # for a value that holds itself; the result is not used
        self.nodes_max = _HUNT_MAX if hunting else NODES_MAX
        self.active: set[int] = set()  # the containers around the value at hand, to find one that holds itself
        self.nodes = 0
        self.size_bytes = 0

    def lower(self, value: Any, depth: int, trail: Trail) -> Any:
        """The value as a tree that the fast encoder writes as it is."""
        self.count_nodes(1, trail)
        handler = _HANDLERS.get(type(value))
        if handler is not None:
            return handler(self, value, depth, trail)
        return self._other(value, depth, trail)

    def whole(self, value: Any, depth: int) -> orjson.Fragment | None:
        """The finished text of a plain value; None if a part of it needs a tag."""
        try:
            text = None if self.hunting else plain_text(self.still(value), DEPTH_MAX - depth)
        except Moving:
            text = None
        if text is None:
            return None
        self.count_bytes(text)
        return orjson.Fragment(text)

    def still(self, value: Any) -> Any:
        """The value, or a copy that no other thread changes. Raises Moving."""
        return still(value) if self.moving else value

    def count_nodes(self, count: int, trail: Trail) -> None:
        self.nodes += count
        if self.nodes > self.nodes_max:
            _refuse(f"it holds more than {NODES_MAX:,} values; keep large data in numpy arrays", trail)

    def count_bytes(self, text: bytes) -> None:
        self.size_bytes += len(text)
        if self.size_bytes > SIZE_MAX:
            _refuse(f"its text is larger than {SIZE_MAX:,} bytes; keep large data elsewhere", None)

    def enter(self, value: object, depth: int, trail: Trail) -> None:
        if id(value) in self.active:
            _refuse("it refers to itself; break the circle, or keep ids instead of references", trail)
        if depth > DEPTH_MAX:
            _refuse(f"it is nested more than {DEPTH_MAX} levels deep; flatten it", trail)
        self.active.add(id(value))

    def leave(self, value: object) -> None:
        self.active.discard(id(value))

    def items(self, value: Any, values: list[Any], depth: int, trail: Trail) -> Any:
        """A JSON array of the values; `value` is the container they are from."""
        kinds = set(map(type, values))
        text = None
        if kinds <= PLAIN:
            if depth <= _WHOLE_MAX or kinds <= ATOMS:
                text = self.whole(values, depth)
        elif not self.hunting and kinds.isdisjoint(_HANDLERS):
            entries = {kind: self.codec.entry_of(kind) for kind in kinds}
            shapes = {kind: entry.message for kind, entry in entries.items() if entry and entry.message}
            if len(shapes) == len(kinds):
                text = self.messages(value, values, shapes, depth, trail)
            elif depth <= _WHOLE_MAX and not shapes:
                text = self.objects(values, entries, depth)
        if text is not None:
            return text
        self.enter(value, depth + 1, trail)
        lowered = [self.lower(item, depth + 1, (trail, "item", at)) for at, item in enumerate(values)]
        self.leave(value)
        return lowered

    def messages(
        self, value: Any, values: list[Any], shapes: dict[type, Shape], depth: int, trail: Trail
    ) -> orjson.Fragment:
        """The finished text of a list of LangChain's messages.

        A message with a value that is not plain slows down those around it, not the whole list.
        """
        self.enter(value, depth + 1, trail)
        room = DEPTH_MAX - depth - 4
        texts: list[bytes] = []
        for start in range(0, len(values), _BATCH):
            batch = values[start : start + _BATCH]
            try:
                text = text_of(batch, shapes, room, self.still) if room >= 0 else None
            except TooMany:
                raise
            except Exception:
                text = None  # something is wrong with a message; one by one it is named
            if text is None:
                lowered = [self.lower(item, depth + 1, (trail, "item", at)) for at, item in enumerate(batch, start)]
                text = orjson.dumps(lowered, option=OPTIONS)
            else:
                self.count_nodes(len(batch), trail)
                self.count_bytes(text)
            texts.append(text[1:-1])
        self.leave(value)
        return orjson.Fragment(b"".join((b"[", b",".join(texts), b"]")))

    def objects(self, values: list[Any], entries: dict[type, Entry | None], depth: int) -> orjson.Fragment | None:
        """The finished text of a list of objects whose fields are plain.

        All their fields are walked at once, which is several times faster than each object by itself. None if
        that does not do, for whatever reason; the way one by one then finds the reason, and its path.
        """
        lowered: list[Any] = []
        for item in values:
            entry = entries.get(type(item))
            if entry is None:
                return None
            try:
                body, extras = entry.sort.take(item)
            except Exception:
                return None
            content = [entry.name, entry.version, body]
            lowered.append({"^obj": content if extras is None else [*content, extras]})
        try:
            lowered = self.still(lowered)
        except Moving:
            return None
        walked = list(chain.from_iterable(one["^obj"][2:] for one in lowered))
        room = DEPTH_MAX - depth - 4
        if room < 0 or not is_plain(walked, room) or has_caret_key(walked, room):
            return None
        try:
            text = orjson.dumps(lowered, option=OPTIONS)
        except TypeError:
            return None
        self.count_bytes(text)
        return orjson.Fragment(text)

    def pairs(self, value: Any, depth: int, trail: Trail) -> list[Any]:
        """A JSON array of [key, value], for dicts that JSON has no form for."""
        self.enter(value, depth + 2, trail)
        lowered = [
            [
                self.lower(key, depth + 2, (trail, "key", key)),
                self.lower(item, depth + 2, (trail, "item", key)),
            ]
            for key, item in list(value.items())
        ]
        self.leave(value)
        return lowered

    def _other(self, value: Any, depth: int, trail: Trail) -> Any:
        entry = self.codec.entry_of(type(value))
        if entry is not None:
            return self._message(value, entry, depth, trail) or self._object(value, entry, depth, trail)
        if arrays.is_numpy(value):
            try:
                tag, content = arrays.dump(value)
            except arrays.Unfit as problem:
                _refuse(str(problem), trail)
            return {tag: content}
        if type(value) is _PATH:
            return {"^path": ["path", self.lower(str(value), depth, trail)]}
        if value is msgspec.UNSET:
            return {"^unset": None}
        return _refuse_type(type(value), trail)

    def _message(self, value: Any, entry: Entry, depth: int, trail: Trail) -> Any:
        """A LangChain message as its own tag; None if it is none, or not one as its class makes them."""
        shape = entry.message
        try:
            body = None if shape is None else shape.take(value)
        except Exception:
            body = None  # whatever is wrong with it, the general way names it
        if shape is None or body is None:
            return None
        self.enter(value, depth + 2, trail)
        lowered: dict[str, Any] = {}
        for name, item in body.items():
            if name == EXTRA and is_plain_dict(item):
                lowered[name] = {
                    key: self.lower(part, depth + 3, (trail, "attribute", key)) for key, part in item.items()
                }
            else:
                text = self.whole(item, depth + 2) if type(item) in CONTAINERS and item else None
                lowered[name] = text or self.lower(item, depth + 2, (trail, "attribute", name))
        self.leave(value)
        return {shape.tag: lowered}

    def _object(self, value: Any, entry: Entry, depth: int, trail: Trail) -> Any:
        self.enter(value, depth + 3, trail)
        try:
            body, extras = entry.sort.take(value)
        except CannotTake as problem:
            _refuse(f"{default_name(type(value))}: {problem}", trail)
        except Exception as problem:
            raise _unstorable(f"{default_name(type(value))} could not be taken apart: {problem!r}", trail) from problem
        if type(body) is dict and is_plain_dict(body):
            lowered = self.whole(body, depth + 2) or {
                name: self.lower(item, depth + 3, (trail, "attribute", name)) for name, item in body.items()
            }
        else:
            lowered = self.lower(body, depth + 2, trail)
        content = [entry.name, entry.version, lowered]
        if extras is not None:
            content.append(
                {name: self.lower(item, depth + 3, (trail, "attribute", name)) for name, item in extras.items()}
            )
        self.leave(value)
        return {"^obj": content}


def _str(run: Lowering, value: str, depth: int, trail: Trail) -> Any:
    if value.isascii() or not has_surrogates(value):
        return value
    # Readable, and a change stays local: only the surrogates and the backslashes are escaped.
    return {"^s": value.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode()}


def _int(run: Lowering, value: int, depth: int, trail: Trail) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return {"^int": hex(value)}  # decimal takes quadratic time, and Python limits its digits


def _float(run: Lowering, value: float, depth: int, trail: Trail) -> Any:
    if isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"^f": bits.hex() if isnan(value) and bits != _NAN_BITS else repr(value)}


def _dict(run: Lowering, given: dict[Any, Any], depth: int, trail: Trail) -> Any:
    value = given.copy() if run.moving else given
    if depth <= _WHOLE_MAX or ATOMS.issuperset(map(type, value.values())):
        text = run.whole(value, depth)
        if text is not None:
            return text
    if not is_plain_dict(value):
        return {"^dict": run.pairs(given, depth + 1, trail)}
    run.enter(given, depth + 1, trail)
    lowered = {key: run.lower(item, depth + 1, (trail, "item", key)) for key, item in value.items()}
    run.leave(given)
    return lowered


def _set(run: Lowering, values: Iterable[Any], depth: int, trail: Trail) -> list[orjson.Fragment]:
    run.enter(values, depth + 1, trail)
    # In the order of their texts: a set has none, and equal states must have equal texts.
    texts = sorted(
        orjson.dumps(run.lower(item, depth + 1, (trail, "member", item)), option=OPTIONS) for item in list(values)
    )
    run.leave(values)
    return [orjson.Fragment(text) for text in texts]


def _defaultdict(run: Lowering, value: defaultdict[Any, Any], depth: int, trail: Trail) -> Any:
    factory: Any = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        _refuse(
            f"it is a defaultdict with a default factory of its own; use one of {', '.join(FACTORIES)}, or a dict",
            trail,
        )
    return {"^defaultdict": [name, run.pairs(value, depth + 2, trail)]}


def _timezone(run: Lowering, value: timezone, depth: int, trail: Trail) -> Any:
    if value is UTC:
        return {"^tz": "utc"}
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return {"^tz": [_span(offset), _str(run, name[0], depth, trail) if name else None]}


def _zone(run: Lowering, value: ZoneInfo, depth: int, trail: Trail) -> Any:
    if value.key is None:
        _refuse("it is a ZoneInfo without a key; make it with ZoneInfo(name)", trail)
    return {"^zone": value.key}


def _moment(run: Lowering, value: datetime | time, trail: Trail) -> Any:
    text = value.replace(tzinfo=None, fold=0).isoformat()
    if value.tzinfo is None and not value.fold:
        return text
    if value.tzinfo is UTC and not value.fold:
        return text + "Z"
    zone = value.tzinfo
    if zone is not None and type(zone) not in (timezone, ZoneInfo):
        _refuse(
            f"its time zone is a {default_name(type(zone))}; use datetime.timezone or zoneinfo.ZoneInfo",
            trail,
        )
    return [text, None if zone is None else run.lower(zone, 0, trail), value.fold]


def _span(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _base64(value: bytes | bytearray) -> str:
    return b2a_base64(value, newline=False).decode("ascii")


def _range(run: Lowering, value: range, depth: int, trail: Trail) -> Any:
    return {"^range": [_int(run, number, depth, trail) for number in (value.start, value.stop, value.step)]}


def _complex(run: Lowering, value: complex, depth: int, trail: Trail) -> Any:
    return {"^complex": [_float(run, value.real, depth, trail), _float(run, value.imag, depth, trail)]}


def _deque(run: Lowering, value: deque[Any], depth: int, trail: Trail) -> Any:
    return {"^deque": [run.items(value, list(value), depth + 2, trail), value.maxlen]}


_Handler = Callable[[Lowering, Any, int, Trail], Any]

# By exact type: a subclass is another type, and has no handler.
_HANDLERS: Final[dict[type, _Handler]] = {
    type(None): lambda run, value, depth, trail: None,
    bool: lambda run, value, depth, trail: value,
    int: _int,
    float: _float,
    str: _str,
    list: lambda run, value, depth, trail: run.items(value, list(value) if run.moving else value, depth, trail),
    dict: _dict,
    tuple: lambda run, value, depth, trail: {"^tuple": run.items(value, list(value), depth + 1, trail)},
    set: lambda run, value, depth, trail: {"^set": _set(run, value, depth + 1, trail)},
    frozenset: lambda run, value, depth, trail: {"^frozenset": _set(run, value, depth + 1, trail)},
    bytes: lambda run, value, depth, trail: {"^bytes": _base64(value)},
    bytearray: lambda run, value, depth, trail: {"^bytearray": _base64(value)},
    complex: _complex,
    range: _range,
    datetime: lambda run, value, depth, trail: {"^datetime": _moment(run, value, trail)},
    time: lambda run, value, depth, trail: {"^time": _moment(run, value, trail)},
    date: lambda run, value, depth, trail: {"^date": value.isoformat()},
    timedelta: lambda run, value, depth, trail: {"^timedelta": _span(value)},
    timezone: _timezone,
    ZoneInfo: _zone,
    Decimal: lambda run, value, depth, trail: {"^decimal": str(value)},
    UUID: lambda run, value, depth, trail: {"^uuid": str(value)},
    PurePosixPath: lambda run, value, depth, trail: {"^path": ["posix", _str(run, str(value), depth, trail)]},
    PureWindowsPath: lambda run, value, depth, trail: {"^path": ["windows", _str(run, str(value), depth, trail)]},
    deque: _deque,
    OrderedDict: lambda run, value, depth, trail: {"^odict": run.pairs(value, depth + 1, trail)},
    Counter: lambda run, value, depth, trail: {"^counter": run.pairs(value, depth + 1, trail)},
    defaultdict: _defaultdict,
}


def render(trail: Trail) -> str:
    """A path as one would write it in Python: `state["plan"][3].callback`."""
    parts: list[str] = []
    while trail is not None:
        trail, kind, key = trail
        if kind == "attribute":
            parts.append(f".{key}")
        elif kind == "item":
            parts.append(f"[{_show(key)}]")
        else:
            parts.append(f".<{kind} {_show(key)}>")
    return "state" + "".join(reversed(parts))


def _show(key: object) -> str:
    # Only built-in types are shown by value: another class's repr may fail, or be long.
    if type(key) is str:
        inner = repr(key)[1:-1].replace('"', '\\"')
        return f'"{inner if len(inner) <= 80 else inner[:80] + "…"}"'
    if type(key) in (bool, float, type(None)) or (type(key) is int and abs(key) < 10**18):
        return repr(key)
    return type(key).__qualname__


def _unstorable(reason: str, trail: Trail) -> Unstorable:
    path = render(trail)
    return Unstorable(f"{path} cannot be saved: {reason}", path=path)


def _refuse(reason: str, trail: Trail) -> NoReturn:
    raise _unstorable(reason, trail)


def _refuse_type(kind: type, trail: Trail) -> NoReturn:
    if kind is CoroutineType:
        _refuse("it is a coroutine: an await is missing where it was made", trail)
    name = default_name(kind)
    if kind.__module__ in ("builtins", "types", "_thread", "threading", "_io", "_asyncio", "weakref"):
        _refuse(f"a {name} is not data; keep what it was made from, and make it again after loading", trail)
    _refuse(
        f"its type {name} is neither registered nor trusted; if it is a dataclass, NamedTuple, "
        f"msgspec Struct, pydantic "
        f"model or Enum, decorate it with @perdure.register or open the store with "
        f'trust=["{name.partition(".")[0]}."]; else perdure.register({kind.__name__}, '
        f"dump=…, load=…)",
        trail,
    )
