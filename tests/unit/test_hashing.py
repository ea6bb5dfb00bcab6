"""The hash of a text: depends on every byte and the salt, and not on how its chunks' digests were come by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.values.hashing import CHUNK_BYTES, chunk_digests, content_digest


def digest(salt: bytes, data: bytes) -> bytes:
    return content_digest(salt, len(data), chunk_digests(data))


def test_digest_depends_on_salt_length_and_every_chunk() -> None:
    data = bytes(range(256)) * 1024
    seen = {
        digest(b"salt", data),
        digest(b"salu", data),
        digest(b"", b"salt" + data),
        digest(b"salt", data[:-1]),
    }
    for at in range(0, len(data), CHUNK_BYTES):
        seen.add(digest(b"salt", data[:at] + b"!" + data[at + 1 :]))
    assert len(seen) == 4 + len(data) // CHUNK_BYTES
    assert all(len(one) == 32 for one in seen)
    assert digest(b"", b"") != digest(b"", b"\0")


@given(st.integers(0, 5 * CHUNK_BYTES), st.integers(0, 5 * CHUNK_BYTES), st.integers(-3, 3))
def test_reused_chunk_digests_give_the_same_digest(first: int, second: int, grown: int) -> None:
    old = bytes(range(251)) * 1000
    size = len(old)
    low, high = sorted((min(first, size - 8), min(second, size - 8)))
    # Two edits: bytes change at `low`, and at `high` some are added or taken away.
    new = old[:low] + b"!" + old[low + 1 : high] + b"?" * (3 + grown) + old[high + 3 :]
    same = [(0, low), (low + 1, max(low + 1, high))]
    known = chunk_digests(old)
    assert chunk_digests(new, known, same) == chunk_digests(new)
    assert content_digest(b"s", len(new), chunk_digests(new, known, same)) == digest(b"s", new)


def test_unchanged_chunks_are_not_hashed_again() -> None:
    data = b"x" * (3 * CHUNK_BYTES + 5)
    marked = (b"1", b"2", b"3", b"4")
    head = [(0, 2 * CHUNK_BYTES)]
    assert chunk_digests(data, marked, head)[:2] == marked[:2]
    assert chunk_digests(data, marked, head)[2:] == chunk_digests(data)[2:]
    assert chunk_digests(data, marked, [(0, 5), (CHUNK_BYTES, len(data))])[1:3] == marked[1:3]
