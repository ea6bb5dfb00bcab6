"""The newest messages of a line, remembered column by column, so that those that did not change cost next to nothing.

A message of the next checkpoint that is equal to what is remembered of it, whatever object it is, is not encoded again,
and a state that is handed out is made of copies of what is remembered (`columns`).

The columns of a line are shared by its checkpoints, each of which has the first so many of them: only the newest adds
to them, and one that follows an older one copies them first.

Must never happen here: a message taken for unchanged though its text would be another, and an object in two hands.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from perdure.adapters import SIZE_MAX, Codec, ModelShape, decode, encode, model_texts
from perdure.langgraph.columns import Columns, PlainColumns, new_columns

_WEIGHT_BYTES: Final = 700  # about what the columns take for one message, beside its text
_lock = Lock()


class Remembered(NamedTuple):
    """A list of messages as it was written: the first `number` of the columns."""

    columns: Columns
    number: int

    @property
    def size(self) -> int:
        """How many bytes its text has, without the last bracket."""
        return self.columns.ends[self.number - 1] if self.number else 0

    @property
    def weight_bytes(self) -> int:
        return self.number * _WEIGHT_BYTES + 2 * self.size  # values that are not flat are kept twice

    def copies(self) -> list[Any]:
        """Return the messages as new objects. They share only values that cannot be changed."""
        return self.columns.copies(self.number)

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
            number = self.columns.unchanged(values, self.number)
            return self if number == self.number else Remembered(self.columns, number)
        except Exception:  # something that is none of a message's attributes, or cannot be compared
            return NOTHING


NOTHING: Final = Remembered(PlainColumns(), 0)


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


def _usual(new: Sequence[Any], codec: Codec) -> tuple[list[Any], list[ModelShape], list[bytes]]:
    """Private copies of the first messages, up to one that is unusual, with their shapes and texts."""
    private: list[Any] = []
    shapes: list[ModelShape] = []
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
    texts = model_texts(private, by_kind)
    if texts is None:  # one of them is not plain all the way down
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
        elif len(columns.fields) != same.number:  # another list has added, or begun to
            columns = columns.first(same.number)
        for message, shape, text in zip(private, shapes, texts, strict=False):
            columns.add(message, shape, text)
        return Remembered(columns, len(columns.kinds))
