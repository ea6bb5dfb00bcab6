"""Filters: a `where` mapping compiled into one function that says whether a value matches.

It runs in the process, on decoded values, so that both databases and encrypted stores agree. Comparison is typed: a
number never equals or exceeds a text, `True` is not 1, and a field that is missing matches only `ne`, `not` and
`{"exists": False}`. `author.name` is the field of that name, or else `name` within `author`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from perdure.errors import UsageError

DEPTH_MAX = 32
Matcher = Callable[[object], bool]
_MISSING = object()
# Types whose values can be ordered. A subclass comes before its base class.
_ORDERED: tuple[tuple[type, ...], ...] = (
    (int, float, Decimal),
    (str,),
    (bytes,),
    (datetime,),
    (date,),
    (time,),
    (timedelta,),
)
_KINDS: dict[type, tuple[type, ...] | None] = {cls: kind for kind in _ORDERED for cls in kind}
_KINDS |= dict.fromkeys((bool, dict, list, type(None)))


def matcher(where: Mapping[str, Any] | None) -> Matcher:
    """Return a filter compiled into a function. None matches everything. Raises UsageError if the filter is invalid."""
    return _all([]) if where is None else _group(where, DEPTH_MAX)


def _group(where: object, depth: int) -> Matcher:
    if not isinstance(where, Mapping):
        raise UsageError(f'a filter maps fields to what they must be, like {{"topic": "ui"}}; this is {where!r:.100}')
    if not depth:
        raise UsageError(f"a filter nests at most {DEPTH_MAX} deep")
    return _all([_entry(name, condition, depth - 1) for name, condition in where.items()])


def _entry(name: object, condition: Any, depth: int) -> Matcher:
    if name in ("and", "or"):
        if not isinstance(condition, Sequence) or isinstance(condition, str | bytes):
            raise UsageError(f"{name!r} in a filter takes a list of filters; this is {condition!r:.100}")
        parts = [_group(part, depth) for part in condition]
        return _all(parts) if name == "and" else lambda value: any(part(value) for part in parts)
    if name == "not":
        inner = _group(condition, depth)
        return lambda value: not inner(value)
    if not isinstance(name, str):
        raise UsageError(f"a field in a filter is named by a string, not {name!r:.100}")
    tests = _tests(name, condition)
    path = name.split(".")

    def entry(value: object) -> bool:
        actual = _field(value, name)
        if actual is _MISSING and len(path) > 1:
            actual = value
            for part in path:
                actual = _field(actual, part)
        return all(test(actual) for test in tests)

    return entry


def _tests(name: str, condition: Any) -> list[Matcher]:
    if not isinstance(condition, Mapping):
        return [OPERATORS["eq"](condition)]
    unknown = [each for each in condition if each not in OPERATORS]
    if unknown or not condition:
        raise UsageError(
            f"the filter of {name!r} has no operator {', '.join(map(repr, unknown)) or 'at all'}: there are "
            f'{", ".join(OPERATORS)}. To compare with a mapping: {{"eq": {{…}}}}'
        )
    return [OPERATORS[each](operand) for each, operand in condition.items()]


def _compares(compare: Callable[[Any, Any], bool]) -> Callable[[Any], Matcher]:
    def build(operand: Any) -> Matcher:
        kind = _kind(operand)
        if kind is None:
            raise UsageError(f"a filter cannot compare by size with {operand!r:.100}")
        return lambda actual: _kind(actual) is kind and _holds(compare, actual, operand)

    return build


def _is_one_of(operand: Any) -> Matcher:
    if not isinstance(operand, Sequence | Set) or isinstance(operand, str | bytes):
        raise UsageError(f"`in` of a filter takes a list; this is {operand!r:.100}")
    return lambda actual: any(same(actual, each) for each in operand)


def _contains(actual: object, operand: object) -> bool:
    if isinstance(actual, str):
        return isinstance(operand, str) and operand in actual
    return isinstance(actual, Sequence | Set) and any(same(each, operand) for each in actual)


def _exists(operand: Any) -> Matcher:
    if not isinstance(operand, bool):
        raise UsageError(f"`exists` of a filter is True or False, not {operand!r:.100}")
    return lambda actual: (actual is not _MISSING) is operand


OPERATORS: dict[str, Callable[[Any], Matcher]] = {
    "eq": lambda operand: lambda actual: same(actual, operand),
    "ne": lambda operand: lambda actual: not same(actual, operand),
    "gt": _compares(operator.gt),
    "gte": _compares(operator.ge),
    "lt": _compares(operator.lt),
    "lte": _compares(operator.le),
    "in": _is_one_of,
    "contains": lambda operand: lambda actual: _contains(actual, operand),
    "exists": _exists,
}


def same(one: object, other: object) -> bool:
    """Return whether two values are equal and of the same kind: 1 equals 1.0, but neither True nor "1"."""
    kind = _kind(one)
    if kind is not None:
        return kind is _kind(other) and _holds(operator.eq, one, other)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return _kind(other) is None and _holds(operator.eq, one, other)


def _kind(value: object) -> tuple[type, ...] | None:
    """Return the kind of a value, within which values can be ordered. Lists, mappings, None and bools have none."""
    cls = type(value)
    return _KINDS[cls] if cls in _KINDS else next((kind for kind in _ORDERED if issubclass(cls, kind)), None)


def _holds(compare: Callable[[Any, Any], Any], one: object, other: object) -> bool:
    try:
        return bool(compare(one, other))
    except (TypeError, ValueError, ArithmeticError):  # times with and without a zone, arrays, signalling NaN
        return False


def _field(value: object, name: str) -> object:
    """Return a field of a mapping, or an attribute that an object stores. Properties are not computed."""
    if isinstance(value, dict | Mapping):
        return value.get(name, _MISSING)
    return getattr(value, "__dict__", {}).get(name, _MISSING)


def _all(parts: Sequence[Matcher]) -> Matcher:
    return lambda value: all(part(value) for part in parts)
