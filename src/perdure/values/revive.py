"""Reading tags: from parsed JSON back to the values that `tagged` wrote.

The text may come from anybody. So every tag's content is checked for its exact shape, nothing in it is ever
called or imported as such (classes come from the `Codec`), nothing is allocated by a size that the text
only claims, and whatever else goes wrong is turned into Undecodable in `codec.decode`. Strings that hold a
tag's text are strings.

In raw form classes become dicts, `{"<type>": "app.Plan", "title": …}` (with "<version>" if it is not 1, and
"<value>" for what `dump` made if that is not a dict), and a set or dict that has such members becomes
`{"<type>": "set", "items": […]}`, since dicts cannot be hashed. Built-in types stay what they are. No code
of any class runs.
"""

from __future__ import annotations

import re
import struct
from binascii import a2b_base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from itertools import chain, compress
from math import isnan
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from perdure.errors import Undecodable, UnknownType
from perdure.values import arrays, messages
from perdure.values.limits import DEPTH_MAX
from perdure.values.plain import CONTAINERS, may_be_tagged
from perdure.values.registry import Codec
from perdure.values.tagged import FACTORIES

_HEX = re.compile(r"-?0x[0-9a-f]+")
_ESCAPE = re.compile(r"\\(?:\\|u(d[89a-f][0-9a-f]{2})|)")
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_FLOATS: Final = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_PATHS: Final[dict[str, type[PurePath]]] = {"path": Path, "posix": PurePosixPath, "windows": PureWindowsPath}


class Reviver:
    """One pass over one parsed text; it changes the parsed tree in place."""

    def __init__(self, codec: Codec, *, raw: bool) -> None:
        self.codec = codec
        self.raw = raw

    def revive(self, node: Any, depth: int = 0) -> Any:
        """The value of a parsed node, its tags read."""
        kind = type(node)
        if kind not in CONTAINERS:
            return node
        if depth > DEPTH_MAX:
            raise Undecodable(f"stored text is nested more than {DEPTH_MAX} levels deep")
        if kind is list:
            return self._list(node, depth)
        if len(node) == 1:
            [(key, content)] = node.items()
            if key.startswith("^"):
                return self._tag(key, content, depth)
        self.values(node, depth + 1)
        return node

    def _list(self, node: list[Any], depth: int) -> list[Any]:
        kinds = set(map(type, node))
        if kinds.isdisjoint(CONTAINERS):
            return node
        if kinds == {dict}:
            sizes = set(map(len, node))
            if (1 not in sizes and _flat(node)) or (sizes == {1} and self._messages(node, depth)):
                return node
        for at, item in enumerate(node):
            if type(item) in CONTAINERS:
                node[at] = self.revive(item, depth + 1)
        return node

    def _messages(self, node: list[Any], depth: int) -> bool:
        """Whether this was a list of nothing but LangChain's messages; then it is read, all of them at once."""
        tags: list[str] = list(chain.from_iterable(node))
        kinds = set(tags)
        if self.raw or depth + 3 > DEPTH_MAX or not kinds <= messages.NAMES.keys():
            return False
        shapes = {tag: self.codec.entry_tagged(tag).message for tag in kinds}
        known = {tag: shape for tag, shape in shapes.items() if shape is not None}
        bodies: list[Any] = list(chain.from_iterable(map(dict.values, node)))
        if len(known) < len(kinds) or set(map(type, bodies)) != {dict}:
            return False
        if _may_be_tagged(bodies, depth + 3):
            for body in bodies:
                self.values(body, depth + 3)
        node.clear()
        node.extend(messages.make_all(tags, bodies, known))
        return True

    def values(self, node: dict[str, Any], depth: int) -> None:
        """Read the tags in the values of a dict, which is none itself."""
        for key, item in node.items():
            if type(item) in CONTAINERS:
                node[key] = self.revive(item, depth)  # only values change, so the iteration stays valid

    def _tag(self, tag: str, content: Any, depth: int) -> Any:
        reader = _READERS.get(tag)
        if reader is None:
            if tag not in messages.NAMES:
                raise Undecodable(f"stored text has the tag {tag[:50]!r}, which this version of Perdure does not know")
            reader = partial(_message, tag)
        try:
            return reader(self, content, depth + 1)
        except (Undecodable, UnknownType, RecursionError, MemoryError):
            raise
        except Exception as problem:
            raise Undecodable(f"stored text has a malformed {tag}: {problem!r}"[:500]) from problem

    def array(self, content: Any, depth: int) -> list[Any]:
        _need(type(content) is list)
        return self._list(content, depth) if depth <= DEPTH_MAX else self.revive(content, depth)

    def pairs(self, content: Any, depth: int) -> list[tuple[Any, Any]]:
        _need(type(content) is list and all(type(pair) is list and len(pair) == 2 for pair in content))
        return [(self.revive(key, depth + 1), self.revive(item, depth + 1)) for key, item in content]

    def mapping(self, name: str, made: Any, pairs: list[tuple[Any, Any]]) -> Any:
        try:
            for key, item in pairs:
                dict.__setitem__(made, key, item) if type(made) is not OrderedDict else made.__setitem__(key, item)
        except TypeError:
            if self.raw:
                return {"<type>": name, "items": [list(pair) for pair in pairs]}
            raise
        _need(len(made) == len(pairs))
        return made


