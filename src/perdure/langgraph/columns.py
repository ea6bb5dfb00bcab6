"""A cache of messages, column by column: compare a list of messages with it, and make copies from it.

It has the class of each message, a private copy of its fields, the names that were set, and where its text ends. A
message is unchanged if it has the same class, the same fields of the same types in the same order, and the same names.
Immutable values are compared by identity first, lists and dicts by value and type.

`SpeedColumns` does this in C, if the package perdure-speed is installed and PERDURE_SPEED is not 0. `PlainColumns` does
it in Python, with more columns, so that most of the work is done by built-in list operations.
"""

from __future__ import annotations

import marshal
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain, islice
from operator import attrgetter
from typing import Any, ClassVar, Final

from perdure.adapters import ModelShape, accelerator

_fields: Final = attrgetter("__dict__")
_names: Final = attrgetter("__pydantic_fields_set__")
_extra: Final = attrgetter("__pydantic_extra__")
_FLAT: Final = frozenset({str, int, bool, type(None)})  # equal values of one of these types have the same text
_EXACT: Final = 2  # a version of marshal in which equal values have equal bytes, however they are shared
_LEND_MIN: Final = 64  # fewer messages are copied: that is quick, and keeping them would take memory in every thread
_BLOCK: Final = 64  # messages compared at once while looking for the first that changed
_EMPTY: Final[dict[type, Any]] = {list: [], dict: {}}  # shared by all cached messages, never handed out


def _attached() -> Any:
    try:
        if accelerator is not None:
            accelerator.attach()
    except ImportError:  # another pydantic than it knows
        return None
    return accelerator


speed: Final = _attached()


class Columns(ABC):
    """The columns that both classes have."""

    per_message: ClassVar[tuple[str, ...]] = ("kinds", "fields", "names", "extras", "ends")

    def __init__(self) -> None:
        self.shapes: dict[type, ModelShape] = {}
        self.kinds: list[type] = []
        self.fields: list[dict[str, Any]] = []
        self.names: list[set[str]] = []
        self.extras: list[dict[str, Any] | None] = []
        self.ends: list[int] = []  # where the text of each ends, counted from the bracket
        self.name_sets: dict[frozenset[str], set[str]] = {}  # most messages have the same names

    def copies(self, number: int) -> list[Any]:
        """Return the first `number` messages as new objects."""
        return self.copies_of([number])[0]

    @abstractmethod
    def copies_of(self, numbers: list[int]) -> list[list[Any]]:
        """Return a list of new objects for each of the numbers: as many messages, from the first on."""

    def lend(self, number: int) -> list[Any]:
        """Return the first `number` messages as objects that no other code can see."""
        return self.copies(number)

    def objects(self, number: int) -> int:
        """Return how many objects are kept for `number` messages."""
        return number

    @abstractmethod
    def unchanged(self, values: list[Any], number: int, start: int = 0) -> int:
        """Return up to where values, from `start` on, equal the first `number` messages."""

    def first(self, count: int) -> Columns:
        """Return a copy with the first `count` messages."""
        prefix = type(self)()
        prefix.shapes, prefix.name_sets = dict(self.shapes), dict(self.name_sets)
        for name in self.per_message:
            setattr(prefix, name, getattr(self, name)[:count])
        return prefix

    def add(self, message: Any, shape: ModelShape, text: bytes) -> None:
        """Add a message. It must be a private copy already."""
        fields, names = _shared_empty(message.__dict__), message.__pydantic_fields_set__
        at, kind = len(self.kinds), type(message)
        self.shapes[kind] = shape
        self.fields.append(fields)  # first: if adding is interrupted, there are more fields than kinds
        self.names.append(self.name_sets.setdefault(frozenset(names), names))
        self.extras.append(shape.no_extra)
        self.ends.append((self.ends[-1] if at else 0) + 1 + len(text))  # a bracket or a comma before it
        self._added(at, shape, fields, names)
        self.kinds.append(kind)  # last: a reader counts these

    def replace(self, at: int, message: Any, shape: ModelShape, text: bytes) -> None:
        """Replace a message by a private copy of it, changed. Only for columns that no other checkpoint shares."""
        fields, names = _shared_empty(message.__dict__), message.__pydantic_fields_set__
        self.shapes[type(message)] = shape
        self.kinds[at], self.fields[at], self.extras[at] = type(message), fields, shape.no_extra
        self.names[at] = self.name_sets.setdefault(frozenset(names), names)
        _resize(self.ends, at, 1 + len(text))
        self._replaced(at, shape, fields, names)

    @abstractmethod
    def _replaced(self, at: int, shape: ModelShape, fields: dict[str, Any], names: set[str]) -> None:
        """Replace a message in the columns of the subclass."""

    @abstractmethod
    def _added(self, at: int, shape: ModelShape, fields: dict[str, Any], names: set[str]) -> None:
        """Add a message to the columns of the subclass."""


