"""Which of a tree's records go if a thread is pruned or deleted: what its other threads, its pins, pending writes and
later checkpoints of a line need stays. Only looks; `gc.py` does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import orjson

from perdure.errors import Damaged
from perdure.log.envelopes import needs_of
from perdure.log.labels import LabelRow, bases_of_writes, labels_in
from perdure.log.pins import PinRow, pins_in
from perdure.log.reading import NOT_SWEPT, read_state
from perdure.log.records import ERASED
from perdure.log.thread_table import ThreadRow
from perdure.storage.program import Batch, Rows, Sql

_TREE = Sql(
    f"""SELECT id, thread, parent, base, keyframe, body, key FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND {NOT_SWEPT}"""
)


class Node(NamedTuple):
    """The pointers of a record."""

    id: int
    thread: int
    parent: int | None
    base: int | None
    keyframe: int
    body: int | None
    key: int


@dataclass(repr=False, eq=False)
class Plan:
    """What is to become of a tree's records."""

    rebase: list[int] = field(default_factory=list)  # live, but their base goes: they get their full text
    unlink: list[int] = field(default_factory=list)  # live keyframes whose base goes: they lose their difference
    entomb: list[int] = field(default_factory=list)  # go, but are parents of live ones
    remove: list[int] = field(default_factory=list)


def make_plan(nodes: dict[int, Node], live_ids: Iterable[int]) -> Plan:
    """What follows for every record if these, and only these, live. Pure."""
    live = {record for record in live_ids if record in nodes and nodes[record].body is not None}
    plan = Plan()
    parents = _parents(nodes, live)
    for node in nodes.values():
        if node.id in live:
            if node.base is not None and node.base not in live:
                (plan.unlink if node.keyframe else plan.rebase).append(node.id)
        elif node.id not in parents:
            plan.remove.append(node.id)
        elif node.body is not None:
            plan.entomb.append(node.id)
    return plan


def _parents(nodes: dict[int, Node], live: Iterable[int]) -> set[int]:
    """The parents of live records; and of what was erased, because the history continues behind it."""
    parents: set[int] = set()
    for record in live:
        parent = nodes[record].parent
        while parent is not None and parent not in parents:
            parents.add(parent)
            node = nodes.get(parent)
            parent = node.parent if node is not None and _is_erased(node) else None
    return parents


def _is_erased(node: Node) -> bool:
    return node.body is None and node.keyframe == ERASED


def checkpoints_in(nodes: dict[int, Node], plan: Plan) -> int:
    """How many checkpoints go: tombstones were none."""
    return sum(nodes[record].body is not None for record in (*plan.remove, *plan.entomb))


class Rule(NamedTuple):
    """How much of its line a thread keeps: the newest so many, and all from a record on."""

    keep: int
    since: int | None


def choose(
    tenant: int,
    nodes: dict[int, Node],
    row: ThreadRow,
    others: list[ThreadRow],
    keep: int,
    since: int | None,
    rules: Mapping[int, Rule] | None = None,
) -> Generator[Batch, list[Rows], tuple[Plan, list[LabelRow], set[int]]]:
    """What becomes of a tree's records if a thread keeps its newest ones: also which labels go, and which records stay
    for its own sake. `rules`: of other threads that keep only so many themselves. All the others need all they have:
    without their rules, two threads with one line would each keep it for the other, for good."""
    ruled = [other for other in others if rules and other.thread in rules]
    numbers = [row.thread, *(other.thread for other in ruled)]
    pins = yield from pins_in(tenant, row.tree)
    labels = yield from labels_in(tenant, numbers)
    own = _kept_by(nodes, row, Rule(keep, since), labels, pins)
    needed = yield from needed_by(tenant, nodes, [other for other in others if other.thread not in numbers])
    for other in ruled:
        needed |= _kept_by(nodes, other, (rules or {})[other.thread], labels, pins)
    needed |= {pin.record for pin in pins} | (yield from bases_of_writes(tenant, numbers))
    live = own | needed
    own |= yield from needed_for_deltas(tenant, row.tree, nodes, live, {label.record for label in labels})
    plan = make_plan(nodes, live | own)
    gone = {*plan.remove, *plan.entomb}
    return plan, [label for label in labels if label.record in gone], own


