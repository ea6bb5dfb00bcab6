"""The hash of a state's text: salted, and made from the digests of its chunks.

A chunk that did not change keeps its digest, so that a save of a large state hashes only what is new. What must never
happen here: two digests for the same salt and text, however its chunks' digests were come by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

CHUNK_BYTES = 64 * 1024


def digest(salt: bytes, data: bytes) -> bytes:
    """The content hash of a text: 32 bytes that say nothing about it without the salt."""
    return content_digest(salt, len(data), chunk_digests(data))


def content_digest(salt: bytes, size: int, chunks: Sequence[bytes]) -> bytes:
    """The content hash from the digests of the chunks of a text of `size` bytes."""
    # Both lengths are fixed in width, so that no two inputs give the same bytes.
    head = len(salt).to_bytes(8, "big") + salt + size.to_bytes(8, "big")
    return blake3(head + b"".join(chunks)).digest()


def chunk_digests(
    data: bytes,
    known: Sequence[bytes] = (),
    common_head: int = 0,
    same: Sequence[tuple[int, int]] = (),
) -> tuple[bytes, ...]:
    """The digest of each 64 KiB chunk; chunks that did not change are taken from `known`. A shorter text stands for
    itself: hashing it twice would prove no more.

    `known` are the chunk digests of another text that has the same bytes as `data` at the same offsets in
    `data[:common_head]` and in every range (start, end) of `same`, ascending. Hashing costs 156 µs per MB,
    which would be most of a save.
    """
    size = len(data)
    if size < CHUNK_BYTES:
        return (data,)
    view = memoryview(data)
    hasher: Callable[..., blake3] = blake3
    ranges = iter(((0, common_head), *same))
    start, end = next(ranges)
    found: list[bytes] = []
    for number, at in enumerate(range(0, size, CHUNK_BYTES)):
        stop = at + CHUNK_BYTES
        while end < stop:
            nearer = next(ranges, None)
            if nearer is None:
                start, end = size, size + CHUNK_BYTES
            else:
                start, end = nearer
        # Only whole chunks: the last one of the other text may have ended elsewhere.
        if start <= at and stop <= size and number < len(known):
            found.append(known[number])
        else:
            found.append(hasher(view[at:stop]).digest())
    return tuple(found)
