"""Decide which records of a tree live. Every removal uses this module; `gc.py` carries the plan out.

A record lives if a remaining thread keeps it (on its lines or by its labels, or only the newest of these by a rule), if
a pin holds it, if a pending write was compressed against it, or if the state of a live record is rebuilt from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from perdure.errors import Damaged
from perdure.log.envelopes import needs_of, parent_of
from perdure.log.labels import LABELLED_KIND, MAIN, LabelRow, SpaceRow, bases_in_tree, labels_in_tree, spaces_in_tree
from perdure.log.reading import read_state
from perdure.log.records import ERASED, RECORDS_OF_THREAD, Record
from perdure.log.thread_table import ThreadRow
from perdure.storage.program import Batch, Rows, Sql

_PAGE = 5_000
_COLUMNS = f"""r.id, r.thread, r.parent, r.base, r.keyframe, r.body, r.key,
    CASE WHEN r.kind = '{LABELLED_KIND}' THEN 1 ELSE 0 END"""
_NODES = Sql(
    f"""SELECT {_COLUMNS} FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after
    ORDER BY r.id LIMIT :limit"""
)
_NODES_OF_THREAD = Sql(
    f"""WITH RECURSIVE {RECORDS_OF_THREAD} SELECT {_COLUMNS} FROM needed n CROSS JOIN record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = n.id"""
)
# Ids grow along a line, so the search stops at smaller ids.
_IS_BEFORE = Sql(
    """WITH RECURSIVE line (id) AS (
        SELECT CAST(:origin AS bigint)
        UNION ALL
        SELECT r.parent FROM line l CROSS JOIN record r
        WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = l.id AND r.parent >= :id AND r.parent < r.id)
    SELECT 1 FROM line WHERE id = :id LIMIT 1"""
)
_PINS = Sql("SELECT thread, name, record, at FROM pin WHERE tenant = :tenant AND tree = :tree ORDER BY thread, name")
_PINS_OF_THREAD = Sql(
    "SELECT thread, name, record, at FROM pin WHERE tenant = :tenant AND thread = :thread ORDER BY name"
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
    by_label: int = 0  # 1: it lives only while a label points at it


class PinRow(NamedTuple):
    thread: int
    name: str
    record: int
    at: int


@dataclass(repr=False, eq=False)
class Tree:
    """A tree's threads and records, and everything that points at the records.

    If `alone`, it is one thread with the records that it needs. Then no other thread has records of that one, and the
    records that it shares must stay."""

    tenant: int
    tree: int
    threads: dict[int, ThreadRow]
    nodes: dict[int, Node]
    labels: dict[int, list[LabelRow]] = field(default_factory=dict)  # by thread, as spaces, bases and own are
    spaces: dict[int, list[SpaceRow]] = field(default_factory=dict)
    bases: dict[int, set[int]] = field(default_factory=dict)  # records that pending writes were compressed against
    pins: list[PinRow] = field(default_factory=list)
    alone: bool = False
    own: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # records with a body

    def __post_init__(self) -> None:
        for node in self.nodes.values():
            if node.body is not None:
                self.own[node.thread].append(node.id)

    @property
    def shared(self) -> set[int]:
        """The records of other threads if this is one thread alone: all of them stay. Otherwise empty."""
        if not self.alone:
            return set()
        return {node.id for node in self.nodes.values() if node.thread not in self.threads}


class Rule(NamedTuple):
    """How much of each line a thread keeps: the newest `keep` records that are not before `oldest`.

    None keeps any number. The newest record of a line stays whatever its age, and so do all from the record `since` on.
    """

    keep: int | None
    since: int | None = None
    oldest: int = 0

    def kept(self, line: list[int]) -> list[int]:
        """Return the records of a line, newest first, that the rule keeps."""
        return [record for record in line[: self.keep] if record >= self.oldest] or line[:1]


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a tree to remove: threads, records beyond a thread's rule, labels, one record to erase."""

    threads: Collection[int] = ()
    keep: Mapping[int, Rule] = field(default_factory=dict)
    labels: Collection[LabelRow] = ()  # removed with the records that lived only by them
    erase: int | None = None


@dataclass(repr=False, eq=False)
class Plan:
    """The changes to a tree's records. A record that is in no list stays as it is."""

    rebase: list[int] = field(default_factory=list)  # live, but lose their base: they get their full text
    unlink: list[int] = field(default_factory=list)  # live keyframes that lose their base: they lose their difference
    entomb: list[int] = field(default_factory=list)  # dead, but parents of live ones: they become tombstones
    remove: list[int] = field(default_factory=list)

    @property
    def gone(self) -> set[int]:
        return {*self.remove, *self.entomb}

    def __bool__(self) -> bool:
        return bool(self.rebase or self.unlink or self.entomb or self.remove)