class SpeedColumns(Columns):
    """Columns that the C accelerator compares and copies.

    Many messages are lent: a reference to each stays here. If it is the only one left at the next call, and the message
    is unchanged, the same object is lent again. Two of each are kept, because a program often has the last result while
    it asks for the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[Any] = []  # two objects for each message

    def first(self, count: int) -> Columns:
        prefix = super().first(count)
        assert isinstance(prefix, SpeedColumns)
        prefix.lent, self.lent = self.lent[: 2 * count], []  # moved: in two lists none would have a single reference
        return prefix

    def objects(self, number: int) -> int:
        return number if number < _LEND_MIN else 3 * number

    def _added(self, at: int, shape: ModelShape, fields: dict[str, Any], names: set[str]) -> None:
        pass

    def _replaced(self, at: int, shape: ModelShape, fields: dict[str, Any], names: set[str]) -> None:
        pass  # what is lent of it is compared before it is lent again

    def copies_of(self, numbers: list[int]) -> list[list[Any]]:
        lists: list[list[Any]] = speed.copies(self.kinds, self.fields, self.names, self.extras, numbers)
        return lists

    def lend(self, number: int) -> list[Any]:
        if number < _LEND_MIN:
            return self.copies(number)
        values: list[Any] = speed.lend(self.kinds, self.fields, self.names, self.extras, self.lent, number)
        return values

    def unchanged(self, values: list[Any], number: int, start: int = 0) -> int:
        count: int = speed.unchanged(values, self.kinds, self.fields, self.names, self.extras, number, start)
        return count


class PlainColumns(Columns):
    """Columns that Python compares and copies. They also hold the fields of all messages in flat lists."""

    per_message = (*Columns.per_message, "copiers", "cells", "deep")

    def __init__(self) -> None:
        super().__init__()
        self.copiers: list[Callable[[dict[str, Any]], Any]] = []
        self.keys: list[str] = []  # of all fields of all messages in order, as are `values` and `types`
        self.values: list[Any] = []
        self.types: list[type] = []
        self.cells: list[int] = []  # the number of fields up to and with each message
        self.held: list[tuple[int, str, bytes]] = []  # message, field and bytes of each nested value
        self.deep: list[int] = []  # the number of nested values up to and with each message

    def first(self, count: int) -> Columns:
        prefix = super().first(count)
        assert isinstance(prefix, PlainColumns)
        for name in ("keys", "values", "types"):
            setattr(prefix, name, getattr(self, name)[: prefix.cells[-1] if count else 0])
        prefix.held = self.held[: prefix.deep[-1] if count else 0]
        return prefix

    def _added(self, at: int, shape: ModelShape, fields: dict[str, Any], names: set[str]) -> None:
        self.copiers.append(shape.copier(fields, names))
        self.keys.extend(fields)
        self.values.extend(fields.values())
        self.types.extend(map(type, fields.values()))
        self.cells.append(len(self.types))
        self.held += _held(at, fields)
        self.deep.append(len(self.held))

    def _replaced(self, at: int, shape: ModelShape, fields: dict[str, Any], names: set[str]) -> None:
        self.copiers[at] = shape.copier(fields, names)
        cells = slice(self.cells[at - 1] if at else 0, self.cells[at])
        self.keys[cells], self.values[cells] = [*fields], [*fields.values()]
        self.types[cells] = map(type, fields.values())
        _resize(self.cells, at, len(fields))
        held = _held(at, fields)
        self.held[self.deep[at - 1] if at else 0 : self.deep[at]] = held
        _resize(self.deep, at, len(held))

    def copies_of(self, numbers: list[int]) -> list[list[Any]]:
        lists: list[list[Any]] = []
        for number in numbers:
            pairs = zip(islice(self.copiers, number), self.fields, strict=False)
            lists.append([copy(fields) for copy, fields in pairs])
        return lists

    def unchanged(self, values: list[Any], number: int, start: int = 0) -> int:
        if len(values) >= number and self._equals(values, start, number):
            return number
        count = min(number, len(values))
        at = start
        while at < count and self._equals(values, at, min(at + _BLOCK, count)):
            at += _BLOCK
        while at < count and self._equals(values, at, at + 1):
            at += 1
        return min(at, count)

    def _equals(self, values: list[Any], start: int, end: int) -> bool:
        """Return whether the values from `start` to `end` equal the cached messages."""
        part = values if start == 0 and end == len(values) else values[start:end]
        if list(map(type, part)) != _part(self.kinds, start, end):
            return False
        dicts = list(map(_fields, part))
        items = list(chain.from_iterable(map(dict.values, dicts)))
        cells = (self.cells[start - 1] if start else 0, self.cells[end - 1])
        # Types are compared first: then only built-in values are compared with ==, and 1 does not equal True.
        return (
            list(map(type, items)) == _part(self.types, *cells)
            and items == _part(self.values, *cells)
            and list(chain.from_iterable(dicts)) == _part(self.keys, *cells)
            and list(map(_names, part)) == _part(self.names, start, end)
            and list(map(_extra, part)) == _part(self.extras, start, end)
            and self._holds_the_same(dicts, start, end)
        )

    def _holds_the_same(self, dicts: list[dict[str, Any]], start: int, end: int) -> bool:
        """Return whether nested values have the same types and order at every depth."""
        held = _part(self.held, self.deep[start - 1] if start else 0, self.deep[end - 1])
        try:
            return all(marshal.dumps(dicts[at - start][name], _EXACT) == exact for at, name, exact in held)
        except ValueError:  # a type that marshal does not know, so none that is cached
            return False


def _shared_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace empty lists and dicts by the ones that all cached messages share."""
    for name, value in fields.items():
        if type(value) in _EMPTY and not value:
            fields[name] = _EMPTY[type(value)]
    return fields


def _resize(ends: list[int], at: int, size: int) -> None:
    """Give one of several consecutive parts another size. `ends` is where each of them ends."""
    if (grown := (ends[at - 1] if at else 0) + size - ends[at]) != 0:
        ends[at:] = [end + grown for end in ends[at:]]


def _held(at: int, fields: dict[str, Any]) -> list[tuple[int, str, bytes]]:
    """Return the nested values of a message that are not empty, as bytes."""
    return [
        (at, name, marshal.dumps(value, _EXACT))
        for name, value in fields.items()
        if type(value) not in _FLAT and (value or type(value) is float)
    ]


def _part(column: list[Any], start: int, end: int) -> list[Any]:
    return column if start == 0 and end == len(column) else column[start:end]


columns_class: type[Columns] = PlainColumns if speed is None else SpeedColumns


def new_columns() -> Columns:
    """Return columns without messages."""
    return columns_class()
