"""Which records go into a pack together: pieces of one line, of what is not packed yet."""

from __future__ import annotations

import itertools
import random

from perdure.log.pack_plan import GROUP_MIN, PackNode, group
from perdure.log.packs import BYTES_MAX, MEMBERS_MAX


def line(count: int, *, start: int = 1, base: int = 0, body: int | None = None) -> dict[int, PackNode]:
    nodes = {}
    for number in range(start, start + count):
        nodes[number] = PackNode(number, base, 0, 1000 + number if body is None else body, 100)
        base = number
    return nodes


def sized(nodes: dict[int, PackNode], size: int = 100) -> dict[int, int]:
    return dict.fromkeys(nodes, size)


def test_a_line_is_cut_into_groups_of_64() -> None:
    nodes = line(150)
    found = group(nodes, sized(nodes))
    assert [len(pack) for pack in found] == [64, 64, 22]
    assert [record for pack in found for record in pack] == list(nodes)


def test_too_few_stay_as_they_are() -> None:
    nodes = line(64 + GROUP_MIN - 1)
    assert [len(pack) for pack in group(nodes, sized(nodes))] == [64]


def test_a_line_is_cut_where_it_branches() -> None:
    nodes = line(30) | line(20, start=100, base=15)
    found = group(nodes, sized(nodes))
    assert sorted(found) == [list(range(1, 16)), list(range(16, 31)), list(range(100, 120))]


def test_what_is_packed_stays_as_it_is() -> None:
    nodes = line(10, body=-1) | line(20, start=100, base=10)
    assert group(nodes, sized(nodes)) == [list(range(100, 120))]


def test_large_differences_stay_by_themselves_and_packs_are_bounded() -> None:
    nodes = line(40)
    sizes = sized(nodes, BYTES_MAX // 16)
    sizes[20] = BYTES_MAX
    found = group(nodes, sizes)
    assert not any(20 in piece for piece in found)
    assert all(sum(sizes[record] for record in piece) <= BYTES_MAX for piece in found)


def test_a_group_is_a_piece_of_a_line_and_no_record_is_in_two() -> None:
    """Random trees, packed in part."""
    for seed in range(300):
        chance = random.Random(seed)
        nodes: dict[int, PackNode] = {}
        for number in range(1, chance.randint(2, 200)):
            base = number - 1 if chance.random() < 0.9 else chance.randrange(number)
            body = -1 if chance.random() < 0.05 else 10_000 + number
            nodes[number] = PackNode(number, base, 0, body, 100)
        found = group(nodes, {number: chance.randint(1, 1000) for number in nodes})
        seen = [record for piece in found for record in piece]
        assert len(seen) == len(set(seen))
        assert all(nodes[record].body >= 0 for record in seen)
        for piece in found:
            assert GROUP_MIN <= len(piece) <= MEMBERS_MAX
            assert all(nodes[after].base == before for before, after in itertools.pairwise(piece))
