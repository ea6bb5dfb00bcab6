"""A pack gives back every difference and salt that was put into it, and a damaged one never crashes a reader."""

from __future__ import annotations

import random

import pytest

from perdure.errors import Undecodable
from perdure.log.packs import Member, Packs, make_pack, salts_in
from perdure.values.delta import pack_splices

TEXT = bytes(range(97, 123)) * 4


def members_of(seed: int, count: int) -> list[Member]:
    chance = random.Random(seed)
    return [
        Member(chance.randbytes(16), pack_splices([chance.randrange(9), 1, chance.randbytes(chance.randrange(6))]))
        for _ in range(count)
    ]


@pytest.mark.parametrize("key_text", [b"", b"short", TEXT * 2000])
def test_a_pack_gives_each_difference_back(key_text: bytes) -> None:
    members = members_of(7, 40)
    data = make_pack(members, key_text)
    assert salts_in(data) == [member.salt for member in members]
    packs = Packs([(1, data)])
    for number in (0, 1, 39, 40):
        found = [pack_splices(splices) for splices in packs.splices(1, number, key_text)]
        assert found == [member.diff for member in members[:number]]
    with pytest.raises(Undecodable, match="fewer"):
        packs.splices(1, 41, key_text)


def test_a_damaged_pack_is_refused_or_read_and_never_crashes() -> None:
    data = make_pack(members_of(3, 12), TEXT)
    chance = random.Random(1)
    for _ in range(300):
        at = chance.randrange(len(data))
        bad = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        try:
            Packs([(1, bad)]).splices(1, 3, TEXT)
        except Undecodable:
            pass
    for size in range(0, len(data), 7):
        with pytest.raises(Undecodable):
            Packs([(1, data[:size])]).splices(1, 6, TEXT)
