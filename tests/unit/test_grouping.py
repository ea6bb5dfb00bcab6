"""Which records go into a pack together: whole packs or none, pieces of one line, and nothing is forgotten."""

from __future__ import annotations

import itertools
import random

from perdure.log.pack_plan import GROUP_MIN, Node, group
from perdure.log.packs import BYTES_MAX, MEMBERS_MAX, MEMBERS_MIN


def line(count: int, *, start: int = 1, base: int = 0, body: int | None = None) -> dict[int, Node]:
    nodes = {}
    for number in range(start, start + count):
        nodes[number] = Node(number, base, 0, 1000 + number if body is None else body, 100)
        base = number
    return nodes


def sized(nodes: dict[int, Node], size: int = 100) -> dict[int, int]:
    return dict.fromkeys(nodes, size)


def test_a_line_is_cut_into_groups_of_64() -> None:
    nodes = line(150)
    found = group(nodes, sized(nodes))
    assert [len(pack) for pack in found.packs] == [64, 64, 22]
    assert [record for pack in found.packs for record in pack] == list(nodes)
    assert found.rest == []


def test_too_few_stay_as_they_are() -> None:
    nodes = line(64 + GROUP_MIN - 1)
    found = group(nodes, sized(nodes))
    assert [len(pack) for pack in found.packs] == [64]
    assert len(found.rest) == GROUP_MIN - 1
    assert group(line(3), {}).packs == []


def test_a_line_is_cut_where_it_branches() -> None:
    nodes = line(30) | line(20, start=100, base=15)
    found = group(nodes, sized(nodes))
    assert sorted(found.packs) == [list(range(1, 16)), list(range(16, 31)), list(range(100, 120))]


def test_a_full_pack_is_left_alone_and_a_small_one_joined() -> None:
    full = line(MEMBERS_MIN, body=-1) | line(20, start=100, base=MEMBERS_MIN)
    assert group(full, sized(full)).packs == [list(range(100, 120))]
    small = line(10, body=-1) | line(20, start=100, base=10)
    assert group(small, sized(small)).packs == [[*range(1, 11), *range(100, 120)]]


def test_a_pack_that_a_branch_has_cut_is_left_alone() -> None:
    nodes = line(20, body=-1) | line(10, start=50, base=20) | line(1, start=100, base=10)
    found = group(dict(sorted(nodes.items())), sized(nodes))
    assert found.packs == [list(range(50, 60))]
    assert found.rest == [100]


def test_a_pack_is_never_cut_by_the_limit() -> None:
    nodes: dict[int, Node] = {}
    base = 0
    for pack in range(1, 5):
        nodes |= line(30, start=pack * 100, base=base, body=-pack)
        base = pack * 100 + 29
    nodes |= line(3, start=900, base=base)
    found = group(nodes, sized(nodes))
    for piece in found.packs:
        bodies = {nodes[record].body for record in piece if nodes[record].body < 0}
        assert all(sum(nodes[record].body == body for record in piece) == 30 for body in bodies)


def test_large_differences_stay_by_themselves_and_packs_are_bounded() -> None:
    nodes = line(40)
    sizes = sized(nodes, BYTES_MAX // 16)
    sizes[20] = BYTES_MAX
    found = group(nodes, sizes)
    assert 20 in found.rest
    assert all(sum(sizes[record] for record in piece) <= BYTES_MAX for piece in found.packs)


def test_nothing_is_forgotten_and_nothing_twice() -> None:
    """Random trees, packed in part: each loose record is in one pack or in the rest; packs are whole."""
    for seed in range(300):
        chance = random.Random(seed)
        nodes: dict[int, Node] = {}
        bodies: dict[int, int] = {}
        for number in range(1, chance.randint(2, 200)):
            base = number - 1 if chance.random() < 0.9 else chance.randrange(number)
            nodes[number] = Node(number, base, 0, 10_000 + number, 100)
        for pack in range(chance.randint(0, 4)):  # a piece of a line, already packed
            at, members = chance.choice(list(nodes)), []
            for _ in range(chance.randint(1, 40)):
                if at in bodies:
                    break
                bodies[at] = -pack - 1
                members.append(at)
                following = [node.id for node in nodes.values() if node.base == at]
                if not following:
                    break
                at = following[0]
        nodes = {number: node._replace(body=bodies.get(number, node.body)) for number, node in nodes.items()}
        found = group(nodes, {number: chance.randint(1, 1000) for number in nodes})
        seen = [record for piece in found.packs for record in piece] + found.rest
        assert len(seen) == len(set(seen))
        assert {node.id for node in nodes.values() if node.body >= 0} <= set(seen)
        for piece in found.packs:
            assert GROUP_MIN <= len(piece) <= MEMBERS_MAX
            assert all(nodes[after].base == before for before, after in itertools.pairwise(piece))
            for body in {nodes[record].body for record in piece if nodes[record].body < 0}:
                members = [node.id for node in nodes.values() if node.body == body]
                assert set(members) <= set(piece)
