"""Differences: whatever the two states are, the stored difference makes the new text from the old."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

from delta_kit import apply_all
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import examples

from perdure.values import delta
from perdure.values import dictionary as format_of
from perdure.values.codec import encode
from perdure.values.delta import Decoder, Encoder
from perdure.values.dictionary import Dictionary
from perdure.values.diff import find, same_ranges
from perdure.values.hashing import chunk_digests
from perdure.values.registry import Codec

CODEC = Codec()
SIZE_MAX = 16 << 20

keys = st.sampled_from(["a", "b", "c", "messages", "counters", "ключ", "x" * 40])
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=40)
long_texts = st.builds(lambda seed, n: random.Random(seed).randbytes(n).hex(), st.integers(0, 3), st.integers(0, 900))
values = st.recursive(
    scalars | long_texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=20,
)
states = st.dictionaries(keys, values, max_size=7)


def text_of(state: object) -> bytes:
    return encode(state, CODEC)


def check(old: bytes, new: bytes) -> bytes:
    """The stored difference, after it was shown to be right."""
    dictionary = Dictionary(old)
    splices = find(old, new)
    assert delta.apply_all(old, [[splices]]) == new
    assert splices[:1] == ([len(_common(old, new))] if old != new else [])
    diff = Encoder(dictionary).encode(splices)
    reader = Dictionary(old)
    assert apply_all(old, [diff], reader, size_max=len(old) + len(new)) == new
    known = chunk_digests(old)
    same = same_ranges(splices, len(new))
    assert chunk_digests(new, known, same) == chunk_digests(new)
    for start, end in same:
        assert old[start:end] == new[start:end]
    return diff


def _common(a: bytes, b: bytes) -> bytes:
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return a[:at]
    return min(a, b, key=len)


@given(states, states)
def test_any_two_states(old: dict[str, object], new: dict[str, object]) -> None:
    check(text_of(old), text_of(new))


@given(states, st.data())
def test_similar_states(old: dict[str, object], data: st.DataObject) -> None:
    new = dict(old)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(keys)
        if key in new and data.draw(st.booleans()):
            del new[key]
        else:
            new[key] = data.draw(values)
    check(text_of(old), text_of(new))


@given(states, st.randoms(use_true_random=False))
def test_keys_in_another_order(old: dict[str, object], rng: random.Random) -> None:
    items = list(old.items())
    rng.shuffle(items)
    check(text_of(old), text_of(dict(items)))


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_two_texts(old: bytes, new: bytes) -> None:
    check(old, new)


@given(st.lists(st.sampled_from([b"A" * 300, b"BC" * 200, b"D" * 90, b"x", b"yz" * 500]), max_size=12), st.data())
def test_moved_and_repeated_pieces(pieces: list[bytes], data: st.DataObject) -> None:
    other = data.draw(st.permutations(pieces)) + data.draw(st.lists(st.sampled_from([b"new", b"A" * 300])))
    check(b"".join(pieces), b"".join(other))


@settings(max_examples=examples(40))
@given(st.lists(states, min_size=2, max_size=5), st.integers(0, 2**32), st.integers(1, 50))
def test_chains_of_fifty(parts: list[dict[str, object]], seed: int, length: int) -> None:
    rng = random.Random(seed)
    state: dict[str, object] = {}
    texts: list[bytes] = []
    for _ in range(50):
        other = rng.choice(parts)
        state = dict(other) if rng.random() < 0.2 else state
        for key in rng.sample(list(other), len(other) // 2):
            state = {key: other[key], **state} if rng.random() < 0.5 else {**state, key: other[key]}
        texts.append(text_of(state))
    dictionary = Dictionary(texts[0])
    encoder = Encoder(dictionary)
    diffs = [encoder.encode(find(old, new)) for old, new in pairwise(texts)]
    first = texts[0]
    assert apply_all(first, diffs, dictionary, size_max=SIZE_MAX) == texts[-1]
    assert apply_all(first, diffs[: length - 1], dictionary, size_max=SIZE_MAX) == texts[length - 1]
    later = Dictionary(texts[length - 1])
    again = Encoder(later)
    moved = [again.encode(splices) for splices in Decoder(dictionary).decode(diffs)]
    assert apply_all(first, moved, later) == texts[-1]


def test_equal_texts_have_an_empty_difference() -> None:
    text = text_of({"a": ["x" * 1000] * 1000})
    assert find(text, bytes(bytearray(text))) == []
    assert check(text, text) == b"\x90"


def test_keys_added_removed_and_renamed() -> None:
    rng = random.Random(5)
    big = {f"k{n}": rng.randbytes(400).hex() for n in range(40)}
    old = {"head": 1, **big, "tail": 1}
    without = {key: value for key, value in old.items() if key not in ("k3", "k30")}
    renamed = {("other" if key == "k7" else key): value for key, value in old.items()}
    added = {"new": "short", **old, "more": "x"}
    for new in (without, renamed, added):
        assert len(check(text_of(old), text_of(new | {"tail": 2}))) < 120


def test_near_splices_are_merged() -> None:
    old = b"0" * 400 + b"a" + b"1" * 4 + b"b" + b"2" * 400
    new = b"0" * 400 + b"A" + b"1" * 4 + b"B" + b"2" * 400
    assert find(old, new) == [400, 6, b"A1111B"]


def test_two_threads_share_a_dictionary() -> None:
    from concurrent.futures import ThreadPoolExecutor

    text = text_of({"m": [str(random.Random(n).random()) for n in range(9000)]})
    dictionary = Dictionary(text)
    splices: list[int | bytes] = [5, 0, text[100:1100]]
    with ThreadPoolExecutor(8) as pool:
        diffs = set(pool.map(lambda _: Encoder(dictionary).encode(splices), range(200)))
    assert len(diffs) == 1


def test_the_dictionary_is_part_of_the_format() -> None:
    """Differences stored by an earlier version must stay readable: these bytes may never change."""
    stored = hashlib.sha256(format_of.TABLES + format_of.COMMON).hexdigest()
    assert (stored, format_of.DICT_BYTES, format_of.DICT_BYTES_MIN) == (
        "a443e5a8cf7c98104d608f74db25c3a5baf0022783f8f53e7325dcda05725505",
        32 * 1024,
        4096,
    )
    diff = bytes.fromhex("010040ec0000a30105afd123d7a82ecb4d3ea9d1b3a79fabd04a2f5a10010096909a63")
    assert apply_all(b"[]", [diff], Dictionary(b"[]")) == b"[" + b"a stored difference, " * 9 + b"]"
