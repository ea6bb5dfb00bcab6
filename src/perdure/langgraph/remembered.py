"""The newest messages of a line, remembered column by column, so that those that did not change cost next to nothing.

Of each message its class, a private copy of its fields, which of them were set, and where its text ends are kept. A
message of the next checkpoint that has the same class, the same fields of the same types, and the same set of names is
unchanged, whatever object it is: what cannot be changed is compared by identity first, what can be (a list, a dict) by
value and type. Its text is not made again. A state that is handed out is made of copies of what is remembered.

The columns of a line are shared by its checkpoints, each of which has the first so many of them: only the newest adds
to them, and one that follows an older one copies them first.

Must never happen here: a message taken for unchanged though its text would be another, and an object in two hands.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from itertools import chain, islice
from operator import attrgetter
from threading import Lock
from typing import Any, Final, NamedTuple

from perdure.adapters import SIZE_MAX, Codec, MessageShape, decode, encode, make_old, message_texts

_fields: Final = attrgetter("__dict__")
_names: Final = attrgetter("__pydantic_fields_set__")
_extra: Final = attrgetter("__pydantic_extra__")
_FLAT: Final = frozenset({str, int, bool, type(None)})  # two that are equal, and of one type, have one text
_EXACT: Final = 2  # a version of marshal in which equal values have equal bytes, however they are shared
_BLOCK: Final = 64  # messages that are looked at together to find the first that changed
_MANY: Final = 128  # from so many copies on the garbage collector is kept from going through them
_OBJECTS: Final = 5  # of a message, about
_WEIGHT_BYTES: Final = 700  # about what the columns take for one message, beside its text
_lock = Lock()


class _Columns:
    """The columns, message by message."""

    __slots__ = (
        "cells",
        "copiers",
        "deep",
        "ends",
        "extras",
        "fields",
        "held",
        "keys",
        "kinds",
        "name_sets",
        "names",
        "shapes",
        "types",
        "values",
    )

    def __init__(self) -> None:
        self.shapes: dict[type, MessageShape] = {}
        self.kinds: list[type] = []
        self.fields: list[dict[str, Any]] = []
        self.names: list[set[str]] = []
        self.extras: list[dict[str, Any] | None] = []
        self.copiers: list[Callable[[dict[str, Any]], Any]] = []
        self.ends: list[int] = []  # where the text of each ends, counted from the bracket
        self.name_sets: dict[frozenset[str], set[str]] = {}  # most messages have the same names
        self.keys: list[str] = []  # of all fields, one message after the other, …
        self.values: list[Any] = []
        self.types: list[type] = []
        self.cells: list[int] = []  # … and how many fields there are up to each message
        self.held: list[tuple[int, str, bytes]] = []  # message, field and bytes of what is not flat …
        self.deep: list[int] = []  # … and how many there are up to each message

    def first(self, count: int) -> _Columns:
        """A copy up to here."""
        made = _Columns()
        made.shapes = dict(self.shapes)
        for name in ("kinds", "fields", "names", "extras", "copiers", "ends", "cells", "deep"):
            setattr(made, name, getattr(self, name)[:count])
        made.name_sets = dict(self.name_sets)
        for name in ("keys", "values", "types"):
            setattr(made, name, getattr(self, name)[: made.cells[-1] if count else 0])
        made.held = self.held[: made.deep[-1] if count else 0]
        return made

    def add(self, message: Any, shape: MessageShape, text: bytes) -> None:
        """Add a message that is private already."""
        fields, names = message.__dict__, message.__pydantic_fields_set__
        at, kind = len(self.kinds), type(message)
        self.shapes[kind] = shape
        self.fields.append(fields)
        self.names.append(self.name_sets.setdefault(frozenset(names), names))
        self.extras.append(shape.no_extra)
        self.copiers.append(shape.copier(fields, names))
        self.ends.append((self.ends[-1] if at else 0) + 1 + len(text))  # a bracket or a comma before it
        self.keys.extend(fields)
        self.values.extend(fields.values())
        self.types.extend(map(type, fields.values()))
        self.cells.append(len(self.types))
        for name, value in fields.items():
            if type(value) not in _FLAT and (value or type(value) is float):
                self.held.append((at, name, marshal.dumps(value, _EXACT)))
        self.deep.append(len(self.held))
        self.kinds.append(kind)  # last: a reader counts these


class Remembered(NamedTuple):
    """A list of messages as it was written: the first `number` of the columns."""

    columns: _Columns
    number: int

    @property
    def size(self) -> int:
        """How many bytes its text has, without the last bracket."""
        return self.columns.ends[self.number - 1] if self.number else 0

    @property
    def weight_bytes(self) -> int:
        return self.number * _WEIGHT_BYTES + 2 * self.size  # values that are not flat are kept twice

    def copies(self, *, in_row: bool = False) -> list[Any]:
        """The messages, all of them new: nothing in them that could be changed is anywhere else. `in_row`: of many
        states, one after the other."""
        columns, number = self.columns, self.number

        def make() -> list[Any]:
            pairs = zip(islice(columns.copiers, number), columns.fields, strict=False)
            return [copy(fields) for copy, fields in pairs]

        return make() if number < _MANY else make_old(make, number * _OBJECTS, in_row=in_row)

    def read(self, rest: bytes, codec: Codec) -> list[Any]:
        """The list again, as `copies`; `rest` is what its text has behind them, with the last bracket."""
        if not self.number:
            return list(decode(rest, codec))
        made = self.copies()
        return made if rest == b"]" else made + decode(b"[" + rest[1:], codec)

    def unchanged(self, values: list[Any], codec: Codec) -> Remembered:
        """The first messages of it that the list still begins with."""
        try:
            for kind, shape in self.columns.shapes.items():
                if codec.shape_of(kind) is not shape:  # registered in another way since
                    return NOTHING
            if len(values) >= self.number and self._equals(values, 0, self.number):
                return self
            return Remembered(self.columns, self._first_other(values))
        except Exception:  # something that is none of a message's attributes, or cannot be compared
            return NOTHING

    def _first_other(self, values: list[Any]) -> int:
        count = min(self.number, len(values))
        at = 0
        while at < count and self._equals(values, at, min(at + _BLOCK, count)):
            at += _BLOCK
        while at < count and self._equals(values, at, at + 1):
            at += 1
        return min(at, count)

    def _equals(self, values: list[Any], start: int, end: int) -> bool:
        """Whether these messages are what they were."""
        columns = self.columns
        part = values if start == 0 and end == len(values) else values[start:end]
        if list(map(type, part)) != _part(columns.kinds, start, end):
            return False
        dicts = list(map(_fields, part))
        found = list(chain.from_iterable(map(dict.values, dicts)))
        cells = (columns.cells[start - 1] if start else 0, columns.cells[end - 1])
        # The types first: then only built-in ones are compared, and 1 is not True. The same object is equal unseen.
        return (
            list(map(type, found)) == _part(columns.types, *cells)
            and found == _part(columns.values, *cells)
            and list(chain.from_iterable(dicts)) == _part(columns.keys, *cells)
            and list(map(_names, part)) == _part(columns.names, start, end)
            and list(map(_extra, part)) == _part(columns.extras, start, end)
            and self._holds_the_same(dicts, start, end)
        )

    def _holds_the_same(self, dicts: list[dict[str, Any]], start: int, end: int) -> bool:
        """Whether what is not flat is of the same types, and in the same order, all the way down."""
        columns = self.columns
        held = _part(columns.held, columns.deep[start - 1] if start else 0, columns.deep[end - 1])
        try:
            return all(marshal.dumps(dicts[at - start][name], _EXACT) == exact for at, name, exact in held)
        except ValueError:  # of another type than any that is remembered
            return False


def _part(column: list[Any], start: int, end: int) -> list[Any]:
    return column if start == 0 and end == len(column) else column[start:end]


NOTHING: Final = Remembered(_Columns(), 0)


class Written(NamedTuple):
    """The text of a list of messages: its first `kept` bytes are those of the list before, `text` follows them, up to
    the last bracket. `messages` is what is remembered of it."""

    kept: int
    text: bytes
    messages: Remembered


def write_messages(values: list[Any], before: Remembered, codec: Codec) -> Written | None:
    """Write a list of messages; `before` is what the parent's was. None: its first is no usual message. What comes
    after an unusual one is written like any other value, and not remembered. Raises Unstorable."""
    same = before.unchanged(values, codec) if before.number else before
    new = values[same.number :] if same.number else values
    usual, shapes, texts = _usual(new, codec)
    if not same.number and not usual:
        return None
    parts = [*texts]
    if len(usual) < len(new):
        parts.append(encode(new[len(usual) :], codec)[1:-1])
    text = b",".join(parts)
    if same.size + len(text) > SIZE_MAX:
        return None
    lead = b"" if not parts else b"," if same.number else b"["
    return Written(same.size, b"%b%b]" % (lead, text), _remember(same, usual, shapes, texts))


def _usual(new: Sequence[Any], codec: Codec) -> tuple[list[Any], list[MessageShape], list[bytes]]:
    """Private copies of the first messages, up to one that is unusual, with their shapes and texts."""
    private: list[Any] = []
    shapes: list[MessageShape] = []
    for message in new:
        shape = codec.shape_of(type(message))
        try:
            made = None if shape is None else shape.snapshot(message)
        except Exception:  # it lacks what a message has: encoding it says so
            made = None
        if shape is None or made is None:
            break
        private.append(made)
        shapes.append(shape)
    by_kind = {shape.cls: shape for shape in shapes}
    texts = message_texts(private, by_kind)
    if texts is None:  # one of them is not plain all the way down
        texts = []
        for message in private:
            if (one := message_texts([message], by_kind)) is None:
                break
            texts += one
    return private[: len(texts)], shapes, texts


def _remember(
    same: Remembered, private: list[Any], shapes: Sequence[MessageShape], texts: Sequence[bytes]
) -> Remembered:
    if not private:
        return same
    with _lock:
        columns = same.columns
        if len(columns.fields) != same.number or columns is NOTHING.columns:  # another list has added, or begun to
            columns = columns.first(same.number)
        for message, shape, text in zip(private, shapes, texts, strict=False):
            columns.add(message, shape, text)
        return Remembered(columns, len(columns.kinds))
