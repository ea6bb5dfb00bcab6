"""A cache of a line's newest messages (`columns`): unchanged messages are neither encoded nor decoded again.

A message of the next checkpoint that equals its cached copy is not encoded again. A loaded state is made of copies of
cached messages, or of messages that were loaded before and that no other code refers to any more. The checkpoints of a
line share the columns, and each has a number of messages from the first on. Only the newest checkpoint adds to the
columns; one that follows an older checkpoint copies them first.

Must never happen here: a changed message taken for unchanged, or one object given to two callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from perdure.adapters import SIZE_MAX, Codec, ModelShape, decode, encode, model_texts
from perdure.langgraph.columns import Columns, PlainColumns, new_columns

_WEIGHT_BYTES: Final = 700  # approximate memory of one message, without its text
_CHANGES_MAX: Final = 16  # if more messages than this changed, all from the first of them on are encoded
_lock = Lock()


class Remembered(NamedTuple):
    """A cached list of messages: the first `number` of the columns."""

    columns: Columns
    number: int

    @property
    def size(self) -> int:
        """The size of its text in bytes, without the last bracket."""
        return self.columns.ends[self.number - 1] if self.number else 0

    @property
    def weight_bytes(self) -> int:
        return self.columns.objects(self.number) * _WEIGHT_BYTES + 2 * self.size  # deep values are kept twice

    def copies(self) -> list[Any]:
        """Return the messages as new objects. They share only values that cannot be changed."""
        return self.columns.copies(self.number)

    def read(self, tail: bytes, codec: Codec) -> list[Any]:
        """Return the whole list for one caller alone. `tail` is the text after the cached messages, to the bracket."""
        return self._with(self.columns.lend(self.number), tail, codec)

    def copy(self, tail: bytes, codec: Codec) -> list[Any]:
        """Return the whole list as new objects."""
        return self._with(self.copies(), tail, codec)

    def _with(self, items: list[Any], tail: bytes, codec: Codec) -> list[Any]:
        if not self.number:
            return list(decode(tail, codec))
        return items if tail == b"]" else items + decode(b"[" + tail[1:], codec)

    def unchanged(self, values: list[Any], codec: Codec) -> Remembered:
        """Return the cached messages, from the first on, that `values` still begins with."""
        try:
            for kind, shape in self.columns.shapes.items():
                if codec.shape_of(kind) is not shape:  # the class was registered again since
                    return NOTHING
            number = self.columns.unchanged(values, self.number)
            return self if number == self.number else Remembered(self.columns, number)
        except Exception:  # a value without a message's attributes, or one that cannot be compared
            return NOTHING

    def changed(self, values: list[Any], first: int) -> list[int]:
        """Return the places of the messages that changed. `first` is the first of them. Empty if they are many."""
        places = [first]
        try:
            while len(values) >= self.number and len(places) <= _CHANGES_MAX:
                place = self.columns.unchanged(values, self.number, places[-1] + 1)
                if place == self.number:
                    return places
                places.append(place)
        except Exception:  # as above
            pass
        return []


NOTHING: Final = Remembered(PlainColumns(), 0)


class Written(NamedTuple):
    """The text of a list of messages: the first `kept` bytes of the parent's list, then `text`, with the last bracket.

    `messages` is the cache of it.
    """

    kept: int
    text: bytes
    messages: Remembered


def write_messages(
    values: list[Any], before: Remembered, codec: Codec, text: bytes | memoryview = b""
) -> Written | None:
    """Encode a list of messages; `before` is the cache of the parent's list. Raises Unstorable.

    The values from the first one on that is no plain message are encoded like other values, and not cached. Return None
    if no message can be cached, or if the text would be too large. With `text`, that of the cached messages, a few
    changed messages are encoded and the others between them are not.
    """
    same = before.unchanged(values, codec) if before.number else before
    if text and same.columns is before.columns and same.number < before.number:
        edited = _edited(values, before, same.number, codec, text)
    else:
        edited = None
    cached, pieces = (same, []) if edited is None else edited
    new = values[cached.number :] if cached.number else values
    usual, shapes, texts = _usual(new, codec)
    if not cached.number and not usual:
        return None
    parts = [*texts]
    if len(usual) < len(new):
        parts.append(encode(new[len(usual) :], codec)[1:-1])
    added = b",".join(parts)
    if cached.size + len(added) > SIZE_MAX:
        return None
    lead = b"" if not parts else b"," if cached.number else b"["
    return Written(same.size, b"".join((*pieces, lead, added, b"]")), _remember(cached, usual, shapes, texts))


def _edited(
    values: list[Any], before: Remembered, first: int, codec: Codec, text: bytes | memoryview
) -> tuple[Remembered, list[bytes | memoryview]] | None:
    """Return the cached messages with those that changed replaced, and their text from the first of these on.

    Return None if many messages changed, or one of them is no plain message any more.
    """
    places = before.changed(values, first)
    private, shapes, texts = _usual([values[at] for at in places], codec)
    if not places or len(texts) < len(places):
        return None
    ends = before.columns.ends
    pieces: list[bytes | memoryview] = []
    columns = before.columns.first(before.number)
    done = ends[first - 1] if first else 0
    for at, message, shape, one in zip(places, private, shapes, texts, strict=True):
        pieces += (text[done : (ends[at - 1] if at else 0)], b"," if at else b"[", one)
        done = ends[at]
        columns.replace(at, message, shape, one)
    pieces.append(text[done : before.size])
    return Remembered(columns, before.number), pieces


def _usual(new: Sequence[Any], codec: Codec) -> tuple[list[Any], list[ModelShape], list[bytes]]:
    """Return private copies, shapes and texts of the values before the first one that is no plain message."""
    private: list[Any] = []
    shapes: list[ModelShape] = []
    for message in new:
        shape = codec.shape_of(type(message))
        try:
            copied = None if shape is None else shape.snapshot(message)
        except Exception:  # not a complete message: encoding it raises the right error
            copied = None
        if shape is None or copied is None:
            break
        private.append(copied)
        shapes.append(shape)
    by_kind = {shape.cls: shape for shape in shapes}
    texts = model_texts(private, by_kind)
    if texts is None:  # one of them has a nested value that is not plain
        texts = []
        for message in private:
            if (one := model_texts([message], by_kind)) is None:
                break
            texts += one
    return private[: len(texts)], shapes, texts


def _remember(same: Remembered, private: list[Any], shapes: Sequence[ModelShape], texts: Sequence[bytes]) -> Remembered:
    if not private:
        return same
    with _lock:
        columns = same.columns
        if not same.number:
            columns = new_columns()
        elif len(columns.fields) != same.number:  # another list has added messages, or was interrupted while it did
            columns = columns.first(same.number)
        for message, shape, text in zip(private, shapes, texts, strict=False):
            columns.add(message, shape, text)
        return Remembered(columns, len(columns.kinds))
