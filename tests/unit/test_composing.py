"""Several differences as one: the text is the same as after one by one, whatever they do to each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import Undecodable
from perdure.log.packs import Member, Packs, diffs_in, make_pack, salts_in, whole_in
from perdure.values.composing import compose
from perdure.values.delta import Splices, apply_all, apply_splices, pack_splices, unpack_run
from perdure.values.dictionary import Dictionary

TEXT = bytes(range(97, 123)) * 4


def splices_of(chance: random.Random, size: int) -> Splices:
    """A difference to a text of `size` bytes, with empty splices and ones that touch each other."""
    made: Splices = []
    at = 0
    for _ in range(chance.randrange(4)):
        skip = chance.randrange(min(size - at, chance.choice((0, 3, 60))) + 1)
        drop = chance.randrange(min(size - at - skip, chance.choice((0, 2, 40))) + 1)
        made += (skip, drop, chance.randbytes(chance.choice((0, 0, 1, 5))))
        at += skip + drop
    return made


def chain_of(seed: int, length: int) -> tuple[list[Splices], list[bytes]]:
    chance = random.Random(seed)
    texts, chain = [TEXT], list[Splices]()
    for _ in range(length):
        chain.append(splices_of(chance, len(texts[-1])))
        texts.append(apply_splices(texts[-1], chain[-1]))
    return chain, texts


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 2**32), st.integers(0, 12))
def test_one_difference_does_what_all_did(seed: int, length: int) -> None:
    chain, texts = chain_of(seed, length)
    composed = compose(chain)
    assert composed is not None
    assert apply_splices(TEXT, composed) == texts[-1]


def test_what_is_appended_again_and_again_is_one_splice() -> None:
    chain: list[Splices] = [[5, 1, b"%d" % number, 10 + number, 0, b"x"] for number in range(9)]
    composed = compose(chain)
    assert composed == [5, 1, b"8", 10, 0, b"x" * 9]


def test_what_was_inserted_and_dropped_never_was() -> None:
    assert compose([[3, 0, b"gone"], [3, 4, b""]]) == []


def test_a_patch_cannot_be_said_without_the_text() -> None:
    assert compose([[0, 1, b"a"], [0, -3, b"frame"]]) is None


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("key_text", [b"", b"short", TEXT * 2000])
def test_a_pack_gives_each_and_all(passed: bool, key_text: bytes) -> None:
    chain, texts = chain_of(7, 40)
    members = [Member(bytes([number]) * 16, pack_splices(splices)) for number, splices in enumerate(chain)]
    data = make_pack(members, key_text, passed=passed)
    assert diffs_in(data, key_text) == [member.diff for member in members]
    assert salts_in(data) == [member.salt for member in members]
    assert bool(whole_in(data, key_text)) == passed
    packs = Packs([(1, data)])
    for number in (1, 17, 39, 40, None):
        run = packs.run(1, number, key_text)
        assert apply_all(TEXT, [run], Dictionary(TEXT)) == texts[40 if number is None else number]
    assert len(unpack_run(packs.run(1, None, key_text))) == (1 if passed else 40)
    with pytest.raises(Undecodable, match="fewer"):
        packs.run(1, 41, key_text)


def test_a_pack_with_a_patch_has_only_each() -> None:
    members = [Member(bytes(16), pack_splices([0, -4, b"frame"]))] * 8
    data = make_pack(members, TEXT)
    assert not whole_in(data, TEXT)
    assert diffs_in(data, TEXT) == [member.diff for member in members]


def test_a_damaged_pack_is_refused_or_read_and_never_crashes() -> None:
    chain, _ = chain_of(3, 12)
    members = [Member(bytes(16), pack_splices(splices)) for splices in chain]
    data = make_pack(members, TEXT)
    chance = random.Random(1)
    for _ in range(300):
        at = chance.randrange(len(data))
        bad = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        packs = Packs([(1, bad)])
        for number in (5, None):
            try:
                packs.run(1, number, TEXT)
                packs.diff(1, 2, TEXT)
            except Undecodable:
                pass
    for size in range(0, len(data), 7):
        with pytest.raises(Undecodable):
            Packs([(1, data[:size])]).run(1, 5, TEXT)