def _flat(node: list[dict[str, Any]]) -> bool:
    """Whether these dicts hold no containers: a list of messages as dicts, most often."""
    return CONTAINERS.isdisjoint(map(type, chain.from_iterable(map(dict.values, node))))


def _may_be_tagged(bodies: list[dict[str, Any]], depth: int) -> bool:
    """Whether a value in these dicts may have to be read; `depth` is that of the values."""
    held = list(chain.from_iterable(map(dict.values, bodies)))
    if CONTAINERS.isdisjoint(map(type, held)):
        return False
    return may_be_tagged(list(compress(held, map(CONTAINERS.__contains__, map(type, held)))), DEPTH_MAX - depth)


def _need(condition: bool) -> None:
    if not condition:
        raise ValueError("its content has the wrong shape")


def _text(content: Any) -> str:
    _need(type(content) is str)
    return str(content)


def _bytes(content: Any) -> bytes:
    return a2b_base64(_text(content), strict_mode=True)


def _set(run: Reviver, content: Any, depth: int, kind: type) -> Any:
    items = run.array(content, depth)
    try:
        made = kind(items)
    except TypeError:
        if run.raw:
            return {"<type>": kind.__name__, "items": items}
        raise
    _need(len(made) == len(items))
    return made


def _surrogates(run: Reviver, content: Any, depth: int) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        _need(match[0] == "\\\\")
        return "\\"

    return _ESCAPE.sub(replace, _text(content))


def _int(run: Reviver, content: Any, depth: int) -> int:
    _need(_HEX.fullmatch(_text(content)) is not None)
    return int(content, 16)


def _float(run: Reviver, content: Any, depth: int) -> float:
    named = _FLOATS.get(_text(content))
    if named is not None:
        return named
    _need(len(content) == 16)
    [value] = struct.unpack(">d", bytes.fromhex(content))
    _need(isnan(value))
    return float(value)


def _number(run: Reviver, content: Any, depth: int, kind: type) -> Any:
    value = run.revive(content, depth)
    _need(type(value) is kind)
    return value


def _complex(run: Reviver, content: Any, depth: int) -> complex:
    real, imaginary = content
    return complex(_number(run, real, depth, float), _number(run, imaginary, depth, float))


def _range(run: Reviver, content: Any, depth: int) -> range:
    _need(type(content) is list and len(content) == 3)
    return range(*[_number(run, item, depth, int) for item in content])


def _span(content: Any) -> timedelta:
    _need(type(content) is list and len(content) == 3 and all(type(item) is int for item in content))
    days, seconds, microseconds = content
    return timedelta(days, seconds, microseconds)


def _timezone(run: Reviver, content: Any, depth: int) -> timezone:
    if content == "utc":
        return UTC
    offset, name = content
    if name is None:
        return timezone(_span(offset))
    return timezone(_span(offset), _number(run, name, depth, str))


def _zone(run: Reviver, content: Any, depth: int) -> ZoneInfo:
    # The key becomes a file name below the time zone directories; nothing else may.
    _need(_ZONE.fullmatch(_text(content)) is not None)
    try:
        return ZoneInfo(content)
    except ZoneInfoNotFoundError as problem:
        raise Undecodable(
            f"the time zone {content[:50]!r} is not known on this machine: pip install tzdata"
        ) from problem


def _moment(run: Reviver, content: Any, depth: int, kind: type[datetime] | type[time]) -> Any:
    if type(content) is str:
        value = kind.fromisoformat(content.removesuffix("Z"))
        zone: tzinfo | None = UTC if content.endswith("Z") else None
        fold = 0
    else:
        text, lowered, fold = content
        value = kind.fromisoformat(_text(text))
        zone = run.revive(lowered, depth)
        _need((zone is None or isinstance(zone, (timezone, ZoneInfo))) and type(fold) is int and fold in (0, 1))
    _need(value.tzinfo is None)
    return value.replace(tzinfo=zone, fold=fold)


