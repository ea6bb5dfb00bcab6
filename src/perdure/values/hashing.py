"""The hash of a state's text: salted, and made from the digests of its chunks.

A chunk that did not change keeps its digest, so that a save of a large state hashes only new chunks. The same salt and
text always have the same hash, whether the digests of the chunks were computed or taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from blake3 import blake3

CHUNK_BYTES = 16 * 1024


def content_digest(salt: bytes, size: int, chunks: Sequence[bytes]) -> bytes:
    """Return the content hash of a text of `size` bytes with these digests of chunks.

    Its 32 bytes reveal nothing about the text without the salt.
    """
    # Both lengths have a fixed width: no two inputs become the same bytes.
    head = len(salt).to_bytes(8, "big") + salt + size.to_bytes(8, "big")
    return blake3(head + b"".join(chunks)).digest()


def chunk_digests(data: bytes, known: Sequence[bytes] = (), same: Iterable[tuple[int, int]] = ()) -> tuple[bytes, ...]:
    """Return the digest of each chunk. A text shorter than a chunk is its own digest: hashing it twice proves no more.

    known: the digests of another text. They are taken over for chunks within `same`.
    same: ranges (start, end) in which that text has the same bytes at the same offsets.
    """
    if len(data) < CHUNK_BYTES:
        return (data,)
    digests: list[bytes | None] = [None] * -(-len(data) // CHUNK_BYTES)
    for start, end in same:
        whole = slice(-(-start // CHUNK_BYTES), end // CHUNK_BYTES)
        if whole.start < whole.stop:
            digests[whole] = known[whole]
    view, hasher = memoryview(data), cast("Callable[..., blake3]", blake3)  # its stub accepts only bytes
    return tuple(
        [
            one or hasher(view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]).digest()
            for number, one in enumerate(digests)
        ]
    )