def _kept_by(
    nodes: dict[int, Node], row: ThreadRow, rule: Rule, labels: list[LabelRow], pins: list[PinRow]
) -> set[int]:
    """What a thread keeps by its rule."""
    kept = line_of(nodes, row.head)[: rule.keep]
    oldest = kept[-1] if kept else 0
    oldest = oldest if rule.since is None else min(oldest, rule.since - 1)
    # What became a branch since the oldest kept checkpoint is as recent as what is kept; a copy has ids for it.
    recent = [node.id for node in nodes.values() if node.thread == row.thread and node.id > oldest]
    recent += [label.record for label in labels if label.thread == row.thread and label.record > oldest]
    return {*kept, *recent, *(pin.record for pin in pins if pin.thread == row.thread)}


def kept_for_others(nodes: dict[int, Node], row: ThreadRow, plan: Plan, own: set[int]) -> int:
    """How many checkpoints of a thread's line it does not keep itself, and others need."""
    gone = {*plan.remove, *plan.entomb}
    return sum(record not in own and record not in gone for record in line_of(nodes, row.head))


def why_kept(
    nodes: dict[int, Node], row: ThreadRow, others: list[ThreadRow], keep: int, plan: Plan, pins: set[int]
) -> dict[str, int]:
    """Why checkpoints of a thread's line stay that are older than those it keeps, with how many: "pin", "fork", and
    "graph" for what later checkpoints of a line, and what is attached to them, are built on."""
    gone = {*plan.remove, *plan.entomb}
    shared = {record for other in others for record in line_of(nodes, other.head)}
    kept: dict[str, int] = {}
    for record in line_of(nodes, row.head)[keep:]:
        if record not in gone:
            why = "pin" if record in pins else "fork" if record in shared else "graph"
            kept[why] = kept.get(why, 0) + 1
    return kept


def choose_for(
    tenant: int, tree: int, nodes: dict[int, Node], others: list[ThreadRow]
) -> Generator[Batch, list[Rows], Plan]:
    """What becomes of a tree's records if only these of its threads are left."""
    needed = yield from needed_by(tenant, nodes, others)
    owners = {other.thread for other in others}
    pins = yield from pins_in(tenant, tree)
    return make_plan(nodes, needed | {pin.record for pin in pins if pin.thread in owners})


def inherited(
    nodes: dict[int, Node], row: ThreadRow, others: list[ThreadRow], own: set[int], plan: Plan
) -> Iterable[tuple[int, int]]:
    """Which records of a thread stay only because another one needs them, each with the number of that one. Not those
    that its own line still leads to: it shows them, and they stay when the other goes."""
    gone = {*plan.remove, *plan.entomb}
    seen = {*own, *gone, *takewhile(lambda record: record not in gone, line_of(nodes, row.head))}
    for other in others:
        for record in line_of(nodes, other.head):
            if nodes[record].thread == row.thread and record not in seen:
                seen.add(record)
                yield other.thread, record


def nodes_of(tenant: int, tree: int) -> Generator[Batch, list[Rows], dict[int, Node]]:
    [rows] = yield Batch(_TREE(tenant=tenant, tree=tree))
    for row in rows:
        if set(map(type, row)) - {int, type(None)}:  # SQLite takes anything in any column
            raise Damaged("the row of a checkpoint is damaged; run `perdure store repair`")
    return {row[0]: Node._make(row) for row in rows}


def line_of(nodes: Mapping[int, Node], head: int | None, since: int = 0) -> list[int]:
    """A record and its ancestors that have a body, newest first. What was erased is passed over. `since`: as far back
    as that id."""
    line: list[int] = []
    seen: set[int] = set()
    while head is not None and head >= since and head not in seen and (node := nodes.get(head)):
        if node.body is not None:
            line.append(head)
        elif not _is_erased(node):
            break
        seen.add(head)
        head = node.parent
    return line


