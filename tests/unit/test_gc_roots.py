"""What a thread has is what its lines, labels and pending writes lead to; a plan leaves nothing without its base."""

from __future__ import annotations

import random
from collections.abc import Iterable

from perdure.log.gc_plan import Node, Tree, holders, line_of, make_plan
from perdure.log.labels import LabelRow
from perdure.log.records import ERASED
from perdure.log.thread_table import ThreadRow


def scene(chance: random.Random) -> Tree:
    """A tree of random branches with tombstones, of which some were erased."""
    count, threads = chance.randrange(5, 40), chance.randrange(2, 8)
    nodes: dict[int, Node] = {}
    for record in range(1, count):
        parent = chance.choice([None, *range(max(1, record - 4), record)]) if record > 1 else None
        fate = chance.random()
        body, keyframe = (1, 0) if fate < 0.8 else (None, ERASED) if fate < 0.9 else (None, 0)
        base = parent if parent in nodes and nodes[parent].body is not None else None
        nodes[record] = Node(record, chance.randrange(1, threads + 1), parent, base, keyframe, body, 0)
    heads = {number: chance.choice([None, *nodes]) for number in range(1, threads + 1)}
    rows = {
        number: ThreadRow(number, 1, f"t{number}", "{}", None, 0, head, None, 0, 0) for number, head in heads.items()
    }
    labels = {number: [LabelRow(number, 0, b"", record) for record in some(chance, nodes, 2)] for number in rows}
    bases = {number: set(some(chance, nodes, 1)) for number in rows}
    return Tree(1, 1, rows, nodes, labels, {}, bases)


def some(chance: random.Random, of: Iterable[int], most: int) -> list[int]:
    known = list(of)
    return [chance.choice(known) for _ in range(chance.randrange(most + 1))]


def reached_by(tree: Tree, number: int) -> set[int]:
    tips = [tree.threads[number].head, *tree.own[number], *tree.bases[number]]
    tips += [label.record for label in tree.labels[number]]
    return set().union(*(line_of(tree.nodes, tip) for tip in tips))


def test_holders_are_the_threads_that_reach_a_record() -> None:
    sizes = set()
    for seed in range(300):
        tree = scene(random.Random(seed))
        records = {record for record in some(random.Random(seed), tree.nodes, 3) if tree.nodes[record].body is not None}
        wanted = {number for number in tree.threads if reached_by(tree, number) & records}
        assert holders(tree, records) == wanted, seed
        sizes.add(len(wanted))
    assert {0, 1, 2, 3} <= sizes  # that the scenes differ


def test_a_plan_leaves_no_live_record_without_its_base_or_parent() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        tree = scene(chance)
        live = {record for record in tree.nodes if tree.nodes[record].body is not None and chance.random() < 0.6}
        plan = make_plan(tree.nodes, live)
        for record in live:
            node = tree.nodes[record]
            assert node.parent not in plan.remove
            assert node.base is None or node.base in live or record in {*plan.rebase, *plan.unlink}
        assert plan.gone.isdisjoint(live)
