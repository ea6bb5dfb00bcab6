"""Encode values with Perdure's codec, or with a serializer that the user assigned to `saver.serde`.

An assigned serializer, such as LangGraph's EncryptedSerializer, encodes each value and the metadata. Its bytes cannot
be read without it. They cannot be compared either, so every checkpoint stores all its values in full.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure import External
from perdure.adapters import Codec, decode, encode, encode_noting
from perdure.errors import Undecodable, UsageError

_TYPE = "perdure"
_OPAQUE = b"\x00"  # no text of the codec starts with it


class PerdureSerde:
    """Perdure's codec as a LangGraph serializer: the default of a saver."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return _TYPE, encode(obj, self.codec)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, text = data
        if kind != _TYPE:
            raise Undecodable(f"this serializer reads {_TYPE!r}, not {kind!r}")
        return decode(text, self.codec)

    def with_classes(self, classes: Collection[tuple[str, ...]]) -> PerdureSerde:
        codec = self.codec.with_classes((str(one[0]), str(one[1])) for one in classes if len(one) == 2)
        return self if codec is self.codec else PerdureSerde(codec)


def value_to_text(value: Any, serde: SerializerProtocol) -> tuple[bytes, Sequence[External[Any]]]:
    """Encode a single value, such as a pending write. Return the large values that it refers to as well."""
    if isinstance(serde, PerdureSerde):
        return encode_noting(value, serde.codec)
    kind, data = serde.dumps_typed(value)
    return _OPAQUE + kind.encode() + _OPAQUE + data, ()


def value_from_text(text: bytes, serde: SerializerProtocol, codec: Codec) -> Any:
    """Decode a value that `value_to_text` encoded."""
    if text[:1] != _OPAQUE:
        return decode(text, serde.codec if isinstance(serde, PerdureSerde) else codec)
    kind, _, data = text[1:].partition(_OPAQUE)
    return load_opaque((kind.decode(), data), serde)


def load_opaque(typed: Any, serde: SerializerProtocol) -> Any:
    """Decode a value that an assigned serializer encoded. Raises UsageError if none is assigned now."""
    if isinstance(serde, PerdureSerde):
        raise UsageError(
            f"this checkpoint was stored with an assigned serializer ({typed[0]!r}): assign the same one to saver.serde"
        )
    return serde.loads_typed((typed[0], typed[1]))
