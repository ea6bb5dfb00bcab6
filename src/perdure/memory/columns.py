"""Columns: the values of a field in the items of a segment, so that a filter is applied before items are ranked.

Each different value is kept once, and a condition is decided once for it, or by bisection among those that can be
ordered. A column says which items can match. The caller still applies the filter to the items that it returns.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from perdure.memory.arrays import Array, numpy
from perdure.memory.filters import OPERATORS, UNREAD, Condition, field_of, kind_of, same

_END = b"\xff"  # of a text; no text in UTF-8 has it
_BLOCK = 1 << 18  # bytes that are searched at a time: they stay in the processor's cache
_Bisect = Callable[[list[Any], Any, int, int], int]
# Where the values that an operator accepts begin and end among ordered ones. None: at the first, after the last.
_RANGES: dict[str, tuple[_Bisect | None, _Bisect | None]] = {
    "eq": (bisect_left, bisect_right),
    "gt": (bisect_right, None),
    "gte": (bisect_left, None),
    "lt": (None, bisect_left),
    "lte": (None, bisect_right),
}


class FieldColumn:
    """The values of a field by the place of an item in its segment."""

    def __init__(self, values: Iterable[object]) -> None:
        different: dict[Hashable, Any] = {}
        numbers: dict[Hashable, int] = {}
        places = [numbers.setdefault(key, len(numbers)) for value in values if (key := _key(value, different))]
        by_kind: dict[Any, list[tuple[Any, int]]] = {}
        for key, number in numbers.items():
            value = different[key]
            by_kind.setdefault(kind_of(value) if same(value, value) else None, []).append((value, number))
        others = by_kind.pop(None, [])
        self.values: list[Any] = []
        self._ordered: dict[Any, tuple[int, int]] = {}  # by kind: the first and the end of its values
        order: list[int] = []
        for kind, members in by_kind.items():
            try:
                members.sort(key=lambda member: member[0])
            except (TypeError, ValueError, ArithmeticError):  # times with and without a zone
                others += members
                continue
            self._ordered[kind] = len(order), len(order) + len(members)
            order += [number for _, number in members]
            self.values += [value for value, _ in members]
        self._others = len(order)  # the first value that is not ordered
        order += [number for _, number in others]
        self.values += [value for value, _ in others]
        rank = numpy.empty(len(order), "i4")
        rank[order] = numpy.arange(len(order), dtype="i4")
        self.codes: Array = rank[places] if places else numpy.zeros(0, "i4")
        self._values_bytes = self.codes.nbytes + sum(map(sys.getsizeof, self.values))
        self._elements: tuple[FieldColumn, Array] | None = None
        self._texts: JoinedTexts | None = None

    @property
    def weight_bytes(self) -> int:
        return self._values_bytes + (self._texts.weight_bytes if self._texts is not None else 0)

    def select(self, condition: Condition) -> Array:
        """Return which items can meet a condition."""
        accepted = numpy.zeros(len(self.values), bool)
        name, operand = condition.operator, condition.operand
        if name in _RANGES:
            self._accept(accepted, name, operand)
        elif name == "in":
            for each in operand:
                self._accept(accepted, "eq", each)
        elif name == "ne":
            self._accept(accepted, "eq", operand)
            numpy.logical_not(accepted, out=accepted)
        elif name == "exists":
            accepted[: self._others] = operand
        elif name == "contains":
            self._accept_containing(accepted, operand)
        for place in range(self._others, len(self.values)):
            value = self.values[place]
            if name != "contains" or not isinstance(value, list | tuple):
                accepted[place] = value is UNREAD or condition.test(value)
        return accepted[self.codes]

    @property
    def unread(self) -> Array | None:
        """Which items could not be read. None: all could."""
        places = [place for place in range(self._others, len(self.values)) if self.values[place] is UNREAD]
        return None if not places else self.codes == places[0]

    def _accept(self, accepted: Array, name: str, operand: object) -> None:
        """Accept the ordered values that compare so with an operand."""
        if (kind := kind_of(operand)) not in self._ordered:
            return
        start, end = self._ordered[kind]
        first, last = _RANGES[name]
        try:
            if same(operand, operand):  # not a NaN
                low = start if first is None else first(self.values, operand, start, end)
                high = end if last is None else last(self.values, operand, start, end)
                accepted[low:high] = True
        except (TypeError, ValueError, ArithmeticError):  # a time without a zone, compared with those that have one
            pass

    def _accept_containing(self, accepted: Array, operand: object) -> None:
        start, end = self._ordered.get(kind_of(""), (0, 0))
        if isinstance(operand, str):
            self._texts = self._texts or JoinedTexts(self.values[start:end])
            accepted[start:end] = self._texts.containing(operand)
        start, end = self._ordered.get(kind_of(b""), (0, 0))
        accepted[start:end] = [OPERATORS["contains"](operand)(data) for data in self.values[start:end]]
        if self._elements is None:
            lists = [at for at in range(self._others, len(self.values)) if isinstance(self.values[at], list | tuple)]
            owners = [at for at in lists for _ in self.values[at]]
            self._elements = FieldColumn(each for at in lists for each in self.values[at]), numpy.array(owners, "i8")
        column, of = self._elements
        accepted[of[column.select(Condition((), "eq", operand, OPERATORS["eq"](operand)))]] = True


class JoinedTexts:
    """Texts in one piece of memory, so that those that contain another are found without a look at each object."""

    def __init__(self, texts: list[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._ends = numpy.cumsum([len(text) + 1 for text in encoded], dtype="i8")
        self._bytes = numpy.frombuffer(_END.join([*encoded, b""]), "u1")
        self._frequencies = numpy.bincount(self._bytes, minlength=256)
        self.weight_bytes = self._bytes.nbytes + self._ends.nbytes

    def containing(self, part: str) -> Array:
        """Return which texts contain a part: where its two rarest bytes are, and then its others around them."""
        sought = numpy.frombuffer(part.encode("utf-8", "surrogatepass"), "u1")
        if not len(sought):
            return numpy.ones(len(self._ends), bool)
        order = numpy.argsort(self._frequencies[sought], kind="stable").tolist()
        all_places = [numpy.zeros(0, "i8")]
        end = len(self._bytes) - len(sought) + 1  # no place from here on has room for it
        for start in range(0, end, _BLOCK):
            blocks = {at: self._bytes[start + at : min(start + _BLOCK, end) + at] for at in order}
            first, second = order[0], order[min(1, len(order) - 1)]
            places = numpy.flatnonzero((blocks[first] == sought[first]) & (blocks[second] == sought[second]))
            for at in order[2:]:
                places = places[blocks[at][places] == sought[at]]
            all_places.append(places + start)
        places = numpy.concatenate(all_places)
        before = numpy.searchsorted(places, self._ends)  # how many are before the end of each text
        return numpy.diff(before, prepend=0) > 0


def _key(value: object, different: dict[Hashable, Any]) -> Hashable:
    """Return what is the same for equal values of one kind, and remember the first of them."""
    key: Hashable = (kind_of(value) or type(value), value)
    if isinstance(value, list | tuple):
        key = (type(value), *((type(each), each) for each in value))
    try:
        different.setdefault(key, value)
    except TypeError:  # no hash
        key = (object, id(value))
        different[key] = value
    return key


def column_of(values: Iterable[object], names: tuple[Any, ...]) -> FieldColumn:
    """Return the column of a field. A value of UNREAD stays as it is."""
    return FieldColumn(value if value is UNREAD else field_of(value, names) for value in values)
