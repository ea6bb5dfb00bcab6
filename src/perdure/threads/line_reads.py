"""Read checkpoints of lines with their attachments: one by its id, the newest, or a list.

No transaction is open while the caller's code runs. Labels are read in pages, each in one read transaction. Texts are
decoded from a stretch: a part of the line that was read at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from perdure.errors import Damaged, NotFound, Undecodable
from perdure.log.archived import refuse_archived, select_stub
from perdure.log.cache import Base
from perdure.log.envelopes import id_of
from perdure.log.history_walk import Stretch, read_stretch
from perdure.log.ids import show_id
from perdure.log.label_ids import unpack_id
from perdure.log.labels import (
    MAIN,
    LabelRow,
    SpaceRow,
    find_label,
    find_space,
    greatest_label,
    labels_of_record,
    list_labels,
    select_orphans,
    spaces_of,
)
from perdure.log.pending import Write, odd_bases, read_tip, select_writes, select_writes_between, writes_of
from perdure.log.reading import Loaded, read_state
from perdure.log.records import Record
from perdure.log.thread_table import (
    ThreadRow,
    find_thread,
    metadata_of,
    no_thread,
    select_thread,
    thread_numbered,
    try_thread,
)
from perdure.storage import metrics
from perdure.storage.program import Batch, Flow, Program, Rows, Statement, read
from perdure.threads.context import StoreContext
from perdure.threads.flows import base_of
from perdure.threads.thread_cache import Tip
from perdure.values.codec import decode
from perdure.values.registry import Codec

_PAGE_MIN, _PAGE_MAX = 64, 4096
_ALONE_MAX = 3  # how many states are loaded one by one before a stretch is read
_STRETCHES_MAX = 4


class LineCheckpoint(NamedTuple):
    """A checkpoint of a line: the caller's id, the state, and the values attached to it."""

    thread: str
    namespace: str
    id: str
    text: bytes
    writes: Sequence[Write]
    codec: Codec
    is_orphan: bool = False  # its parent was removed
    parts: Mapping[str, Any] = MappingProxyType({})  # the parts of the text by name, if its base is in memory

    @property
    def state(self) -> Any:
        """The state, decoded anew each time."""
        return decode(self.text, self.codec)

    @property
    def attachments(self) -> dict[str, Any]:
        """The attached values by key. A value that replaces (index -1) sorts before the first one, and wins."""
        decoded: dict[str, Any] = {}
        for one in self.writes:
            decoded.setdefault(one.key, decode(one.text, self.codec))
        return decoded


class LineInfo(NamedTuple):
    """A line of a thread: its namespace, its newest checkpoint, and its checkpoints by the caller's ids.

    Checkpoints are named by their ids in `thread.history()`.
    """

    namespace: str
    newest: str
    checkpoints: Mapping[str, str]


@dataclass(slots=True)
class _LineReader:
    """The decoding of a stretch, from its newest record to its oldest."""

    ids: set[int]
    states: Iterator[tuple[Record, bytes]]
    now: tuple[Record, bytes] | None = None

    def text(self, record: int) -> bytes | None:
        """Return the text of a record, or None if the reader has passed it or the stretch does not have it."""
        if self.now is not None and self.now[0].id == record:
            return self.now[1]
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
    """Reads the texts of records one after the other. Fastest along a line."""

    ctx: StoreContext
    tenant: int
    _alone: int = 0
    _readers: dict[int, list[_LineReader]] = field(default_factory=dict)  # by tree

    def of(self, tree: int, record: int) -> Flow[bytes]:
        """Return the text of one record. Raises Damaged."""
        readers = self._readers.setdefault(tree, [])
        for reader in readers:
            if (text := reader.text(record)) is not None:
                return text
        if (cached := self.ctx.cache.get((self.tenant, tree, record))) is not None:
            return cached.data
        self._alone += 1
        if self._alone > _ALONE_MAX:
            stretch = yield from read(partial(read_stretch, self.tenant, tree, record))
            if stretch is not None and (text := _begin(stretch, readers)) is not None:
                return text
        # Reading one record also rebuilds a damaged keyframe, which reading a stretch cannot.
        loaded = yield from read(partial(read_state, self.tenant, tree, record))
        if loaded is None:
            raise _is_missing(record)
        return loaded.data


