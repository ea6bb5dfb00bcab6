"""Which records of a chain go into one pack together. Pure.

A group is a piece of one line: records that follow each other without a branch between them. A pack that is there
already is taken as a whole or left alone, because a record's place in it is counted among all its records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from perdure.log.packs import BYTES_MAX, MEMBERS_MAX, MEMBERS_MIN

# Fewer records are not worth a pack: they stay as they are.
GROUP_MIN = 8
_DIFF_MAX = BYTES_MAX // 4  # a difference that is larger gains nothing from others


class Node(NamedTuple):
    """A record of a chain, or the keyframe that ends it."""

    id: int
    base: int | None
    keyframe: int
    body: int  # negative: the pack it is in
    size: int | None  # of its difference as stored; None: in a pack, or it has none


class Groups(NamedTuple):
    """What is to be packed together, and what stays in bodies of its own. Both oldest first."""

    packs: list[list[int]]
    rest: list[int]


def group(nodes: Mapping[int, Node], sizes: Mapping[int, int]) -> Groups:
    """The groups of a chain's records, which come in the order of their ids. `sizes`: of their differences, as they
    would stand in a pack."""
    members: dict[int, int] = {}
    for node in nodes.values():
        members[node.body] = members.get(node.body, 0) + 1
    found = Groups([], [])
    for line in _lines(nodes.values()):
        for piece in _pieces(line, nodes, sizes, members):
            loose = [record for record in piece if nodes[record].body >= 0]
            if loose and len(piece) >= GROUP_MIN:
                found.packs.append(piece)
            else:
                found.rest.extend(loose)
    return found


def _lines(nodes: Iterable[Node]) -> list[list[int]]:
    """The chain cut where it branches."""
    followers: dict[int | None, int] = {}
    links = [node for node in nodes if not node.keyframe]
    for node in links:
        followers[node.base] = followers.get(node.base, 0) + 1
    lines: list[list[int]] = []
    ends: dict[int | None, list[int]] = {}
    for node in links:
        line = ends.pop(node.base, None) if followers[node.base] == 1 else None
        if line is None:
            line = []
            lines.append(line)
        line.append(node.id)
        ends[node.id] = line
    return lines


def _pieces(
    line: list[int], nodes: Mapping[int, Node], sizes: Mapping[int, int], members: Mapping[int, int]
) -> Iterator[list[int]]:
    """A line cut into pieces that fit into a pack, and around what is to stay as it is."""
    piece: list[int] = []
    held = 0
    for unit in _units(line, nodes):
        size = sum(sizes.get(record, 0) for record in unit)
        packed = nodes[unit[0]].body < 0
        whole = not packed or len(unit) == members[nodes[unit[0]].body]
        settled = packed and (not whole or len(unit) >= MEMBERS_MIN or size >= BYTES_MAX // 2)
        alone = settled or (not packed and size > _DIFF_MAX)
        if piece and (alone or len(piece) + len(unit) > MEMBERS_MAX or held + size > BYTES_MAX):
            yield piece
            piece, held = [], 0
        if alone:
            yield unit
        else:
            piece, held = piece + unit, held + size
    if piece:
        yield piece


def _units(line: list[int], nodes: Mapping[int, Node]) -> Iterator[list[int]]:
    """What must stay together: the records of one pack; each other record by itself."""
    unit: list[int] = []
    for record in line:
        body = nodes[record].body
        if unit and (body >= 0 or nodes[unit[-1]].body != body):
            yield unit
            unit = []
        unit.append(record)
    if unit:
        yield unit
