"""Reads of many checkpoints of lines: lists, and a checkpoint's ancestors.

Nothing is held open while the caller's code runs: labels come in pages, each page one read transaction, and the texts
of a line come from a stretch of it that was read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from perdure.errors import Damaged
from perdure.log.history_walk import Stretch, read_stretch
from perdure.log.ids import show_id as show_record
from perdure.log.labels import LabelRow, find_label, find_space, list_labels, spaces_of
from perdure.log.pending import odd_bases, select_writes, select_writes_between, writes_of
from perdure.log.reading import read_state
from perdure.log.records import Record
from perdure.log.thread_table import thread_numbered, try_thread
from perdure.storage.program import Batch, Flow, Program, Rows, read
from perdure.threads.line_engine import Entry, LineEngine

_PAGE_MIN, _PAGE_MAX = 64, 4096
_ALONE_MAX = 3  # so many states are loaded one by one before a whole stretch is worth reading
_STRETCHES_MAX = 4


class Wanted(NamedTuple):
    """Which checkpoints to list. None: no condition."""

    thread: str | None = None
    namespace: str | None = None
    id: bytes | None = None
    before: bytes | None = None


class _Thread(NamedTuple):
    name: str
    tree: int
    namespaces: dict[int, str]


@dataclass(slots=True)
class _Reader:
    """A stretch that is being gone through."""

    ids: set[int]
    states: Iterator[tuple[Record, bytes]]
    now: tuple[Record, bytes] | None = None

    def text(self, record: int) -> bytes | None:
        """The text of a record, if it still lies ahead."""
        if record not in self.ids:
            return None
        while self.now is None or self.now[0].id != record:
            if (following := next(self.states, None)) is None:
                return None
            self.now = following
            self.ids.discard(following[0].id)
        return self.now[1]


@dataclass(slots=True)
class Texts:
    """The texts of records, one after the other, mostly along a line."""

    engine: LineEngine
    tenant: int
    _alone: int = 0
    _readers: list[_Reader] = field(default_factory=list)

    def of(self, tree: int, record: int) -> Flow[bytes]:
        """The text of one record. Raises Damaged."""
        for reader in self._readers:
            if reader.now is not None and reader.now[0].id == record and reader.now[0].tree == tree:
                return reader.now[1]
            if (text := reader.text(record)) is not None:
                return text
        if (cached := self.engine.ctx.cache.get((self.tenant, tree, record))) is not None:
            return cached.data
        self._alone += 1
        if self._alone > _ALONE_MAX:
            stretch = yield from read(partial(read_stretch, self.tenant, tree, record))
            if stretch is not None and (text := self._begin(stretch)) is not None:
                return text
        # By itself: this also rebuilds a damaged keyframe, which a stretch cannot.
        loaded = yield from read(partial(read_state, self.tenant, tree, record))
        if loaded is None:
            shown = show_record(record)
            raise Damaged(f"checkpoint {shown} is missing; run `perdure store verify`", checkpoints=(shown,))
        return loaded.data

    def _begin(self, stretch: Stretch) -> bytes | None:
        """Start with a stretch at its newest record. None: something in it is damaged; each must be read alone."""
        try:
            states = stretch.states()
        except Damaged:
            return None
        reader = _Reader(set(stretch.links), states)
        self._readers.insert(0, reader)
        del self._readers[_STRETCHES_MAX:]
        return reader.text(stretch.chain.record.id)


@dataclass(slots=True)
class Listing:
    """A list of checkpoints in the making, the greatest id first."""

    engine: LineEngine
    wanted: Wanted
    texts: Texts | None = None
    _page: int = _PAGE_MIN
    _last: LabelRow | None = None
    _ended: bool = False
    _waiting: Iterator[tuple[LabelRow, Rows]] = field(default_factory=lambda: iter(()))
    _threads: dict[int, _Thread | None] = field(default_factory=dict)

    def next(self, fits: Callable[[Entry], bool]) -> Flow[Entry | None]:
        """The next checkpoint that fits. None: that was all."""
        while True:
            for label, writes in self._waiting:
                entry = yield from self.entry(label, writes)
                if entry is not None and fits(entry):
                    return entry
            rows = yield from self.rows()
            if rows is None:
                return None
            self._waiting = iter(rows)

    def rows(self) -> Flow[list[tuple[LabelRow, Rows]] | None]:
        """The next page of labels with what is pending on them. None: that was all."""
        tenant = yield from self.engine.ctx.tenant()
        if tenant is None or self._ended:
            return None
        if self.texts is None:
            self.texts = Texts(self.engine, tenant)
        labels, writes = yield from read(partial(self._read_page, tenant))
        self._ended = len(labels) < self._page
        self._page = min(self._page * 2, _PAGE_MAX)
        if labels:
            self._last = labels[-1]
        return [
            (label, writes.get((label.thread, label.space, label.id), [])) for label in labels if self._is_wanted(label)
        ]

    def entry(self, label: LabelRow, writes: Rows) -> Flow[Entry | None]:
        """The checkpoint behind a label. None: its thread was deleted meanwhile."""
        try:
            return (yield from self._entry(label, writes))
        except Damaged:
            # It may have been removed, or saved again, since its label was read.
            assert self.texts is not None
            now = yield from read(partial(find_label, self.texts.tenant, label.thread, label.space, label.id))
            if now is None:
                return None
            if now.record == label.record:
                raise
            return (yield from self._entry(label._replace(record=now.record), writes))

    def _entry(self, label: LabelRow, writes: Rows) -> Flow[Entry | None]:
        thread = self._threads.get(label.thread)
        text = yield from self.text(label)
        if thread is None or text is None or self.texts is None:
            return None
        bases = {label.record: text}
        if any(row[5] not in (None, label.record) for row in writes):
            bases |= yield from read(partial(odd_bases, self.texts.tenant, thread.tree, writes, [label.record]))
        return Entry(thread.name, thread.namespaces.get(label.space, ""), label.id, text, writes_of(writes, bases))

    def text(self, label: LabelRow) -> Flow[bytes | None]:
        """The text behind a label. None: its thread was deleted meanwhile."""
        thread = self._threads.get(label.thread)
        if thread is None or self.texts is None:
            return None
        return (yield from self.texts.of(thread.tree, label.record))

    def _read_page(self, tenant: int) -> Program[tuple[list[LabelRow], dict[tuple[int, int, bytes], Rows]]]:
        wanted = self.wanted
        number = space = None
        if wanted.thread is not None:
            row = yield from try_thread(tenant, wanted.thread)
            if row is None:
                return [], {}
            number = row.thread
            if wanted.namespace is not None:
                place = yield from find_space(tenant, number, wanted.namespace)
                if place is None:
                    return [], {}
                space = place[0]
        labels = yield from list_labels(
            tenant, thread=number, space=space, before=wanted.before, id_=wanted.id, after=self._last, limit=self._page
        )
        for thread in {label.thread for label in labels} - self._threads.keys():
            found = yield from thread_numbered(tenant, thread)
            names = yield from spaces_of(tenant, thread)
            self._threads[thread] = None if found is None else _Thread(found.name, found.tree, names)
        return labels, (yield from _writes(tenant, labels))

    def _is_wanted(self, label: LabelRow) -> bool:
        """Whether it is of the namespace that was asked for, in a list of all threads."""
        if self.wanted.thread is not None or self.wanted.namespace is None:
            return True
        thread = self._threads.get(label.thread)
        return thread is not None and thread.namespaces.get(label.space) == self.wanted.namespace


def _writes(tenant: int, labels: list[LabelRow]) -> Program[dict[tuple[int, int, bytes], Rows]]:
    """What is pending on labels: one search for each namespace, over the range of its ids."""
    ranges: dict[tuple[int, int], list[bytes]] = {}
    for label in labels:
        ranges.setdefault((label.thread, label.space), []).append(label.id)
    if not ranges:
        return {}
    found = yield Batch(
        *(select_writes_between(tenant, *key, low=min(ids), high=max(ids)) for key, ids in ranges.items()), last=True
    )
    by_label: dict[tuple[int, int, bytes], Rows] = {}
    for key, rows in zip(ranges, found, strict=True):
        for row in rows:
            by_label.setdefault((*key, row[0]), []).append(row)
    return by_label


@dataclass(slots=True)
class Ancestors:
    """A checkpoint's ancestors, from one to its parent, by the ids that the caller gave them."""

    engine: LineEngine
    thread: str
    namespace: str
    texts: Texts | None = None

    def entry(self, id_: bytes) -> Flow[Entry | None]:
        """One of them. None: there is no such checkpoint (any more)."""
        tenant = yield from self.engine.ctx.tenant()
        if tenant is None:
            return None
        if self.texts is None:
            self.texts = Texts(self.engine, tenant)
        found = yield from read(partial(self._find, tenant, id_))
        if found is None:
            return None
        tree, record, writes, bases = found
        text = yield from self.texts.of(tree, record)
        return Entry(self.thread, self.namespace, id_, text, writes_of(writes, {record: text, **bases}))

    def _find(self, tenant: int, id_: bytes) -> Program[tuple[int, int, Rows, dict[int, bytes]] | None]:
        row = yield from try_thread(tenant, self.thread)
        place = (yield from find_space(tenant, row.thread, self.namespace)) if row is not None else None
        if row is None or place is None:
            return None
        found = yield from find_label(tenant, row.thread, place[0], id_)
        if found is None:
            return None
        [rows] = yield Batch(select_writes(tenant, row.thread, place[0], id_))
        bases = yield from odd_bases(tenant, row.tree, rows, [found.record])
        return row.tree, found.record, rows, bases
