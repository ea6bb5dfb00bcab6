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
        if not self.number:
            return list(decode(tail, codec))
        items = self.columns.lend(self.number)
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


NOTHING: Final = Remembered(PlainColumns(), 0)


class Written(NamedTuple):
    """The text of a list of messages: the first `kept` bytes of the parent's list, then `text`, with the last bracket.

    `messages` is the cache of it.
    """

    kept: int
    text: bytes
    messages: Remembered


def write_messages(values: list[Any], before: Remembered, codec: Codec) -> Written | None:
    """Encode a list of messages; `before` is the cache of the parent's list. Raises Unstorable.

    The values from the first one on that is no plain message are encoded like other values, and not cached. Return None
    if no message can be cached, or if the text would be too large.
    """
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
