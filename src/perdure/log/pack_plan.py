"""Which records of a chain go into one pack together. Pure.

A group is a piece of one line: records of one thread that follow each other without a branch between them. What is
packed already stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from perdure.log.packs import BYTES_MAX, MEMBERS_MAX

# Fewer records are not worth a pack: they stay as they are.
GROUP_MIN = 8
_MEMBERS_MIN, _KEY_BYTES_PER_MEMBER = 32, 2048
_DIFF_MAX = BYTES_MAX // 4  # a difference that is larger gains nothing from others


class PackNode(NamedTuple):
    """A record of a chain, or the keyframe that ends it."""

    id: int
    base: int | None
    keyframe: int
    body: int  # negative: the pack it is in
    size: int | None  # of its difference as stored; None: in a pack, or it has none
    thread: int = 0


def members_max(key_bytes: int) -> int:
    """How many records a pack has at most. A load of any opens all: where the keyframe's text is short, that shows."""
    return max(_MEMBERS_MIN, min(key_bytes // _KEY_BYTES_PER_MEMBER, MEMBERS_MAX))


def group(nodes: Mapping[int, PackNode], sizes: Mapping[int, int], number: int = MEMBERS_MAX) -> list[list[int]]:
    """Which of a chain's records, which come in the order of their ids, are to be packed together, oldest first.
    `sizes`: of their differences, as they would stand in a pack; `number`: as many go into one."""
    groups: list[list[int]] = []
    for line in _lines(nodes.values()):
        piece: list[int] = []
        held = 0
        for record in line:
            size = sizes.get(record, 0)
            fits = nodes[record].body >= 0 and size <= _DIFF_MAX
            if not fits or len(piece) == number or held + size > BYTES_MAX:
                groups.append(piece)
                piece, held = [], 0
            if fits:
                piece.append(record)
                held += size
        groups.append(piece)
    return [piece for piece in groups if len(piece) >= GROUP_MIN]


def _lines(nodes: Iterable[PackNode]) -> list[list[int]]:
    """The chain cut where it branches, and where a fork continues it."""
    followers: dict[int | None, int] = {}
    links = [node for node in nodes if not node.keyframe]
    for node in links:
        followers[node.base] = followers.get(node.base, 0) + 1
    lines: list[list[int]] = []
    ends: dict[tuple[int | None, int], list[int]] = {}
    for node in links:
        line = ends.pop((node.base, node.thread), None) if followers[node.base] == 1 else None
        if line is None:
            line = []
            lines.append(line)
        line.append(node.id)
        ends[node.id, node.thread] = line
    return lines