def _begin(stretch: Stretch, readers: list[_LineReader]) -> bytes | None:
    """Return the text of a stretch's newest record. Return None if the stretch is damaged: read its records alone."""
    try:
        states = stretch.states()
    except Damaged:
        return None
    readers.insert(0, _LineReader(set(stretch.links), states))
    del readers[_STRETCHES_MAX:]
    return readers[0].text(stretch.chain.record.id)


def _is_missing(record: int) -> Damaged:
    shown = show_id(record)
    return Damaged(f"checkpoint {shown} is missing; run `perdure store verify`", checkpoints=(shown,))


# --- one checkpoint


class _At(NamedTuple):
    """The result of a search: the thread, the labelled record, its state (None: to be read later), its writes."""

    row: ThreadRow
    label: LabelRow
    state: Loaded | Base | None
    writes: Rows
    bases: dict[int, bytes]
    is_orphan: bool


@metrics.operation("load")
def load(
    ctx: StoreContext, name: str, namespace: str, id_: bytes | None, texts: Texts | None = None
) -> Flow[LineCheckpoint | None]:
    """Load a checkpoint by its id, or the newest of a namespace, with its attachments. Return None if there is none.

    Pass `texts` to load several along a line.
    """
    tenant = yield from ctx.tenant()
    if tenant is None:
        return None
    at: _At | None = None
    try:
        if id_ is None:
            at = yield from _find_at_once(ctx, tenant, name, namespace)
        if at is None:
            at = yield from read(partial(_find, tenant, name, namespace, id_, ctx, texts is None))
    except NotFound:
        ctx.threads.forget((tenant, name))
        return None
    if at is None:
        return None
    (row, label, state, rows, bases, is_orphan) = at
    thread = ctx.threads.note((tenant, name), row.thread, row.tree, metadata_of(row))
    if state is None:
        assert texts is not None
        text = yield from texts.of(row.tree, label.record)
    else:
        text = state.data
    if id_ is None:
        thread.note_tip(namespace, Tip(label.id, label.record))
        if isinstance(state, Loaded):
            ctx.cache.put((tenant, row.tree, label.record), base_of(state, row))
    writes = writes_of(rows, {label.record: text, **bases})
    parts = state.parts if isinstance(state, Base) else {}
    return LineCheckpoint(name, namespace, unpack_id(label.id), text, writes, ctx.codec, is_orphan, parts)


def _find_at_once(ctx: StoreContext, tenant: int, name: str, namespace: str) -> Flow[_At | None]:
    """Find the newest checkpoint in one round trip, if it is the one in memory. Return None if it must be looked for.

    Raises NotFound if there is no such thread, so that a new thread costs one round trip too.
    """
    thread = ctx.threads.get((tenant, name))
    if thread is None:
        yield from read(partial(_check_there, tenant, name))
        return None
    tip = thread.tips.get("") if namespace == "" else None
    base = None if tip is None else ctx.cache.get((tenant, thread.tree, tip.record))
    if tip is None or base is None:
        return None
    return (yield from read(partial(_find_known, tenant, name, LabelRow(thread.thread, MAIN, *tip), base)))


def _check_there(tenant: int, name: str) -> Program[None]:
    rows, stubs = yield Batch(select_thread(tenant, name), select_stub(tenant, "thread", name), last=True)
    if not rows:
        refuse_archived("thread", name, stubs)
        raise no_thread(name)


def _find_known(tenant: int, name: str, tip: LabelRow, base: Base) -> Program[_At | None]:
    answer = yield from read_tip(tenant, name, tip, base.record.parent)
    if answer is None or any(write[5] not in (None, tip.record) for write in answer[1]):
        return None
    row, writes = answer
    return _At(row, tip, base, writes, {}, is_orphan=False)


