"""Decoders meet bytes that are not theirs: `Undecodable`, never a crash, never memory beyond the bound."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from delta_kit import apply_all
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import Undecodable
from perdure.values.compress import compress_full, decompress_full, zstd
from perdure.values.delta import Encoder
from perdure.values.dictionary import Dictionary
from perdure.values.diff import find

RNG = random.Random(3)
WORDS = [RNG.randbytes(RNG.randint(1, 4)).hex() for _ in range(400)]
OLD = " ".join(RNG.choices(WORDS, k=30_000)).encode()
NEW = OLD[:70_000] + " ".join(RNG.choices(WORDS, k=300)).encode() + OLD[70_100:]
DICTIONARY = Dictionary(OLD)
DIFF = Encoder(DICTIONARY).encode(find(OLD, NEW))
# Many scattered bytes changed: a patch.
SCATTERED = bytes(byte ^ (at % 997 == 0) for at, byte in enumerate(OLD))
PATCH = Encoder(DICTIONARY).encode(find(OLD, SCATTERED))
SIZE_MAX = 1 << 20


def packed(*parts: object) -> bytes:
    return msgspec.msgpack.encode(list(parts))


def test_the_samples_are_what_they_should_be() -> None:
    assert DIFF[0] == 1
    drop = find(OLD, SCATTERED)[1]
    assert type(drop) is int
    assert drop < 0
    assert apply_all(OLD, [DIFF], DICTIONARY, size_max=SIZE_MAX) == NEW
    assert apply_all(OLD, [PATCH], DICTIONARY, size_max=SIZE_MAX) == SCATTERED


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\x01", b"\x02", b"\x93", b"\xdd", b"\x01\x24", b"\x02\x60"]),
)
def test_random_bytes(junk: bytes, kind: bytes) -> None:
    try:
        result = apply_all(OLD, [kind + junk], DICTIONARY, size_max=len(OLD) + 1000)
    except Undecodable:
        return
    assert len(result) <= len(OLD) + 1000


@pytest.mark.parametrize(("diff", "right"), [(DIFF, NEW), (PATCH, SCATTERED)])
def test_a_difference_that_is_cut_short_gives_nothing_else(diff: bytes, right: bytes) -> None:
    """The last bytes of a stream's block may say nothing; without any other the text cannot come out."""
    for size in {*range(min(len(diff), 200)), *range(0, len(diff), 37), len(diff) - 1}:
        try:
            assert apply_all(OLD, [diff[:size]], DICTIONARY, size_max=SIZE_MAX) == right
            assert size >= len(diff) - 4
        except Undecodable:
            pass


def test_a_stream_whose_start_is_missing_is_noticed() -> None:
    encoder = Encoder(DICTIONARY)
    ops = find(OLD, NEW)
    first, second = encoder.encode(ops), encoder.encode(find(NEW, OLD))
    assert apply_all(OLD, [first, second], DICTIONARY, size_max=SIZE_MAX) == OLD
    with pytest.raises(Undecodable, match="start is missing"):
        apply_all(NEW, [second], DICTIONARY, size_max=SIZE_MAX)


@pytest.mark.parametrize("diff", [DIFF, PATCH])
def test_flipped_bits_never_crash(diff: bytes) -> None:
    """What comes out may be another text: the log's content hash is what tells."""
    rng = random.Random(9)
    for _ in range(400):
        at = rng.randrange(len(diff))
        bad = diff[:at] + bytes([diff[at] ^ 1 << rng.randrange(8)]) + diff[at + 1 :]
        try:
            assert len(apply_all(OLD, [bad], DICTIONARY, size_max=SIZE_MAX)) <= SIZE_MAX
        except Undecodable:
            pass


@pytest.mark.parametrize(
    "diff",
    [
        b"",
        b"\x00",
        b"\x03abc",
        b"\x80",
        packed(1),
        packed(0, 0),
        packed(-1, 0, b"x"),
        packed(0, len(OLD) + 1, b""),
        packed(len(OLD) + 1, 0, b""),
        packed(0, 0, 5),
        packed(b"a", 0, b"x"),
        packed(0, b"a", b"x"),
        packed(0, 0, "text"),
        packed(0, 0, 1.5),
        packed(0, 0, [1]),
        packed(2**63, 2**63, b""),
        packed(2**63, -(2**63), b""),
        packed(0, -(2**63), b"x"),
        packed(0, -1, b"no frame"),
        packed(0, -1 - len(OLD), b"no frame"),
        packed(0, -9, zstd.compress(b"x" * 100)[:-1]),
        packed(5, -(len(OLD)), zstd.compress(b"x")),
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\xff\xff",
        b"\x91\xc6\xff\xff\xff\xff",
    ],
)
def test_malformed_splices(diff: bytes) -> None:
    with pytest.raises(Undecodable):
        apply_all(OLD, [diff], DICTIONARY, size_max=SIZE_MAX)


def test_a_patch_on_another_text_is_noticed() -> None:
    with pytest.raises(Undecodable):
        apply_all(NEW, [PATCH], DICTIONARY, size_max=SIZE_MAX)


def _bomb(size: int) -> bytes:
    return Encoder(Dictionary(b"")).encode([0, 0, b"\0" * size])


def test_bombs_allocate_no_more_than_the_bound() -> None:
    size = 64 << 20
    patch = packed(0, -301, zstd.compress(b"\0" * size))
    bomb = _bomb(size)
    keyframe = compress_full(b"\0" * size)
    small = b"\0" * 300
    tracemalloc.start()
    try:
        for diff in (bomb, patch):
            with pytest.raises(Undecodable):
                apply_all(small, [diff], Dictionary(b""), size_max=1000)
        with pytest.raises(Undecodable):
            decompress_full(keyframe, 1000)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_growth_over_the_limit_is_refused() -> None:
    grow = Encoder(Dictionary(b"")).encode([0, 0, b"x" * 60])
    assert len(apply_all(b"", [grow] * 10, Dictionary(b""), size_max=600)) == 600
    with pytest.raises(Undecodable, match="over the limit"):
        apply_all(b"", [grow] * 11, Dictionary(b""), size_max=600)


@given(st.binary(max_size=5000))
def test_full_texts_come_back(text: bytes) -> None:
    assert decompress_full(compress_full(text), len(text)) == text


def test_full_texts_that_lie() -> None:
    blob = compress_full(OLD)
    for size in (0, len(OLD) - 1, len(OLD) + 1):
        with pytest.raises(Undecodable):
            decompress_full(blob, size)
    for bad in (b"", blob[:4], blob[:-1], blob + b"\0", blob + blob, blob[:5000] + b"!" + blob[5001:]):
        with pytest.raises(Undecodable):
            decompress_full(bad, len(OLD))
    without_size = zstd.compress(OLD, options={zstd.CompressionParameter.content_size_flag: 0})
    with pytest.raises(Undecodable):
        decompress_full(without_size, len(OLD))


@given(st.binary(max_size=100), st.integers(0, 1000))
def test_full_texts_from_junk(junk: bytes, size: int) -> None:
    for blob in (junk, b"\x28\xb5\x2f\xfd" + junk):
        try:
            assert len(decompress_full(blob, size)) == size
        except Undecodable:
            pass
