"""Which threads go with an erased one: the same as by looking at all that each can reach, without looking at a record
once for each thread that shares it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from perdure.log.erase import own_records, sharing
from perdure.log.gc_plan import Node, line_of, reached_by
from perdure.log.labels import LabelRow
from perdure.log.records import ERASED
from perdure.log.thread_table import ThreadRow


class Counting(dict[int, Node]):
    """Nodes that count how often one is looked at."""

    looks = 0

    def __getitem__(self, key: int) -> Node:
        self.looks += 1
        return super().__getitem__(key)

    def get(self, key: int, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def thread(number: int, origin: int | None, head: int | None) -> ThreadRow:
    return ThreadRow(number, 1, f"t{number}", "{}", origin, 0, head, None, 0, 0)


def node(record: int, owner: int, parent: int | None, *, body: int | None = 1, keyframe: int = 0) -> Node:
    return Node(record, owner, parent, None, keyframe, body, 0)


def plainly(
    nodes: dict[int, Node], row: ThreadRow, others: list[ThreadRow], labels: list[LabelRow], bases: dict[int, set[int]]
) -> set[int]:
    """The rule itself, word by word."""

    def own(one: ThreadRow) -> set[int]:
        return {n.id for n in nodes.values() if n.thread == one.thread} - set(line_of(nodes, one.origin))

    doomed, records = {row.thread}, own(row)
    while found := [
        other
        for other in others
        if other.thread not in doomed and (reached_by(nodes, other, labels) | bases[other.thread]) & records
    ]:
        doomed |= {other.thread for other in found}
        records = records.union(*map(own, found))
    return doomed


def some(chance: random.Random, of: Iterable[int], most: int) -> list[int]:
    known = list(of)
    return [chance.choice(known) for _ in range(chance.randrange(most + 1))]


def test_the_same_threads_go_as_by_the_rule() -> None:
    sizes = set()
    for seed in range(400):
        chance = random.Random(seed)
        count, threads = chance.randrange(5, 40), chance.randrange(2, 8)
        nodes: dict[int, Node] = {}
        for record in range(1, count):
            parent = chance.choice([None, *range(max(1, record - 4), record)]) if record > 1 else None
            fate = chance.random()
            body, keyframe = (1, 0) if fate < 0.8 else (None, ERASED) if fate < 0.9 else (None, 0)
            owner = chance.randrange(1, threads + 1)
            nodes[record] = node(record, owner, parent, body=body, keyframe=keyframe)
        del nodes[chance.choice(list(nodes))]
        ids = [None, *range(1, count)]
        rows = [thread(number, chance.choice(ids), chance.choice(ids)) for number in range(1, threads + 1)]
        labels = [LabelRow(chance.randrange(1, threads + 1), 0, b"", record) for record in some(chance, nodes, 4)]
        bases = {row.thread: set(some(chance, nodes, 1)) for row in rows}
        row, *others = chance.sample(rows, len(rows))
        wanted = plainly(nodes, row, others, labels, bases)
        assert sharing(nodes, row, others, labels, bases, own_records(nodes, rows)) == wanted, seed
        sizes.add(len(wanted))
    assert {1, 2, 3, 4} <= sizes  # that the scenes differ in what goes


def looks(forks: int, length: int, *, nested: bool) -> tuple[int, int, int]:
    """How often records are looked at, how many there are, and how many threads go: forks of one line, each with a
    record of its own, or each forked from the one before it."""
    nodes = Counting({record: node(record, 1, record - 1 or None) for record in range(1, length + 1)})
    rows = [thread(1, None, length)]
    for number in range(2, forks + 2):
        origin = rows[-1].head if nested else length
        assert origin is not None
        head = length + number
        nodes[head] = node(head, number, origin)
        rows.append(thread(number, origin, head))
    bases: dict[int, set[int]] = {row.thread: set() for row in rows}
    others = [rows[0], *rows[2:]]
    gone = sharing(nodes, rows[1], others, [], bases, own_records(nodes, rows))
    return nodes.looks, len(nodes), len(gone)


def test_no_record_is_looked_at_for_each_thread() -> None:
    for forks, length in ((10, 500), (300, 500)):
        for nested, wanted in ((False, 1), (True, forks)):
            looked, count, gone = looks(forks, length, nested=nested)
            assert gone == wanted
            assert looked <= 6 * count
