"""The hash of a state's text: salted, and made from the digests of its chunks.

A chunk that did not change keeps its digest, so that a save of a large state hashes only what is new. What must never
happen here: two digests for the same salt and text, however its chunks' digests were come by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from blake3 import blake3

CHUNK_BYTES = 16 * 1024


def digest(salt: bytes, data: bytes) -> bytes:
    """The content hash of a text: 32 bytes that say nothing about it without the salt."""
    return content_digest(salt, len(data), chunk_digests(data))


def content_digest(salt: bytes, size: int, chunks: Sequence[bytes]) -> bytes:
    """The content hash from the digests of the chunks of a text of `size` bytes."""
    # Both lengths are fixed in width, so that no two inputs give the same bytes.
    head = len(salt).to_bytes(8, "big") + salt + size.to_bytes(8, "big")
    return blake3(head + b"".join(chunks)).digest()


def chunk_digests(data: bytes, known: Sequence[bytes] = (), same: Iterable[tuple[int, int]] = ()) -> tuple[bytes, ...]:
    """The digest of each chunk; chunks that did not change are taken from `known`. A text shorter than one
    stands for itself: hashing it twice would prove no more.

    `known` are the chunk digests of another text that has the same bytes as `data` at the same offsets in every range
    (start, end) of `same`.
    """
    if len(data) < CHUNK_BYTES:
        return (data,)
    found: list[bytes | None] = [None] * -(-len(data) // CHUNK_BYTES)
    for start, end in same:
        whole = slice(-(-start // CHUNK_BYTES), end // CHUNK_BYTES)
        if whole.start < whole.stop:
            found[whole] = known[whole]
    view, hasher = memoryview(data), cast("Callable[..., blake3]", blake3)  # which is typed for bytes alone
    return tuple(
        [
            one or hasher(view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]).digest()
            for number, one in enumerate(found)
        ]
    )
