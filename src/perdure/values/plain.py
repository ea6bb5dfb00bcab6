"""The fast path: values that JSON can hold as they are.

The fast encoder silently turns tuples into lists, nan into null and Enums into their values. So the types are checked
first, level by level and without Python code per value: 1 MB of messages takes about 75 µs, a recursive function takes
milliseconds. The encoder itself refuses keys that are not text, integers beyond 64 bit and lone surrogates. Values that
are not plain are reported, never converted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import chain, compress, repeat
from math import isfinite
from operator import is_, length_hint
from typing import Any, Final

import msgspec
import orjson

from perdure.values import accelerator
from perdure.values.limits import NODES_MAX

ATOMS: Final = frozenset({type(None), bool, int, float, str})
CONTAINERS: Final = frozenset({list, dict})
PLAIN: Final = ATOMS | CONTAINERS

# The walk knows every type already; these make the encoder refuse instead of convert if a value is changed
# by another thread between the walk and the encoding.
OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS

_SCALARS: Final = frozenset((str, int, bool, type(None)))  # nothing to look into, and never NaN
_SCALAR_LIST: Final = list[str | int | bool | None]
_SMALL: Final = 16
_MANY: Final = 256  # values of a level
# A dict that shares its values with an object (`vars(obj)`) does not show them to the garbage collector.
_HIDES_VALUES: Final = sys.version_info >= (3, 13)

# So many carets are looked at one by one in a text before the keys are looked at instead.
_CARETS_MAX: Final = 64


class TooMany(Exception):
    """More values than the limit: very many, or a structure that holds itself or shares parts without end."""


def _levels(value: object, room: int) -> Iterator[tuple[list[Any], list[type]]]:
    """Yield each level of nested lists and dicts of JSON types, with its types, at most `room` + 1 levels.

    The last level yielded is one whose containers are empty, unless the value is too deep.
    """
    level: list[Any] = [value]
    count = 0
    for _ in range(room + 1):
        types = list(map(type, level))
        yield level, types
        level = _inside(level, types, NODES_MAX - count)
        count += len(level)
        if not level:
            return


def _inside(level: list[Any], types: list[type], room: int) -> list[Any]:
    """Return the values in the containers of a level. Raises TooMany if they are more than `room`."""
    # A text counts with its length: leaving texts out is slower, and most values are far from the limit.
    if _HIDES_VALUES or sum(map(length_hint, level)) > room:
        level = list(compress(level, map(CONTAINERS.__contains__, types)))
        size = sum(map(len, level))
        if size > room:
            raise TooMany
    # A list or a dict refers to its values, and a scalar to nothing. A dict also refers to keys that are not text,
    # which the encoder refuses anyway. This is one call in C; a view of each dict would take four times as long.
    inside = gc.get_referents(*level)
    if _HIDES_VALUES and len(inside) < size:
        inside = [inner for outer in level for inner in (outer.values() if type(outer) is dict else outer)]
    return inside


def is_plain(value: object, room: int) -> bool:
    """Return whether a value holds only JSON types, finite floats, and at most `room` levels of nesting.

    A value with a subclass of a JSON type may pass: the encoder refuses it. Raises TooMany.
    """
    if (speed := accelerator.speed) is not None:
        answer: bool | None = speed.is_plain(value, room, NODES_MAX)
        if answer is None:
            raise TooMany
        return answer
    level: list[Any] = [value]
    count = 0
    for _ in range(room + 1):  # as `_levels`, without a generator: every save comes here
        if _are_scalars(level):
            return True
        types = list(map(type, level))
        kinds = {types[0]} if types.count(types[0]) == len(types) else set(types)
        if not kinds <= PLAIN:
            return False
        if float in kinds and not all(map(isfinite, compress(level, map(is_, types, repeat(float))))):
            return False
        if kinds.isdisjoint(CONTAINERS):
            return True
        level = _inside(level, types, NODES_MAX - count)
        count += len(level)
        if not level:
            return True
    return False  # too deep


def _are_scalars(level: list[Any]) -> bool:
    """Return whether a level holds only text, integers, booleans and None."""
    if len(level) < _MANY:
        return _SCALARS.issuperset(map(type, level))
    try:
        msgspec.convert(level, _SCALAR_LIST)  # four times as fast
    except msgspec.ValidationError:
        return False
    return not gc.get_referents(*level)  # a str or int that refers to something is an Enum's, or of another subclass


def plain_text(value: object, room: int) -> bytes | None:
    """Return the text of a plain value; None if it needs tags or cannot be stored. Raises TooMany."""
    kind = type(value)
    if kind in _SCALARS or (kind is dict and len(value) <= _SMALL and _SCALARS.issuperset(map(type, value.values()))):  # type: ignore[arg-type, attr-defined]
        pass  # the arguments and results of most steps: the walk would take longer than encoding them
    elif not is_plain(value, room):
        return None
    try:
        text = orjson.dumps(value, option=OPTIONS)
    except TypeError:
        return None  # a key that is not text, an integer beyond 64 bit, a lone surrogate
    if b"^" in text and _may_follow(text, b'"') and has_caret_key(value, room):
        return None
    return text


def may_hold_tags(text: bytes) -> bool:
    """Return whether `{"^` occurs in the text. It cannot occur inside a JSON string, which escapes quotes."""
    return _may_follow(text, b'{"')


def _may_follow(text: bytes, before: bytes) -> bool:
    """Return whether a caret follows `before`. In a text with many carets the answer is True.

    Searching for one byte runs at the speed of memory, searching for two or three takes longer than encoding.
    """
    size = len(before)
    at = text.find(b"^")
    for _ in range(_CARETS_MAX):
        if at < 0:
            return False
        if text[max(at - size, 0) : at] == before:
            return True
        at = text.find(b"^", at + 1)
    return at >= 0


def has_caret_key(value: object, room: int) -> bool:
    """Return whether a dict in a plain value has a key that would make it look like a tag."""
    return any(map(_level_has_caret_key, _levels(value, room)))


def may_be_tagged(value: object, room: int) -> bool:
    """Return whether a parsed value may hold a tag. True also if it is too deep or too large to check."""
    count = 0
    try:
        for level in _levels(value, room):
            count += 1
            if _level_has_caret_key(level):
                return True
    except TooMany:
        return True
    return count > room


def _level_has_caret_key(level: tuple[list[Any], list[type]]) -> bool:
    dicts = compress(level[0], map(is_, level[1], repeat(dict)))
    return any(key.startswith("^") for key in set(chain.from_iterable(dicts)))


def is_plain_dict(value: object) -> bool:
    """Return whether this is exactly a dict, whose keys can be JSON keys as they are. Values are not checked."""
    if type(value) is not dict:
        return False
    if not value:
        return True
    types = list(map(type, value))
    if types.count(str) != len(types):
        return False
    joined = "\n".join(value)
    if "^" in joined and any(key.startswith("^") for key in value):
        return False
    return joined.isascii() or not has_surrogates(joined)


def has_surrogates(value: str) -> bool:
    """Return whether a string holds a lone surrogate, which UTF-8 cannot encode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False