def _decimal(run: Reviver, content: Any, depth: int) -> Decimal:
    value = Decimal(_text(content))
    _need(not value.is_nan() or "nan" in content.lower())  # where the context does not raise, garbage gives NaN
    return value


def _path(run: Reviver, content: Any, depth: int) -> PurePath:
    kind, text = content
    return _PATHS[_text(kind)](_number(run, text, depth, str))


def _deque(run: Reviver, content: Any, depth: int) -> deque[Any]:
    items, size_max = content
    _need(size_max is None or (type(size_max) is int and size_max >= len(items)))
    return deque(run.array(items, depth + 1), size_max)


def _defaultdict(run: Reviver, content: Any, depth: int) -> Any:
    name, pairs = content
    factory = None if name is None else FACTORIES[_text(name)]
    return run.mapping("defaultdict", defaultdict(factory), run.pairs(pairs, depth + 1))


def _unset(run: Reviver, content: Any, depth: int) -> Any:
    _need(content is None)
    return msgspec.UNSET


def _numpy(tag: str) -> Callable[[Reviver, Any, int], Any]:
    def read(run: Reviver, content: Any, depth: int) -> Any:
        try:
            return arrays.load(tag, content)
        except UnknownType:
            if run.raw:
                return {"<type>": "numpy", "<value>": content}
            raise

    return read


def _object(run: Reviver, content: Any, depth: int) -> Any:
    _need(type(content) is list and len(content) in (3, 4))
    name, version = _text(content[0]), content[1]
    _need(type(version) is int and version >= 1)
    entry = None if run.raw else run.codec.entry_named(name)
    body = run.revive(content[2], depth + 1)
    extras = run.revive(content[3], depth + 1) if len(content) == 4 else None
    _need(extras is None or type(extras) is dict)
    if entry is None:
        return _readable(name, version, body, extras)
    return entry.rebuild(version, body, extras)


def _message(tag: str, run: Reviver, content: Any, depth: int) -> Any:
    _need(type(content) is dict)
    entry = None if run.raw else run.codec.entry_tagged(tag)
    run.values(content, depth + 1)
    if entry is not None and entry.message is not None:
        return entry.message.reader((*content,))(content)
    extras = {name[1:]: content.pop(name) for name in (messages.SET, messages.EXTRA) if name in content}
    if entry is None:
        return _readable(messages.NAMES[tag], 1, content, extras)
    return entry.rebuild(1, content, extras)


def _readable(name: str, version: int, body: Any, extras: dict[str, Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {"<type>": name}
    if version != 1:
        made["<version>"] = version
    if type(body) is not dict:
        return made | {"<value>": body}
    extra = (extras or {}).get("extra")
    return made | body | (extra if type(extra) is dict else {})


_READERS: Final[dict[str, Callable[[Reviver, Any, int], Any]]] = {
    "^tuple": lambda run, content, depth: tuple(run.array(content, depth)),
    "^set": lambda run, content, depth: _set(run, content, depth, set),
    "^frozenset": lambda run, content, depth: _set(run, content, depth, frozenset),
    "^dict": lambda run, content, depth: run.mapping("dict", {}, run.pairs(content, depth)),
    "^odict": lambda run, content, depth: run.mapping("OrderedDict", OrderedDict(), run.pairs(content, depth)),
    "^counter": lambda run, content, depth: run.mapping("Counter", Counter(), run.pairs(content, depth)),
    "^defaultdict": _defaultdict,
    "^deque": _deque,
    "^s": _surrogates,
    "^int": _int,
    "^f": _float,
    "^complex": _complex,
    "^range": _range,
    "^bytes": lambda run, content, depth: _bytes(content),
    "^bytearray": lambda run, content, depth: bytearray(_bytes(content)),
    "^datetime": lambda run, content, depth: _moment(run, content, depth, datetime),
    "^time": lambda run, content, depth: _moment(run, content, depth, time),
    "^date": lambda run, content, depth: date.fromisoformat(_text(content)),
    "^timedelta": lambda run, content, depth: _span(content),
    "^tz": _timezone,
    "^zone": _zone,
    "^decimal": _decimal,
    "^uuid": lambda run, content, depth: UUID(_text(content)),
    "^path": _path,
    "^unset": _unset,
    "^obj": _object,
    "^ndarray": _numpy("^ndarray"),
    "^npscalar": _numpy("^npscalar"),
    "^npstr": _numpy("^npstr"),
    "^npbytes": _numpy("^npbytes"),
}