def reached_by(nodes: dict[int, Node], row: ThreadRow, labels: Iterable[LabelRow]) -> set[int]:
    """The checkpoints that a thread has: its lines, with what it shares with the one that it was forked from, and what
    it has ids for."""
    reached: set[int] = set()
    own = [node.id for node in nodes.values() if node.thread == row.thread]
    for tip in [row.head, *own, *(label.record for label in labels if label.thread == row.thread)]:
        reached.update(line_of(nodes, tip) if tip not in reached else ())
    return reached


class Reach:
    """Which threads have a record: `reached_by` the other way round, for many threads that share a line. No record is
    walked twice, however many of them lead there."""

    def __init__(self, nodes: Mapping[int, Node], rows: Iterable[ThreadRow], labels: Iterable[LabelRow]) -> None:
        self._nodes = nodes
        self._walked: set[int] = set()
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._tips: defaultdict[int, set[int]] = defaultdict(set)  # the threads whose lines begin at a record
        heads = {row.thread: row.head for row in rows}
        for node in nodes.values():
            if node.parent is not None:
                self._children[node.parent].append(node.id)
            if node.thread in heads:
                self._tips[node.id].add(node.thread)
        for thread, head in heads.items():
            if head is not None:
                self._tips[head].add(thread)
        for label in labels:
            if label.thread in heads:
                self._tips[label.record].add(label.thread)

    def threads(self, records: Iterable[int]) -> set[int]:
        """Those that have one of these checkpoints, but for what was walked from earlier ones."""
        found: set[int] = set()
        todo = [record for record in records if (node := self._nodes.get(record)) and node.body is not None]
        while todo:
            record = todo.pop()
            if record in self._walked:
                continue
            self._walked.add(record)
            found |= self._tips.get(record, set())
            for child in self._children.get(record, ()):
                node = self._nodes[child]
                if node.body is not None or _is_erased(node):  # else lines end there, as `line_of` has it
                    todo.append(child)
        return found


def needed_by(tenant: int, nodes: dict[int, Node], threads: list[ThreadRow]) -> Generator[Batch, list[Rows], set[int]]:
    """Everything that other threads of the tree can reach: their lines, their branches', and what they have ids for."""
    owners = {thread.thread for thread in threads}
    tips = [thread.head for thread in threads]
    tips += [node.id for node in nodes.values() if node.thread in owners]
    needed: set[int] = set()
    for tip in tips:
        while tip is not None and tip not in needed and (node := nodes.get(tip)):
            if node.body is None and not _is_erased(node):
                break
            needed.add(tip)
            tip = node.parent
    needed.update(label.record for label in (yield from labels_in(tenant, sorted(owners))))
    needed |= yield from bases_of_writes(tenant, sorted(owners))
    return needed


def needed_for_deltas(
    tenant: int, tree: int, nodes: dict[int, Node], live: set[int], labelled: set[int]
) -> Generator[Batch, list[Rows], set[int]]:
    """Ancestors whose attachments rebuild what a live state of a line does not hold itself."""
    needed: set[int] = set()
    for record in live & labelled & nodes.keys():
        parent = nodes[record].parent
        missing: set[str] = set()
        if parent is not None and parent not in live:
            missing = set(needs_of((yield from _plain_state(tenant, tree, record))))
        while missing and parent is not None and (node := nodes.get(parent)) is not None and node.body is not None:
            needed.add(node.id)
            missing -= (yield from _plain_state(tenant, tree, node.id)).keys()
            parent = node.parent
    return needed


def _plain_state(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], dict[str, Any]]:
    loaded = yield from read_state(tenant, tree, record)
    state = orjson.loads(loaded.data) if loaded is not None else None
    return state if type(state) is dict else {}
