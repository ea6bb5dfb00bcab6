"""Encode values to text, and decode text to values.

The text is compact JSON in UTF-8, with tags for values that JSON cannot hold. Plain values take the fast path of
`plain`, others go through `tagged`; `revive` reads the tags. A value and its text share nothing, so changing a value
after a save does not change what was saved. No other thread may change a value while it is encoded.

Decoding never executes what it reads. For any bytes it raises only UnknownType or Undecodable. If a key occurs twice in
an object, the last one counts, as in most parsers. Perdure never writes such text.
"""

from __future__ import annotations

from typing import Any

import orjson

from perdure.errors import Undecodable, UnknownType, Unstorable
from perdure.values.limits import DEPTH_MAX, NODES_MAX, SIZE_MAX
from perdure.values.model_tags import text_of
from perdure.values.plain import PLAIN, TooMany, may_hold_tags, plain_text
from perdure.values.registry import Codec, reader
from perdure.values.revive import Reviver
from perdure.values.tagged import lower_to_text

__all__ = [
    "DEPTH_MAX",
    "NODES_MAX",
    "SIZE_MAX",
    "Codec",
    "decode",
    "encode",
]

_FEW = 64


def encode(value: object, codec: Codec) -> bytes:
    """Return the text of a value. Raises Unstorable, with the path and the fix, if it cannot be kept exactly."""
    if type(value) is list and 0 < len(value) <= _FEW and (few := few_models(value, codec)) is not None:
        return few  # most tasks of a chat return a few messages
    try:
        text = plain_text(value, DEPTH_MAX)
    except TooMany:
        text = None
    if text is None:
        return lower_to_text(value, codec)
    if len(text) > SIZE_MAX:
        raise Unstorable(f"the text has {len(text):,} bytes, and the limit is {SIZE_MAX:,}; keep large data elsewhere")
    return text


def few_models(values: list[Any], codec: Codec) -> bytes | None:
    """Return the text of a list of a few models with tags; None if it holds other values, or an unusual model."""
    if type(values[0]) in PLAIN:
        return None
    shapes = {kind: shape for kind in set(map(type, values)) if (shape := codec.shape_of(kind)) is not None}
    try:
        return text_of(values, shapes, DEPTH_MAX - 4)
    except Exception:  # another class among them, or a broken model: the general path names it
        return None


def decode(text: bytes, codec: Codec, *, raw: bool = False) -> Any:
    """Return the value of a text. With `raw`, objects become readable dicts (`revive`), also of unknown classes."""
    if len(text) > SIZE_MAX:
        raise Undecodable(f"stored text has {len(text):,} bytes, and the limit is {SIZE_MAX:,}")
    try:
        parsed = orjson.loads(text)
    except ValueError as problem:
        raise Undecodable(f"stored text is not JSON: {problem}") from problem
    if not may_hold_tags(text):
        return parsed
    before = None if codec.values is None else reader.set(codec.values)
    try:
        # The parser refuses more than 1024 levels: deep enough for everything that was saved, and safe to walk.
        return Reviver(codec, raw=raw).revive(parsed)
    except (Undecodable, UnknownType, MemoryError):
        raise
    except Exception as problem:
        # Hostile text can take any shape, and rebuilding may run into any error of any library.
        raise Undecodable(f"stored text does not hold a value: {problem!r}"[:500]) from problem
    finally:
        if before is not None:
            reader.reset(before)
