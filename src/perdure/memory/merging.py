"""Items whose values merge on write (`values/crdts.py`). `sharing.py` brings them from one store to another.

The merge happens in the transaction that writes the version, under the lock of the namespace. There a change in hand
gets its writer and its number. The writer is the item: store, era, namespace and key. The number is that of the row.
It never falls, also if the item went back to a snapshot or was deleted: no other store takes a change for an old one.
"""

from __future__ import annotations

from blake3 import blake3
from msgspec.structs import replace

from perdure.errors import UsageError
from perdure.memory.labels import unescaped
from perdure.memory.models import indexed
from perdure.memory.rows import Content, ItemRow, NewVersion, pack
from perdure.memory.words import Analyzer
from perdure.values.codec import decode, encode
from perdure.values.crdts import PREFIX, Mergeable
from perdure.values.registry import Codec

_START = f'{{"^obj":["{PREFIX}'.encode()  # of the text of each


def merging_value(content: Content, codec: Codec) -> Mergeable | None:
    """Return the value of an item if it is one that merges, else None. It runs no code of the user's."""
    if not content.value.startswith(_START):
        return None
    value = decode(content.value, codec)
    return value if isinstance(value, Mergeable) else None


class Merge:
    """Merges a value with the one that an item holds. `keeps`: the item keeps its kind, pin, validity and texts."""

    __slots__ = ("_codec", "_content", "_keeps", "_value", "_words", "body")

    def __init__(
        self, value: Mergeable, content: Content, codec: Codec, words: Analyzer, *, keeps: bool = False
    ) -> None:
        self._value, self._content, self._keeps = value, content, keeps
        self._codec, self._words = codec, words
        self.body = b""  # of the last attempt: a write whose answer was lost is found by it

    def __call__(self, change: NewVersion, old: ItemRow | None, identity: str, number: int, at: int) -> NewVersion:
        """Return the version to write. Raises UsageError if the values cannot merge."""
        value, content = self._value, self._content
        if old is not None:
            before = merging_value(old.content(), self._codec)
            if before is None:
                raise UsageError(
                    f"item {unescaped(old.key)!r} holds a value that does not merge: nothing was written; delete it "
                    "first, or use another key"
                )
            value = before.merge(value)
            if self._keeps:
                content = old.content()
                kept = {name: getattr(old, name) for name in ("kind", "valid_from", "valid_to", "expires")}
                change = replace(change, pinned=bool(old.pinned), **kept)
        writer = blake3(f"{identity} {change.key}".encode()).hexdigest()[:16]
        content = content._replace(value=encode(value._stamped(writer, number, at), self._codec))
        self.body = pack(content)
        return replace(change, body=self.body, words=self._words.pack(indexed(content, change.key, self._codec)))
