"""Values that merge: counters, sets, registers and text (state-based CRDTs). Pure.

`merge` is commutative, associative and idempotent, so copies that have seen the same changes are equal, in whatever
order these came. A writer is known by a name that no other writer has; it numbers its changes upwards. A *version
vector* says how many changes of each writer a value includes. What is changed in hand belongs to no writer until
`_stamped` names one: memory does that when it writes (`memory/merging.py`).

Contents are plain data, so merging runs no code of other classes. Stored text is not trusted: `_load` checks its shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import orjson

from perdure.errors import ExtraMissing, Unstorable, UsageError
from perdure.values.plain import plain_text
from perdure.values.registry import register

Vector = Mapping[str, int]  # the number of the newest change of each writer that is included
Order = Literal["equal", "before", "after", "concurrent"]
Element = str | int
PREFIX = "perdure.crdt."  # of their names in stored text
_NUMBER_MAX = 2**63
_DEPTH_MAX = 100


def join(one: Vector, other: Vector) -> dict[str, int]:
    """Return the version vector of everything that either includes."""
    return dict(sorted({**one, **{name: max(n, one.get(name, 0)) for name, n in other.items()}}.items()))


def covers(one: Vector, other: Vector) -> bool:
    """Return whether `one` includes every change that `other` includes."""
    return all(one.get(name, 0) >= number for name, number in other.items())


def _need(condition: bool) -> None:
    if not condition:
        raise ValueError("its content has the wrong shape")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _NUMBER_MAX


def _vector(value: Any) -> dict[str, int]:
    _need(type(value) is dict and all(type(name) is str and name and _is_number(n) for name, n in value.items()))
    return dict(value)


class Mergeable(ABC):
    """A value that merges with another one of its class. It never changes: each method returns a new value."""

    __slots__ = ()
    _seen: Vector
    _pending: Any

    @property
    @abstractmethod
    def value(self) -> Any:
        """What it stands for, with the changes in hand: a number, a set, the value of a register, a text."""

    @property
    def version(self) -> Vector:
        """The version vector: the number of the newest change of each writer that it includes."""
        return self._seen

    @property
    def _is_changed(self) -> bool:
        """Whether it has changes in hand that no writer has stamped."""
        return self._pending is not None

    @abstractmethod
    def _stamped(self, writer: str, number: int, at: int) -> Self:
        """Make the changes in hand the change `number` of a writer, at a time (microseconds since 1970)."""

    @property
    def _argument(self) -> Any:
        """What a run compares when it calls `put` again: without anything that is random."""
        return self

    @abstractmethod
    def _join(self, other: Any) -> Self: ...

    def merge(self, other: Self) -> Self:
        """Return a value with the changes of both. Raises UsageError if the classes differ or both are changed."""
        if type(other) is not type(self):
            raise UsageError(f"a {type(self).__name__} merges with another one, not with a {type(other).__name__}")
        if self._is_changed and other._is_changed:
            raise UsageError("both values have changes that are not in memory yet: put each of them instead")
        return self._join(other)

    def compare(self, other: Self) -> Order:
        """Return whether this value includes less, more, or the same changes as another one, or neither."""
        mine, its = self.version, other.version
        if covers(mine, its):
            return "equal" if covers(its, mine) else "after"
        return "before" if covers(its, mine) else "concurrent"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def __str__(self) -> str:
        return str(self.value)

    @abstractmethod
    def _dump(self) -> dict[str, Any]:
        """Return its parts as plain data."""

    @classmethod
    @abstractmethod
    def _load(cls, body: Any) -> Self:
        """Return the value that has these parts. Raises an error if they have another shape."""


# --- counters


@dataclass(frozen=True, slots=True, repr=False)
class GCounter(Mergeable):
    """A counter that only grows: `counter.add(3)`.

    Of each writer it keeps the newest total with its number, as Cassandra does. The number decides, so a store that
    went back to a snapshot counts on from there.
    """

    _totals: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # number, added, subtracted; by writer
    _pending: tuple[int, int] = (0, 0)

    @property
    def value(self) -> int:
        added, subtracted = self._pending
        return added - subtracted + sum(up - down for _, up, down in self._totals.values())

    @property
    def version(self) -> Vector:
        return {writer: number for writer, (number, _, _) in self._totals.items()}

    @property
    def _is_changed(self) -> bool:
        return self._pending != (0, 0)

    def add(self, amount: int = 1) -> Self:
        """Return the counter with an amount added, which must not be negative."""
        return self._moved(amount, 0)

    def _moved(self, amount: int, least: int) -> Self:
        if type(amount) is not int or not least <= amount < _NUMBER_MAX:
            kind = "an int" if least else "an int that is not negative; a PNCounter can also go down"
            raise UsageError(f"{type(self).__name__}.add({amount!r:.50}): {kind}")
        added, subtracted = self._pending
        return replace(self, _pending=(added + max(amount, 0), subtracted + max(-amount, 0)))

    def _stamped(self, writer: str, number: int, at: int) -> Self:
        if not self._is_changed:
            return self
        _, up, down = self._totals.get(writer, (0, 0, 0))
        total = (number, up + self._pending[0], down + self._pending[1])
        return replace(self, _totals=dict(sorted({**self._totals, writer: total}.items())), _pending=(0, 0))

    def _join(self, other: Self) -> Self:
        both = {name: max(self._totals.get(name, total), total) for name, total in other._totals.items()}
        pending = self._pending if self._is_changed else other._pending
        return replace(self, _totals=dict(sorted({**self._totals, **both}.items())), _pending=pending)

    def _dump(self) -> dict[str, Any]:
        return {"totals": {name: [*total] for name, total in self._totals.items()}, "pending": [*self._pending]}

    @classmethod
    def _load(cls, body: Any) -> Self:
        totals, pending = ({name: tuple(each) for name, each in body["totals"].items()}, tuple(body["pending"]))
        for each in (*totals.values(), (0, *pending)):
            _need(len(each) == 3 and all(type(part) is int and part >= 0 for part in each) and _is_number(each[0]))
        return cls(totals, pending)


@dataclass(frozen=True, slots=True, repr=False)
class PNCounter(GCounter):
    """A counter that grows and shrinks: `counter.add(-2)`."""

    def add(self, amount: int = 1) -> Self:
        """Return the counter with an amount added, which may be negative."""
        return self._moved(amount, 1 - _NUMBER_MAX)


# --- sets and registers of several values


def _alive(one: Mapping[Any, Vector], seen: Vector, other: Mapping[Any, Vector], known: Vector) -> dict[Any, Vector]:
    """Return the marks that both have, and those of each side that the other has not seen: it has not removed them."""
    kept: dict[Any, Vector] = {}
    for key in dict.fromkeys((*one, *other)):
        mine, its = one.get(key, {}), other.get(key, {})
        marks = {name: n for name, n in mine.items() if its.get(name) == n or n > known.get(name, 0)}
        marks |= {name: n for name, n in its.items() if mine.get(name) == n or n > seen.get(name, 0)}
        if marks:
            kept[key] = dict(sorted(marks.items()))
    return kept


def _canonical(value: Any) -> str:
    """Return the text by which a plain value is compared. Raises Unstorable."""
    if plain_text(value, _DEPTH_MAX) is None:
        raise Unstorable(
            f"a value that merges holds plain data (None, bool, int, float, str, lists, dicts), not a "
            f"{type(value).__name__}: put it into memory by itself, or as plain data"
        )
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


@dataclass(frozen=True, slots=True, repr=False)
class ORSet(Mergeable):
    """A set of texts and ints: `tags.add("sea").remove("sky")`.

    An element that one writer removes and another one adds meanwhile stays: a remove concerns the adds it has seen.
    """

    _elements: Mapping[Element, Vector] = field(default_factory=dict)  # with the adds that were not removed
    _seen: Vector = field(default_factory=dict)
    _added: frozenset[Element] = frozenset()
    _removed: bool = False

    @property
    def value(self) -> frozenset[Element]:
        return self._added.union(self._elements)

    @property
    def _is_changed(self) -> bool:
        return bool(self._added) or self._removed

    def __iter__(self) -> Iterator[Element]:
        return iter(sorted(self.value, key=lambda one: (type(one) is str, one)))

    def __contains__(self, element: object) -> bool:
        return element in self.value

    def __len__(self) -> int:
        return len(self.value)

    def add(self, *elements: Element) -> Self:
        """Return the set with elements added."""
        return replace(self, _added=self._added | set(map(_element, elements)))

    def remove(self, *elements: Element) -> Self:
        """Return the set without elements. Those that are not in it are ignored."""
        gone = set(map(_element, elements))
        kept = {one: marks for one, marks in self._elements.items() if one not in gone}
        removed = self._removed or len(kept) < len(self._elements)
        return replace(self, _elements=kept, _added=self._added - gone, _removed=removed)

    def _stamped(self, writer: str, number: int, at: int) -> Self:
        if not self._is_changed:
            return self
        elements = {**self._elements, **{one: {writer: number} for one in self._added}}
        return type(self)(_ordered(elements), join(self._seen, {writer: number}))

    def _join(self, other: Self) -> Self:
        elements = _alive(self._elements, self._seen, other._elements, other._seen)
        added, removed = self._added | other._added, self._removed or other._removed
        return type(self)(_ordered(elements), join(self._seen, other._seen), added, removed)

    def _dump(self) -> dict[str, Any]:
        pairs, added = [[one, marks] for one, marks in self._elements.items()], sorted(self._added, key=str)
        return {"elements": pairs, "seen": self._seen, "added": added, "removed": self._removed}

    @classmethod
    def _load(cls, body: Any) -> Self:
        elements = {_element(one): _vector(marks) for one, marks in body["elements"]}
        seen, added, removed = _vector(body["seen"]), frozenset(map(_element, body["added"])), body["removed"]
        _need(len(elements) == len(body["elements"]) and type(removed) is bool)
        _need(all(marks and covers(seen, marks) for marks in elements.values()))
        return cls(elements, seen, added, removed)


def _element(element: Any) -> Element:
    if type(element) not in (str, int) or (type(element) is int and abs(element) >= _NUMBER_MAX):
        raise UsageError(f"an element of an ORSet is a str or an int, not {element!r:.50}")
    if type(element) is str:
        _canonical(element)
    return element  # type: ignore[no-any-return]


def _ordered(elements: Mapping[Element, Vector]) -> dict[Element, Vector]:
    return dict(sorted(elements.items(), key=lambda pair: (type(pair[0]) is str, pair[0])))


@dataclass(frozen=True, slots=True, repr=False)
class MVRegister(Mergeable):
    """A register that keeps both of two values that were set without knowledge of each other: `register.set(value)`.

    `value` is a list of them; the next `set` replaces those that it has seen.
    """

    _values: Mapping[str, Vector] = field(default_factory=dict)  # JSON texts, with the changes that set them
    _seen: Vector = field(default_factory=dict)
    _pending: str | None = None

    @property
    def value(self) -> list[Any]:
        texts = self._values if self._pending is None else {self._pending: None, **self._values}
        return [orjson.loads(text) for text in sorted(texts)]

    def set(self, value: Any) -> Self:
        """Return the register with one value, which replaces those that are in it now."""
        return replace(self, _values={}, _pending=_canonical(value))

    def _stamped(self, writer: str, number: int, at: int) -> Self:
        if self._pending is None:
            return self
        values = {**self._values, self._pending: {writer: number}}
        return type(self)(dict(sorted(values.items())), join(self._seen, {writer: number}))

    def _join(self, other: Self) -> Self:
        values = _alive(self._values, self._seen, other._values, other._seen)
        pending = other._pending if self._pending is None else self._pending
        return type(self)(dict(sorted(values.items())), join(self._seen, other._seen), pending)

    def _dump(self) -> dict[str, Any]:
        values = [[orjson.loads(text), marks] for text, marks in self._values.items()]
        return {"values": values, "seen": self._seen, "pending": _maybe(self._pending)}

    @classmethod
    def _load(cls, body: Any) -> Self:
        values, seen = {_canonical(value): _vector(marks) for value, marks in body["values"]}, _vector(body["seen"])
        _need(all(marks and covers(seen, marks) for marks in values.values()))
        return cls(values, seen, _maybe_text(body["pending"]))


@dataclass(frozen=True, slots=True, repr=False)
class LWWRegister(Mergeable):
    """A register that keeps the value that was set last: `register.set(value)`.

    The time of the store that wrote it decides, then the writer's name. A value that is set where another one was
    known is later than that one, whatever the clocks say.
    """

    _at: int = 0
    _writer: str = ""
    _text: str = "null"  # JSON
    _seen: Vector = field(default_factory=dict)
    _pending: str | None = None

    @property
    def value(self) -> Any:
        return orjson.loads(self._text if self._pending is None else self._pending)

    def set(self, value: Any) -> Self:
        """Return the register with another value."""
        return replace(self, _pending=_canonical(value))

    def _stamped(self, writer: str, number: int, at: int) -> Self:
        if self._pending is None:
            return self
        return type(self)(max(at, self._at + 1), writer, self._pending, join(self._seen, {writer: number}))

    def _join(self, other: Self) -> Self:
        last = max(self, other, key=lambda one: (one._at, one._writer, one._text))
        pending = other._pending if self._pending is None else self._pending
        return replace(last, _seen=join(self._seen, other._seen), _pending=pending)

    def _dump(self) -> dict[str, Any]:
        last = {self._writer: [self._at, orjson.loads(self._text)]} if self._writer else {}
        return {"last": last, "seen": self._seen, "pending": _maybe(self._pending)}

    @classmethod
    def _load(cls, body: Any) -> Self:
        seen, pending, last = _vector(body["seen"]), _maybe_text(body["pending"]), body["last"]
        _need(type(last) is dict and len(last) <= 1)
        for writer, (at, value) in last.items():
            _need(bool(writer) and _is_number(at))
            return cls(at, writer, _canonical(value), seen, pending)
        return cls(_seen=seen, _pending=pending)


def _maybe(text: str | None) -> list[Any]:
    return [] if text is None else [orjson.loads(text)]


def _maybe_text(held: Any) -> str | None:
    _need(type(held) is list and len(held) <= 1)
    return _canonical(held[0]) if held else None


# --- text


@dataclass(frozen=True, slots=True, repr=False)
class SharedText(Mergeable):
    """A text that several edit at once, letter by letter: `text.insert(5, "more")`, `text.delete(0, 3)`.

    Yjs merges it (extra `crdt`). It names its own writers, so a change in hand is complete. Its version vector counts
    what was inserted; a deletion has no number.
    """

    _text: str = ""
    _state: bytes = b""  # a Yjs document

    @property
    def value(self) -> str:
        return self._text

    @property
    def version(self) -> Vector:
        if not self._state:
            return {}
        numbers = list(_varints(_document(self._state).get_state()))
        return {str(client): clock for client, clock in zip(numbers[1::2], numbers[2::2], strict=True)}

    @property
    def _is_changed(self) -> bool:
        return False

    @property
    def _argument(self) -> Any:
        return self._text

    def insert(self, index: int, text: str) -> Self:
        """Return the text with another one inserted before the character `index`."""
        if type(index) is not int or not 0 <= index <= len(self._text) or type(text) is not str:
            raise UsageError(f"insert({index!r:.50}, …): an index from 0 to {len(self._text)}, and a text")
        return self._edited(index, index, text)

    def delete(self, start: int, end: int) -> Self:
        """Return the text without the characters from `start` up to `end`."""
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(self._text):
            raise UsageError(f"delete({start!r:.50}, {end!r:.50}): two indexes from 0 to {len(self._text)}")
        return self._edited(start, end, "")

    def _edited(self, start: int, end: int, text: str) -> Self:
        _canonical(text)
        document = _document(self._state)
        from pycrdt import Text  # it is installed: there is a document

        part = document.get("text", type=Text)
        # Yjs counts the bytes of UTF-8.
        first, last = (len(self._text[:index].encode()) for index in (start, end))
        if last > first:
            del part[first:last]
        if text:
            part.insert(first, text)
        return self._of(document)

    def _stamped(self, writer: str, number: int, at: int) -> Self:
        return self

    def _join(self, other: Self) -> Self:
        if covers(self.version, other.version) and self._state == other._state:
            return self
        document = _document(self._state)
        if other._state:
            document.apply_update(other._state)
        return self._of(document)

    def _of(self, document: Any) -> Self:
        from pycrdt import Text

        return type(self)(str(document.get("text", type=Text)), document.get_update())

    def _dump(self) -> dict[str, Any]:
        return {"text": self._text, "state": self._state}

    @classmethod
    def _load(cls, body: Any) -> Self:
        _need(type(body["text"]) is str and type(body["state"]) is bytes)
        return cls(body["text"], body["state"])


def _document(state: bytes) -> Any:
    try:
        from pycrdt import Doc
    except ImportError as error:
        raise ExtraMissing("SharedText", "crdt") from error
    document: Any = Doc()
    if state:
        document.apply_update(state)  # raises ValueError for anything that is not a document
    return document


def _varints(data: Iterable[int]) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0


KINDS: Mapping[str, type[Mergeable]] = {
    PREFIX + cls.__name__: cls for cls in (GCounter, PNCounter, ORSet, MVRegister, LWWRegister, SharedText)
}
for _name, _class in KINDS.items():
    register(_class, name=_name, dump=_class._dump, load=_class._load)