def _find(
    tenant: int, name: str, namespace: str, id_: bytes | None, ctx: StoreContext, with_state: bool
) -> Program[_At | None]:
    row = yield from find_thread(tenant, name)
    place = yield from find_space(tenant, row.thread, namespace)
    if place is None:
        return None
    number, newest = place if place[0] != MAIN else (MAIN, row.head)
    state: Loaded | Base | None = None
    if id_ is not None:
        label = yield from find_label(tenant, row.thread, number, id_)
    else:
        label = yield from greatest_label(tenant, row.thread, number)
        if newest is not None and (label is None or label.record != newest):
            label, state = yield from _newest(tenant, row, number, label, newest)
    if label is None:
        return None
    if state is None:
        state = ctx.cache.get((tenant, row.tree, label.record))
    if state is None and with_state and (state := (yield from read_state(tenant, row.tree, label.record))) is None:
        raise _is_missing(label.record)
    writes, orphans = yield Batch(
        select_writes(tenant, row.thread, number, label.id),
        select_orphans(tenant, row.tree, row.thread, number, label.id, label.id),
    )
    bases = yield from odd_bases(tenant, row.tree, writes, [label.record])
    return _At(row, label, state, writes, bases, bool(orphans))


def _newest(
    tenant: int, row: ThreadRow, space: int, greatest: LabelRow | None, head: int
) -> Program[tuple[LabelRow | None, Loaded | None]]:
    """Return the newest label if the head does not have the greatest id, with its state.

    A clock that stepped back, a fork or a rollback can cause that. Return the greatest label if the head was saved
    without an id, or its namespace was removed.
    """
    loaded = yield from read_state(tenant, row.tree, head)
    if loaded is None:
        return greatest, None
    try:
        id_ = id_of(loaded.data)
    except Undecodable:
        return greatest, None
    label = yield from find_label(tenant, row.thread, space, id_)
    if space != MAIN and (label is None or label.record != head):
        return greatest, None
    return LabelRow(row.thread, space, id_, head), loaded


# --- lists


class LineFilters(NamedTuple):
    """The conditions of a list of checkpoints. None is no condition."""

    thread: str | None = None
    namespace: str | None = None
    id: bytes | None = None
    before: bytes | None = None


class _Thread(NamedTuple):
    name: str
    tree: int
    namespaces: dict[int, str]


@dataclass(slots=True)
class _Page:
    """A page of labels, the writes of each, and the labels whose parent was removed."""

    labels: list[LabelRow] = field(default_factory=list)
    writes: dict[tuple[int, int, bytes], Rows] = field(default_factory=dict)
    orphans: set[tuple[int, int, bytes]] = field(default_factory=set)


@dataclass(slots=True)
class Listing:
    """An iteration over checkpoints of lines, the greatest id first."""

    ctx: StoreContext
    filters: LineFilters
    _texts: Texts | None = None
    _page: int = _PAGE_MIN
    _last: LabelRow | None = None
    _ended: bool = False
    _waiting: Iterator[tuple[LabelRow, Rows]] = field(default_factory=lambda: iter(()))
    _orphans: set[tuple[int, int, bytes]] = field(default_factory=set)  # of the page
    _threads: dict[int, _Thread | None] = field(default_factory=dict)

    def next(self) -> Flow[LineCheckpoint | None]:
        """Return the next checkpoint, or None at the end."""
        tenant = yield from self.ctx.tenant()
        if tenant is None:
            return None
        texts = self._texts = self._texts or Texts(self.ctx, tenant)
        while True:
            for label, rows in self._waiting:
                thread = self._threads.get(label.thread)
                if thread is not None and (checkpoint := (yield from self._checkpoint(texts, thread, label, rows))):
                    return checkpoint
            if self._ended:
                return None
            page = yield from read(partial(self._read_page, tenant))
            self._ended = len(page.labels) < self._page
            self._page = min(self._page * 2, _PAGE_MAX)
            if page.labels:
                self._last = page.labels[-1]
            labels = [label for label in page.labels if self._matches(label)]
            self._waiting = iter([(label, page.writes.get(label[:3], [])) for label in labels])
            self._orphans = page.orphans

    def _checkpoint(self, texts: Texts, thread: _Thread, label: LabelRow, rows: Rows) -> Flow[LineCheckpoint | None]:
        """Return the checkpoint of a label, or None if it was removed meanwhile."""
        try:
            text = yield from texts.of(thread.tree, label.record)
        except Damaged:
            # The checkpoint may have been removed or saved again since its label was read.
            now = yield from read(partial(find_label, texts.tenant, label.thread, label.space, label.id))
            if now is None:
                return None
            if now.record == label.record:
                raise
            return (yield from self._checkpoint(texts, thread, label._replace(record=now.record), rows))
        bases = {label.record: text}
        if any(row[5] not in (None, label.record) for row in rows):
            bases |= yield from read(partial(odd_bases, texts.tenant, thread.tree, rows, [label.record]))
        namespace, writes = thread.namespaces.get(label.space, ""), writes_of(rows, bases)
        is_orphan = label[:3] in self._orphans
        return LineCheckpoint(thread.name, namespace, unpack_id(label.id), text, writes, self.ctx.codec, is_orphan)

    def _read_page(self, tenant: int) -> Program[_Page]:
        """Read the next page of labels with their attachments."""
        where = self.filters
        number = space = None
        if where.thread is not None:
            row = yield from try_thread(tenant, where.thread)
            if row is None:
                return _Page()
            number = row.thread
            if where.namespace is not None:
                place = yield from find_space(tenant, number, where.namespace)
                if place is None:
                    return _Page()
                space = place[0]
        labels = yield from list_labels(
            tenant, thread=number, space=space, before=where.before, id_=where.id, after=self._last, limit=self._page
        )
        for thread in {label.thread for label in labels} - self._threads.keys():
            named = yield from thread_numbered(tenant, thread)
            names = {MAIN: "", **{number: one.name for number, one in (yield from spaces_of(tenant, thread)).items()}}
            self._threads[thread] = None if named is None else _Thread(named.name, named.tree, names)
        return (yield from _page(tenant, labels, self._threads))

    def _matches(self, label: LabelRow) -> bool:
        """Return whether a label has the namespace of a list over all threads. Other lists are filtered by SQL."""
        if self.filters.thread is not None or self.filters.namespace is None:
            return True
        thread = self._threads.get(label.thread)
        return thread is not None and thread.namespaces.get(label.space) == self.filters.namespace


