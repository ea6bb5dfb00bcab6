"""How small differences are: each bar is a ratio to the zstd level 3 size of what changed, plus 100 bytes."""

from __future__ import annotations

import base64
import random
from itertools import pairwise

import pytest
from bench import workload
from delta_kit import apply_all

from perdure.values.codec import encode
from perdure.values.compress import zstd
from perdure.values.delta import Encoder
from perdure.values.dictionary import Dictionary
from perdure.values.diff import find
from perdure.values.registry import Codec

CODEC = Codec()
RNG = random.Random(11)
WORDS = ["".join(RNG.choices("etaoinshrdlu", k=RNG.randint(2, 9))) for _ in range(2000)]
State = dict[str, object]


def prose(size: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=size))[:size]


def message(number: int) -> dict[str, object]:
    return {"role": ("user", "assistant")[number % 2], "content": prose(900, number), "id": f"m{number}"}


def cost(old: State, new: State, changed: bytes, bar: float = 1.6) -> None:
    """Check the difference, and its size."""
    a, b = encode(old, CODEC), encode(new, CODEC)
    dictionary = Dictionary(a)
    diff = Encoder(dictionary).encode(find(a, b))
    assert apply_all(a, [diff], dictionary, size_max=4 << 20) == b
    assert len(diff) <= bar * (len(zstd.compress(changed, 3)) + 100)


def test_sliding_window_of_fifty_messages() -> None:
    messages = [message(number) for number in range(51)]
    for around in ({}, {"step": 1}):
        old: State = {**around, "messages": messages[:50], "n": 50}
        new: State = {**around, "messages": messages[1:], "n": 51}
        cost(old, new, str(messages[50]).encode())


def test_two_edits_far_apart_in_a_long_text() -> None:
    text = prose(100_000)
    edited = text[:10_000] + "FIRST EDIT" + text[10_030:80_000] + "second" + text[80_000:]
    cost({"text": text}, {"text": edited}, b"FIRST EDIT" + b"second")


def test_several_edits_in_a_long_text() -> None:
    text = prose(100_000)
    pieces = [text[at : at + 10_000] for at in range(0, 100_000, 10_000)]
    cost({"text": text}, {"text": "<edit>".join(pieces)}, b"<edit>" * 9)


def test_an_edit_in_the_middle_of_a_long_text() -> None:
    text = prose(100_000)
    edit = prose(500, 99)
    cost({"a": 1, "text": text}, {"a": 1, "text": text[:50_000] + edit + text[50_200:]}, edit.encode())


def _array() -> bytearray:
    return bytearray(random.Random(4).randbytes(1_000_000))


def _as_state(array: bytearray) -> State:
    return {"step": 1, "array": {"dtype": "float64", "data": base64.b64encode(array).decode()}, "end": 2}


def test_one_percent_of_an_array_changed_in_one_place() -> None:
    old, new = _array(), _array()
    new[400_000:410_000] = random.Random(5).randbytes(10_000)
    cost(_as_state(old), _as_state(new), base64.b64encode(new[400_000:410_000]))


def test_one_percent_of_an_array_changed_all_over() -> None:
    old, new = _array(), _array()
    rng = random.Random(6)
    changed = b""
    for item in sorted(rng.sample(range(125_000), 1250)):
        new[item * 8 : item * 8 + 8] = fresh = rng.randbytes(8)
        changed += fresh
    cost(_as_state(old), _as_state(new), base64.b64encode(changed), 2.2)


def test_append_to_a_list_nested_three_deep() -> None:
    def state(count: int) -> State:
        return {"a": {"b": {"c": [message(number) for number in range(count)], "d": 1}, "e": 2}, "f": 3}

    cost(state(40), state(41), str(message(40)).encode())


def test_one_key_of_ten_thousand() -> None:
    old = {f"key_{number}": prose(20, number) for number in range(10_000)}
    cost({"map": dict(old)}, {"map": {**old, "key_5000": "changed"}}, b"changed")
    cost(dict(old), {**old, "key_5000": "changed"}, b"changed")
    cost(dict(old), {**old, "another": "value"}, b'"another":"value"')


def test_counters_around_a_large_leaf() -> None:
    text = prose(100_000)
    cost({"n": 9, "text": text, "m": 99}, {"n": 10, "text": text, "m": 100}, b"10100", 0.4)


def test_reordered_messages() -> None:
    messages = [message(number) for number in range(60)]
    moved = messages[20:40] + messages[:20] + messages[40:]
    cost({"messages": messages}, {"messages": moved}, b"")


@pytest.mark.timeout(60)
def test_the_workload_takes_at_most_320_bytes_per_step() -> None:
    texts = [encode(state, CODEC) for state in workload.steps(500)][200:]
    encoder = Encoder(Dictionary(texts[0]))
    sizes = [len(encoder.encode(find(old, new))) for old, new in pairwise(texts)]
    assert sum(sizes) / len(sizes) <= 320
