"""Filters: a `where` mapping compiled into a tree of conditions, which says whether a value matches.

It runs in the process, on decoded values or on columns of them (`columns.py`), so that both databases and encrypted
stores agree. Comparison is typed: a number never equals or exceeds a text, `True` is not 1, and a field that is missing
matches only `ne`, `not` and `{"exists": False}`. `author.name` is the field of that name, or else `name` within
`author`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any

from perdure.errors import UsageError

DEPTH_MAX = 32
CONDITIONS_MAX = 1000  # each item that is ranked may be compared with all of them
Matcher = Callable[[object], bool]
MISSING: Any = object()  # the value of a field that is not there
UNREAD: Any = object()  # the value of an item that could not be read: it can match anything
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


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of a field. `names`: the field, preceded by those that it lies in."""

    names: tuple[Any, ...]
    operator: str
    operand: Any
    test: Matcher

    def __call__(self, value: object) -> bool:
        return self.test(field_of(value, self.names))

    def conditions(self) -> Iterator[Condition]:
        yield self

    def select(self, select: Callable[[Condition], Any], everything: Any) -> Any:
        """Return the set of items that match. `select` returns the set of those that meet a condition."""
        return select(self)


@dataclass(frozen=True, slots=True)
class Filter:
    """A combination of filters: "and", "or", or "not" of the only part."""

    word: str
    parts: tuple[Filter | Condition, ...] = ()

    def __call__(self, value: object) -> bool:
        if self.word == "not":
            return not self.parts[0](value)
        return (all if self.word == "and" else any)(part(value) for part in self.parts)

    def conditions(self) -> Iterator[Condition]:
        for part in self.parts:
            yield from part.conditions()

    def select(self, select: Callable[[Condition], Any], everything: Any) -> Any:
        """Return the set of items that match, by the operators `&`, `|` and `~`."""
        sets = (part.select(select, everything) for part in self.parts)
        if self.word == "and":
            return reduce(operator.and_, sets, everything)
        return ~next(sets) if self.word == "not" else reduce(operator.or_, sets, ~everything)


def matcher(where: Mapping[str, Any] | None) -> Filter:
    """Return a compiled filter. None matches everything. Raises UsageError if the filter is invalid."""
    return Filter("and") if where is None else checked_filter(_group(where, DEPTH_MAX))


def checked_filter(compiled: Filter) -> Filter:
    """Return a compiled filter. Raises UsageError if it has too many conditions."""
    if (count := sum(1 for _ in compiled.conditions())) > CONDITIONS_MAX:
        raise UsageError(
            f"this filter has {count:,} conditions, and at most {CONDITIONS_MAX:,} are allowed: for many values of one "
            'field write {"field": {"in": […]}}'
        )
    return compiled


def field_condition(names: tuple[Any, ...], name: str, operand: Any) -> Condition:
    """Return the test of a field by an operator. Raises UsageError if the operator cannot compare with the operand."""
    return Condition(names, name, operand, OPERATORS[name](operand))


def _group(where: object, depth: int) -> Filter:
    if not isinstance(where, Mapping):
        raise UsageError(f'a filter maps fields to what they must be, like {{"topic": "ui"}}; this is {where!r:.100}')
    if not depth:
        raise UsageError(f"a filter nests at most {DEPTH_MAX} deep")
    return Filter("and", tuple(_entry(name, inner, depth - 1) for name, inner in where.items()))


def _entry(name: object, inner: Any, depth: int) -> Filter:
    if name in ("and", "or"):
        if not isinstance(inner, Sequence) or isinstance(inner, str | bytes):
            raise UsageError(f"{name!r} in a filter takes a list of filters; this is {inner!r:.100}")
        return Filter(str(name), tuple(_group(part, depth) for part in inner))
    if name == "not":
        return Filter("not", (_group(inner, depth),))
    if not isinstance(name, str):
        raise UsageError(f"a field in a filter is named by a string, not {name!r:.100}")
    if name in ("$and", "$or", "$not"):  # as a field it would match nothing, in silence
        raise UsageError(f"{name!r} is written {name[1:]!r} in this filter")
    tests = inner if isinstance(inner, Mapping) else {"eq": inner}
    unknown = [each for each in tests if each not in OPERATORS]
    if unknown or not tests:
        raise UsageError(
            f"the filter of {name!r} has no operator {', '.join(map(repr, unknown)) or 'at all'}: there are "
            f'{", ".join(OPERATORS)}. To compare with a mapping: {{"eq": {{…}}}}'
        )
    return Filter("and", tuple(field_condition((name,), each, operand) for each, operand in tests.items()))


def _compares(compare: Callable[[Any, Any], bool]) -> Callable[[Any], Matcher]:
    def build(operand: Any) -> Matcher:
        kind = kind_of(operand)
        if kind is None:
            raise UsageError(f"a filter cannot compare by size with {operand!r:.100}")
        return lambda actual: kind_of(actual) is kind and _holds(compare, actual, operand)

    return build


def _is_one_of(operand: Any) -> Matcher:
    if not isinstance(operand, Sequence | Set) or isinstance(operand, str | bytes):
        raise UsageError(f"`in` of a filter takes a list; this is {operand!r:.100}")
    ordered = {each for each in operand if kind_of(each) is not None and _holds(operator.eq, each, each)}
    others = [each for each in operand if kind_of(each) is None]

    def is_one(actual: object) -> bool:
        if kind_of(actual) is None:
            return any(same(actual, each) for each in others)
        return _holds(operator.eq, actual, actual) and actual in ordered

    return is_one


def _contains(actual: object, operand: object) -> bool:
    if isinstance(actual, str):
        return isinstance(operand, str) and operand in actual
    return isinstance(actual, Sequence | Set) and any(same(each, operand) for each in actual)


def _exists(operand: Any) -> Matcher:
    if not isinstance(operand, bool):
        raise UsageError(f"`exists` of a filter is True or False, not {operand!r:.100}")
    return lambda actual: (actual is not MISSING) is operand


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
    kind = kind_of(one)
    if kind is not None:
        return kind is kind_of(other) and _holds(operator.eq, one, other)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return kind_of(other) is None and _holds(operator.eq, one, other)


def kind_of(value: object) -> tuple[type, ...] | None:
    """Return the kind of a value, within which values can be ordered. Lists, mappings, None and bools have none."""
    cls = type(value)
    return _KINDS[cls] if cls in _KINDS else next((kind for kind in _ORDERED if issubclass(cls, kind)), None)


def _holds(compare: Callable[[Any, Any], Any], one: object, other: object) -> bool:
    try:
        return bool(compare(one, other))
    except (TypeError, ValueError, ArithmeticError):  # times with and without a zone, arrays, signalling NaN
        return False


def field_of(value: object, names: tuple[Any, ...]) -> object:
    """Return the field of a value, or MISSING. A name with dots that no field has leads through several."""
    for name in names:
        actual = _field(value, name)
        if actual is MISSING and isinstance(name, str) and "." in name:
            actual = reduce(_field, name.split("."), value)
        value = actual
    return value


def _field(value: object, name: str) -> object:
    """Return a field of a mapping, or an attribute that an object stores. Properties are not computed."""
    if isinstance(value, dict | Mapping):
        return value.get(name, MISSING)
    return getattr(value, "__dict__", {}).get(name, MISSING)