def nodes_of(tenant: int, tree: int) -> Generator[Batch, list[Rows], dict[int, Node]]:
    """Read the pointers of all records of a tree."""
    nodes: dict[int, Node] = {}
    after = -(1 << 63)
    while True:
        [rows] = yield Batch(_NODES(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        nodes |= _nodes(rows)
        if len(rows) < _PAGE:
            return nodes
        after = rows[-1][0]


def _nodes(rows: Rows) -> dict[int, Node]:
    for row in rows:
        if set(map(type, row)) - {int, type(None)}:  # SQLite accepts any type in any column
            raise Damaged("the row of a checkpoint is damaged; run `perdure store repair`")
    return {row[0]: Node._make(row) for row in rows}


def read_tree(tenant: int, tree: int, threads: Iterable[ThreadRow]) -> Generator[Batch, list[Rows], Tree]:
    """Read a tree's records and everything that points at them. `threads`: its threads, locked for a removal."""
    [pins] = yield Batch(_PINS(tenant=tenant, tree=tree))
    return Tree(
        tenant,
        tree,
        {row.thread: row for row in threads},
        (yield from nodes_of(tenant, tree)),
        (yield from labels_in_tree(tenant, tree)),
        (yield from spaces_in_tree(tenant, tree)),
        (yield from bases_in_tree(tenant, tree)),
        [PinRow._make(row) for row in pins],
    )


def read_thread_alone(tenant: int, row: ThreadRow) -> Generator[Batch, list[Rows], Tree]:
    """Read one thread of a tree: its records, those that it shares, and everything in it that points at them."""
    thread = {"tenant": tenant, "thread": row.thread}
    nodes, pins = yield Batch(_NODES_OF_THREAD(**thread, tree=row.tree), _PINS_OF_THREAD(**thread))
    return Tree(
        tenant,
        row.tree,
        {row.thread: row},
        _nodes(nodes),
        (yield from labels_in_tree(tenant, row.tree, row.thread)),
        (yield from spaces_in_tree(tenant, row.tree, row.thread)),
        (yield from bases_in_tree(tenant, row.tree, row.thread)),
        [PinRow._make(pin) for pin in pins],
        alone=True,
    )


def shares_with(tree: Tree) -> set[int]:
    """Return the other threads whose records a thread that was read alone is built on, or points at."""
    [row] = tree.threads.values()
    own = [node for node in tree.nodes.values() if node.thread == row.thread]
    used = {row.head, *(pin.record for pin in tree.pins), *tree.bases.get(row.thread, ())}
    used |= {label.record for label in tree.labels.get(row.thread, ())}
    used |= {pointer for node in own for pointer in (node.parent, node.base)}
    return {tree.nodes[record].thread for record in used if record in tree.nodes} - {row.thread}


def has_record(tenant: int, row: ThreadRow, record: Record) -> Generator[Batch, list[Rows], bool]:
    """Return whether a thread has a record: its own, or one that it shares."""
    if record.thread == row.thread or record.id in (row.head, row.origin):
        return True
    if row.origin is not None:
        [rows] = yield Batch(_IS_BEFORE(tenant=tenant, tree=row.tree, origin=row.origin, id=record.id))
        if rows:
            return True
    tree = yield from read_thread_alone(tenant, row)
    return row.thread in holders(tree, [record.id]) or any(pin.record == record.id for pin in tree.pins)


def find_roots(tree: Tree, cut: Cut) -> Generator[Batch, list[Rows], tuple[set[int], set[int]]]:
    """Return the records that live after a cut, and the subset that other states are rebuilt from.

    That subset lives even if the cut names its records."""
    stay = [row for row in tree.threads.values() if row.thread not in cut.threads]
    live: set[int] = tree.shared
    lines: set[int] = set()  # of threads that keep everything
    unlabelled = {label.thread for label in cut.labels}
    for row in stay:
        rule = cut.keep.get(row.thread)
        if rule is not None:
            live |= _kept_by_rule(tree, row, rule)
        elif row.thread in unlabelled:
            live |= kept_without(tree, row, set(cut.labels))
        else:
            for tip in (row.head, *tree.own[row.thread], *(one.record for one in tree.labels.get(row.thread, ()))):
                lines.update(line_of(tree.nodes, tip, known=lines))
    live |= lines
    numbers = {row.thread for row in stay}
    live |= {pin.record for pin in tree.pins if pin.thread in numbers}
    live.discard(cut.erase or -1)
    needed = set().union(*(tree.bases.get(number, ()) for number in numbers))
    live |= needed
    needed |= yield from _needed_for_deltas(tree, live, numbers)
    return live | needed, needed


def _kept_by_rule(tree: Tree, row: ThreadRow, rule: Rule) -> set[int]:
    """Return the newest records of a thread's lines.

    Branches that are newer than the oldest kept record stay. A namespace of a single call is removed if it is older
    than all kept records of the thread's own line."""
    labels, since = tree.labels.get(row.thread, []), rule.since if rule.since is not None else 1 << 63
    newest = line_of(tree.nodes, row.head, count=rule.keep)
    kept = rule.kept(newest)
    by_count = newest[-1] if newest and rule.keep is not None else 0
    oldest = min(max(by_count, rule.oldest - 1), since - 1)
    elsewhere = {label.record for label in labels if label.space != MAIN}
    recent = {record for record in tree.own[row.thread] if record > oldest} - elsewhere
    recent |= {label.record for label in labels if label.space == MAIN and label.record > oldest}
    for space in tree.spaces.get(row.thread, ()):
        line = sorted((label.record for label in labels if label.space == space.space), reverse=True)
        if line and not (space.is_of_one_call and line[0] < oldest):
            recent |= {*rule.kept(line), *(record for record in line if record >= since)}
            recent |= {space.head} if space.head in line else set()
    return recent.union(kept)


def kept_without(tree: Tree, row: ThreadRow, gone: set[LabelRow]) -> set[int]:
    """Return the records that a thread keeps without some labels.

    A record that lives only by its label is not kept if no other label points at it: its id was put again."""
    labels = tree.labels.get(row.thread, ())
    kept = {label.record for label in labels if label not in gone}
    lost = {label.record for label in gone} | {record for record in tree.own[row.thread] if tree.nodes[record].by_label}
    head = {row.head} if row.head is not None and row.head not in lost else set()
    return (set(tree.own[row.thread]) - lost) | kept | head


def _needed_for_deltas(tree: Tree, live: set[int], threads: set[int]) -> Generator[Batch, list[Rows], set[int]]:
    """Return the ancestors whose attached writes rebuild keys that the state of a live label does not hold."""
    needed: set[int] = set()
    for thread in threads:
        ids = {(label.space, label.id): label.record for label in tree.labels.get(thread, ())}
        for (space, _), record in ids.items():
            node = tree.nodes.get(record)
            if record not in live or node is None or node.parent is None or node.parent in live:
                continue  # the needs of its parent cover its own
            state = yield from _plain_state(tree, record)
            missing = set(needs_of(state))
            while missing:
                before = ids.get((space, parent_of(state) or b""))
                if before is None or before not in tree.nodes or tree.nodes[before].body is None:
                    break
                needed.add(before)
                state = yield from _plain_state(tree, before)
                missing -= state.keys()
    return needed


def _plain_state(tree: Tree, record: int) -> Generator[Batch, list[Rows], dict[str, Any]]:
    try:
        loaded = yield from read_state(tree.tenant, tree.tree, record)
    except Damaged:
        return {}  # its needs cannot be read
    state = orjson.loads(loaded.data) if loaded is not None else None
    return state if type(state) is dict else {}


def make_plan(
    nodes: Mapping[int, Node], live_ids: Iterable[int], erase: int | None = None, untouched: Collection[int] = ()
) -> Plan:
    """Return the changes to all records if only `live_ids` live. Pure.

    `erase`: this record becomes a tombstone behind which the history continues. `untouched`: these are not changed."""
    live = {record for record in live_ids if record in nodes and nodes[record].body is not None}
    plan = Plan()
    parents = _parents(nodes, live, erase)
    for node in nodes.values():
        if node.id in untouched:
            continue
        if node.id in live:
            if node.base is not None and node.base not in live:
                (plan.unlink if node.keyframe else plan.rebase).append(node.id)
        elif node.id not in parents:
            plan.remove.append(node.id)
        elif node.body is not None:
            plan.entomb.append(node.id)
    return plan


def _parents(nodes: Mapping[int, Node], live: Iterable[int], erase: int | None) -> set[int]:
    """Return the parents of live records, and those of erased parents, because the history continues behind these."""
    parents: set[int] = set()
    for record in live:
        parent = nodes[record].parent
        while parent is not None and parent not in parents:
            parents.add(parent)
            node = nodes.get(parent)
            parent = node.parent if node is not None and (_is_erased(node) or node.id == erase) else None
    return parents


def _is_erased(node: Node) -> bool:
    return node.body is None and node.keyframe == ERASED


def line_of(
    nodes: Mapping[int, Node], head: int | None, *, count: int | None = None, known: Collection[int] = ()
) -> list[int]:
    """Return a record and its ancestors that have a body, newest first, at most `count`. Erased records are skipped.

    `known`: the line ends before the first of these."""
    line: list[int] = []
    seen: set[int] = set()
    while head is not None and head not in seen and head not in known and (node := nodes.get(head)):
        if node.body is not None:
            line.append(head)
        elif not _is_erased(node):
            break
        if len(line) == count:
            break
        seen.add(head)
        head = node.parent
    return line


def holders(tree: Tree, records: Iterable[int]) -> set[int]:
    """Return the threads that hold one of these records: on a line, by a label, or as the base of a pending write."""
    reached = {record for record in records if (node := tree.nodes.get(record)) and node.body is not None}
    for record, node in sorted(tree.nodes.items()):  # ids grow along a line, so parents come first
        if node.parent in reached and (node.body is not None or _is_erased(node)):
            reached.add(record)
    return {
        number
        for number, row in tree.threads.items()
        if row.head in reached
        or not reached.isdisjoint(tree.own[number])
        or not reached.isdisjoint(tree.bases.get(number, ()))
        or any(label.record in reached for label in tree.labels.get(number, ()))
    }