def _page(tenant: int, labels: list[LabelRow], threads: Mapping[int, _Thread | None]) -> Program[_Page]:
    """Read the attachments of labels, and which have lost their parent.

    Each namespace takes one search for each of the two, over the range of its ids.
    """
    ranges: dict[tuple[int, int], list[bytes]] = {}
    for label in labels:
        if threads[label.thread] is not None:
            ranges.setdefault((label.thread, label.space), []).append(label.id)
    page = _Page(labels)
    if not ranges:
        return page
    searches: list[Statement] = []
    for (thread, space), ids in ranges.items():
        of, low, high = threads[thread], min(ids), max(ids)
        assert of is not None
        searches.append(select_writes_between(tenant, thread, space, low=low, high=high))
        searches.append(select_orphans(tenant, of.tree, thread, space, low, high))
    answers = yield Batch(*searches, last=True)
    for key, rows, orphans in zip(ranges, answers[::2], answers[1::2], strict=True):
        for row in rows:
            page.writes.setdefault((*key, row[0]), []).append(row)
        page.orphans.update((*key, id_) for (id_,) in orphans)
    return page


def lines_of(tenant: int, row: ThreadRow, record: int | None = None) -> Program[list[LineInfo]]:
    """Return the lines of a thread that have a checkpoint, by namespace. "" is the thread's own, with its head.

    With `record`, only its ids and those of the newest checkpoints are read.
    """
    spaces = yield from spaces_of(tenant, row.thread)
    labels = [] if record is None else (yield from labels_of_record(tenant, row.thread, record))
    heads = {(label.space, label.record) for label in labels}
    if record is None or not all((one.space, one.head) in heads for one in spaces.values()):
        labels = yield from list_labels(tenant, thread=row.thread)
    spaces[MAIN] = SpaceRow(row.thread, MAIN, "", row.head)
    own: dict[int, dict[bytes, int]] = {}
    for label in labels:
        own.setdefault(label.space, {})[label.id] = label.record
    lines: list[LineInfo] = []
    for _, number, name, head in sorted(spaces.values(), key=lambda space: space.name):
        records = own.get(number, {})
        if number != MAIN and head not in records.values():  # the head was pruned, or belongs to the fork's source
            head = records[max(records)] if records else None
        if head is not None:
            ids = {unpack_id(id_): show_id(record) for id_, record in records.items()}
            lines.append(LineInfo(name, show_id(head), ids))
    return lines
