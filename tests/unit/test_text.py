"""Texts: leaves are found again from the bytes alone, and digests do not depend on how they were come by."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.values.limits import SMALL_TEXT_BYTES
from holdfast.values.registry import Codec
from holdfast.values.text import (
    CHUNK_BYTES,
    LEAVES_MAX,
    chunk_digests,
    content_digest,
    digest,
    encode_text,
    split_text,
)

CODEC = Codec()

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=6),
    max_leaves=30,
)
states = st.dictionaries(st.text(max_size=6), values, max_size=8)


@given(states)
def test_text_is_the_json_of_the_state(state: dict[str, object]) -> None:
    text = encode_text(state, CODEC)
    if b'"^' not in text.data:
        assert msgspec.json.decode(text.data) == state


@given(states | values)
def test_split_finds_the_leaves_that_encode_knew(state: object) -> None:
    padded = {"padding": "x" * SMALL_TEXT_BYTES, **state} if isinstance(state, dict) else state
    text = encode_text(padded, CODEC)
    assert split_text(text.data) == text


def test_a_small_state_is_one_leaf() -> None:
    text = encode_text({"a": 1, "b": {"c": "x"}}, CODEC)
    assert text.leaves == [((), 0, len(text.data))]


@given(states)
def test_leaves_are_in_order_and_within_the_text(state: dict[str, object]) -> None:
    text = encode_text(state, CODEC)
    at = 0
    for _, start, end in text.leaves:
        assert at <= start < end <= len(text.data)
        at = end


def test_leaf_paths_follow_nested_dicts() -> None:
    long = "x" * SMALL_TEXT_BYTES
    text = encode_text({"a": {"b": [1, 2], "c": {}}, "d": long}, CODEC)
    assert text.data == b'{"a":{"b":[1,2],"c":{}},"d":"%s"}' % long.encode()
    assert [(path, text.data[start:end]) for path, start, end in text.leaves] == [
        (("a", "b"), b"[1,2]"),
        (("a", "c"), b"{}"),
        (("d",), b'"%s"' % long.encode()),
    ]


def test_a_root_that_is_no_dict_is_one_leaf() -> None:
    text = encode_text([1, {"a": 2}], CODEC)
    assert text.leaves == [((), 0, len(text.data))]
    assert encode_text({}, CODEC).leaves == [((), 0, 2)]


@pytest.mark.parametrize("count", [LEAVES_MAX - 1, LEAVES_MAX, LEAVES_MAX + 1, 10_000])
def test_leaves_are_limited(count: int) -> None:
    state = {"first": {"a": 1, "b": 2}, "many": {f"k{n}": n for n in range(count)}, "last": {"c": 3, "d": 4}}
    text = encode_text(state, CODEC)
    assert len(text.leaves) <= LEAVES_MAX
    assert split_text(text.data) == text


def test_deep_nesting_ends_in_a_leaf() -> None:
    state: dict[str, object] = {}
    for _ in range(100):
        state = {"a": state, "b": 1}
    text = encode_text(state, CODEC)
    assert split_text(text.data) == text
    assert max(len(path) for path in text.paths) < 20


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a":1',
        b'{ "a":1}',
        b'{"a":1,"a":2}',
        b'{"\\u0061":1}',
        b'{"a": 1}',
        b'{"a":1}x',
        b"\xff",
        b"{}{}",
    ],
)
def test_text_that_is_not_ours_is_one_leaf(data: bytes) -> None:
    assert split_text(data).leaves == [((), 0, len(data))]


@given(st.binary(max_size=200))
def test_any_bytes_can_be_split(data: bytes) -> None:
    text = split_text(data)
    assert text.data == data
    assert all(0 <= start <= end <= len(data) for _, start, end in text.leaves)


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
    same = [(low + 1, high)] if low < high else []
    known = chunk_digests(old)
    assert chunk_digests(new, known, low, same) == chunk_digests(new)
    assert content_digest(b"s", len(new), chunk_digests(new, known, low, same)) == digest(b"s", new)


def test_unchanged_chunks_are_not_hashed_again() -> None:
    data = b"x" * (3 * CHUNK_BYTES + 5)
    marked = (b"1", b"2", b"3", b"4")
    assert chunk_digests(data, marked, 2 * CHUNK_BYTES)[:2] == marked[:2]
    assert chunk_digests(data, marked, 2 * CHUNK_BYTES)[2:] == chunk_digests(data)[2:]
    assert chunk_digests(data, marked, 5, [(CHUNK_BYTES, len(data))])[1:3] == marked[1:3]
