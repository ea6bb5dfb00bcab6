"""Which records belong to a thread, as of one transaction: all its lines, or one.

A thread shares a tree of records with its forks. Its own are those that it wrote, and whatever led to them; the rest of
the tree is other threads'. A pruned parent of one of them belongs to it as a tombstone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from perdure.errors import NotFound
from perdure.log.ids import show_id
from perdure.log.labels import space_heads, spaces_of
from perdure.log.reading import LINE, NOT_SWEPT
from perdure.log.records import ERASED, Record, record_of
from perdure.log.thread_table import ThreadRow, find_thread, no_thread
from perdure.ops.copies.copied import stamp_and_store
from perdure.storage.program import Batch, Program, Rows, Sql

_PAGE = 5000
_NOTHING = -1

_NODES = Sql(
    f"""SELECT id, thread, parent, key, body, keyframe FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT} ORDER BY r.id LIMIT :limit"""
)
_LABELS = Sql("SELECT space, id, record, run FROM label WHERE tenant = :tenant AND thread = :thread ORDER BY space, id")


class Label(NamedTuple):
    space: int
    id: bytes
    record: int
    run: bytes | None


@dataclass
class View:
    """A thread as it was in one transaction."""

    row: ThreadRow
    head: int
    stamp: int
    store: str
    spaces: dict[int, str]
    heads: dict[int, int | None]
    labels: list[Label]
    # Of each record of the tree, in the order of their ids. Arrays: there may be millions.
    ids: array[int] = field(default_factory=lambda: array("q"))
    parents: array[int] = field(default_factory=lambda: array("q"))
    keys: array[int] = field(default_factory=lambda: array("q"))
    is_live: bytearray = field(default_factory=bytearray)
    is_needed: bytearray = field(default_factory=bytearray)
    is_erased: bytearray = field(default_factory=bytearray)  # a tombstone that the history goes on behind

    def index(self, record: int) -> int | None:
        at = bisect_left(self.ids, record)
        return at if at < len(self.ids) and self.ids[at] == record else None

    def add(self, record: int, parent: int | None, key: int, *, live: bool, needed: bool, erased: bool = False) -> None:
        self.ids.append(record)
        self.parents.append(_NOTHING if parent is None else parent)
        self.keys.append(key)
        self.is_live.append(live)
        self.is_needed.append(needed)
        self.is_erased.append(erased)

    def need(self, records: Iterable[int | None]) -> None:
        """These are needed, and whatever led to a needed one. Parents have smaller ids than their children."""
        for record in records:
            at = self.index(record) if record is not None else None
            if at is not None:
                self.is_needed[at] = 1
        for at in range(len(self.ids) - 1, -1, -1):
            leads_on = self.is_live[at] or self.is_erased[at]
            if self.is_needed[at] and leads_on and self.parents[at] != _NOTHING:
                parent = self.index(self.parents[at])
                if parent is not None:
                    self.is_needed[parent] = 1

    def groups(self) -> Iterator[list[int]]:
        """The checkpoints that are needed, by their keyframes, these in the order of their ids."""
        wanted = [at for at in range(len(self.ids)) if self.is_needed[at] and self.is_live[at]]
        wanted.sort(key=self.keys.__getitem__)  # stable: the ids of a group stay in order
        for _, group in groupby(wanted, self.keys.__getitem__):
            yield [self.ids[at] for at in group]

    def tombs(self) -> list[int]:
        return [self.ids[at] for at in range(len(self.ids)) if self.is_needed[at] and not self.is_live[at]]

    def count(self) -> int:
        return sum(map(int.__and__, self.is_needed, self.is_live))


def look(tenant: int, name: str, number: int | None, branch: int | None) -> Program[View]:
    """1: the thread, and which records belong to it."""
    row = yield from find_thread(tenant, name, number)
    if row.head is None:
        raise no_thread(name)
    stamp, store = yield from stamp_and_store()
    spaces = yield from spaces_of(tenant, row.thread)
    heads = yield from space_heads(tenant, row.thread)
    [labels] = yield Batch(_LABELS(tenant=tenant, thread=row.thread))
    view = View(row, branch or row.head, stamp, store, spaces, heads, [Label._make(label) for label in labels])
    if branch is None:
        yield from _whole(tenant, view)
        view.need([row.head, *heads.values(), *(label.record for label in view.labels)])
    else:
        yield from _one_line(tenant, view, branch)
        kept = set(view.ids)
        view.labels = [label for label in view.labels if label.record in kept]
        for space, head in heads.items():
            if head not in kept:
                heads[space] = max((label.record for label in view.labels if label.space == space), default=None)
    return view


def _whole(tenant: int, view: View) -> Generator[Batch, list[Rows], None]:
    after = -1
    while True:
        [rows] = yield Batch(_NODES(tenant=tenant, tree=view.row.tree, after=after, limit=_PAGE))
        for record, thread, parent, key, body, keyframe in rows:
            live = body is not None
            own = live and thread == view.row.thread
            view.add(record, parent, key, live=live, needed=own, erased=not live and keyframe == ERASED)
            after = record
        if len(rows) < _PAGE:
            return


def _one_line(tenant: int, view: View, branch: int) -> Generator[Batch, list[Rows], None]:
    found: list[Record] = []
    at: int | None = branch
    while at is not None:
        [rows] = yield Batch(LINE(tenant=tenant, tree=view.row.tree, id=at, limit=_PAGE))
        records = [record_of(row) for row in rows]
        at = records[-1].parent if len(records) == _PAGE else None
        for record in records:
            found.append(record)
            if record.body is None and record.keyframe != ERASED:  # what led to it is gone
                at = None
                break
    if not found or found[0].body is None:
        raise NotFound(f"thread {view.row.name!r} has no checkpoint {show_id(branch)}: choose one of its log")
    for record in reversed(found):
        view.add(record.id, record.parent, record.key, live=record.body is not None, needed=True)
