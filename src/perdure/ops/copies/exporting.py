"""Taking a thread to one file: all its lines, or one.

    1  look        one transaction: the thread's row, its namespaces and ids, and which records belong to it
    2  states      stretch by stretch (a keyframe and what builds on it), each state checked against its hash; what is
                   written is the difference to the state before it
    3  the rest    ids and namespaces; then the file is synced and gets its name

Records never change their meaning, so that a file written over many transactions shows the thread as it was at 1. If a
prune removes something before it was read, everything begins anew. Memory: one stretch, and some 50 bytes for each
checkpoint of the tree.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import orjson

from perdure.errors import Conflict, Damaged, ReadOnlyStore
from perdure.log.history_walk import Stretch, read_stretch
from perdure.log.ids import show_id
from perdure.log.labels import MAIN
from perdure.log.pending import odd_bases, select_writes, writes_of
from perdure.log.reading import RECORD, read_chain, read_state
from perdure.log.records import ERASED, Record, record_of
from perdure.log.thread_table import ThreadRow, metadata_of, no_thread
from perdure.ops.copies.copied import CopyRow, Exported, add_copy
from perdure.ops.copies.places import Part, part_for
from perdure.ops.copies.sections import SectionWriter
from perdure.ops.copies.thread_files import (
    KIND,
    LabelPart,
    SpacePart,
    StatePart,
    ThreadPart,
    TombPart,
    WritePart,
    encode_parts,
)
from perdure.ops.copies.thread_files import Part as FilePart
from perdure.ops.copies.thread_views import Label, View, look
from perdure.storage.program import Batch, Program, Progress, Rows, Sql, read, write
from perdure.threads.context import Context
from perdure.values.diff import find

_ATTEMPTS = 8
_BLOCK_BYTES = 1 << 20
_HELD_MAX = 4
_HELD_BYTES_MAX = 64 << 20
_BATCH = 200
_SAMPLES, _SAMPLE_BYTES = 16, 48
_BASE = 5  # in a row of pending writes: what the value was compressed against

_WAITING = Sql(
    """SELECT DISTINCT w.space, w.id FROM write w WHERE w.tenant = :tenant AND w.thread = :thread
    AND NOT EXISTS (SELECT 1 FROM label l
        WHERE l.tenant = w.tenant AND l.thread = w.thread AND l.space = w.space AND l.id = w.id)"""
)


class Gone(Exception):
    """A record was removed before it was read."""


class State(NamedTuple):
    """A checkpoint as it was read: what goes into the file."""

    record: Record
    text: bytes
    salt: bytes
    parent_hash: bytes


class _Box:
    """Collects the parts of one section until they make a block."""

    def __init__(self, writer: SectionWriter, section: str) -> None:
        self._writer, self._section = writer, section
        self._parts: list[FilePart] = []
        self._size = 0

    def put(self, part: FilePart, size: int = 200) -> None:
        self._parts.append(part)
        self._size += size
        if self._size >= _BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            self._writer.block(self._section, encode_parts(self._parts))
            self._parts, self._size = [], 0


class Export:
    """One attempt to write a thread to a file."""

    def __init__(self, ctx: Context, tenant: int, view: View, part: Part, *, is_whole: bool) -> None:
        self._ctx, self._tenant, self._view, self._is_whole = ctx, tenant, view, is_whole
        part.file.seek(0)
        part.file.truncate()
        writer = SectionWriter(part.file, KIND)
        self._writer = writer
        self._tombs, self._states, self._writes = _Box(writer, "D"), _Box(writer, "T"), _Box(writer, "W")
        self._is_out = bytearray(len(view.ids))
        self._held: OrderedDict[int, bytes] = OrderedDict()  # texts that stand in the file already
        self._labels: dict[int, list[Label]] = {}
        for label in view.labels:
            self._labels.setdefault(label.record, []).append(label)
        self.token = ctx.entropy(16)
        self.done = 0

    def steps(self, progress: Progress | None) -> Generator[Any, Any, None]:
        """2 and 3. Yields flows, and functions that take time. Raises Gone."""
        view, total = self._view, self._view.count()
        head_hash = yield from self._head_hash()
        yield partial(self._begin, head_hash, total)
        for record in view.tombs():
            found = yield read(partial(_row, self._tenant, view.row.tree, record))
            if found is None:
                raise Gone
            self._put_tomb(found)
        self._tombs.flush()
        for group in view.groups():
            yield from self._group(group)
            if progress is not None:
                progress(self.done, total)
        yield from self._waiting_writes()
        yield self._end

    def _head_hash(self) -> Generator[Any, Any, bytes]:
        view = self._view
        found = yield read(partial(_row, self._tenant, view.row.tree, view.head))
        if found is None:
            raise Gone
        if view.head == view.row.head and found.hash != view.row.head_hash:
            raise Damaged(
                f"the head of thread {view.row.name!r} ({show_id(view.head)}) was changed; run `perdure store verify`",
                checkpoints=(show_id(view.head),),
            )
        return bytes(found.hash)

    def _begin(self, head_hash: bytes, total: int) -> None:
        row = self._view.row
        header = ThreadPart(
            token=self.token,
            store=self._view.store,
            exported_at=self._ctx.clock_us(),
            name=row.name,
            metadata=orjson.dumps(metadata_of(row)).decode(),
            created_at=row.created_at,
            updated_at=row.updated_at,
            head=self._view.head,
            head_hash=head_hash,
            is_whole=self._is_whole,
            checkpoints=total,
        )
        self._writer.block("H", encode_parts([header]))

    def _put_tomb(self, record: Record) -> None:
        r = record
        erased = r.keyframe == ERASED
        self._tombs.put(TombPart(r.id, r.parent, r.kind, r.at, r.step, r.note, r.metadata, r.size, r.hash, erased))
        self._mark(r.id)

    def _mark(self, record: int) -> None:
        at = self._view.index(record)
        if at is not None:
            self._is_out[at] = 1

    def _is_in_file(self, record: int | None) -> bool:
        at = self._view.index(record) if record is not None else None
        return at is not None and bool(self._is_out[at])

    def _group(self, group: list[int]) -> Generator[Any, Any, None]:
        """The checkpoints of one keyframe: the newest first, and with it all that it is built on."""
        waiting = set(group)
        while group:
            tip = group.pop()
            if tip not in waiting:
                continue
            ids, states = yield from self._read(tip)
            labels = [label for record in ids if record in waiting for label in self._labels.get(record, ())]
            beside = (yield read(partial(_writes_of, self._tenant, self._view.row, labels))) if labels else {}
            before = len(waiting)
            odd = yield partial(self._put_states, states, waiting, beside)
            if tip in waiting:
                raise Gone
            for label in odd:
                yield from self._put_odd_writes(label.space, label.id, label.record)
            self.done += before - len(waiting)

    def _read(self, tip: int) -> Generator[Any, Any, tuple[list[int], Iterator[State]]]:
        """A checkpoint and what it is built on, the newest first: their ids, and their states."""
        tree = self._view.row.tree
        stretch: Stretch | None = yield read(partial(read_stretch, self._tenant, tree, tip))
        if stretch is None:
            raise Gone
        try:
            states = yield stretch.states
        except Damaged:
            state: State | None = yield read(partial(_one, self._tenant, tree, tip))  # its keyframe may be rebuilt
            if state is None:
                raise Gone from None
            return [tip], iter([state])
        return [stretch.chain.record.key, *stretch.chain.ids], _states(stretch, states)

    def _put_states(
        self, states: Iterator[State], waiting: set[int], beside: dict[tuple[int, bytes], Rows]
    ) -> list[Label]:
        """Write what is wanted of a stretch, the oldest first, and the writes on it. Gives the ids whose writes need
        the text of another checkpoint."""
        parts: list[StatePart] = []
        odd: list[Label] = []
        newer: State | None = None
        below: tuple[int, bytes] | None = None
        for state in states:
            record = state.record.id
            if record not in waiting:
                if self._is_in_file(record):  # so is everything that it is built on
                    below = record, state.text
                    break
                continue  # another thread's
            if newer is not None:
                parts.append(self._part(newer, (record, state.text)))
            else:
                self._hold(record, state.text)
            newer = state
            waiting.discard(record)
            for label in self._labels.get(record, ()):
                rows = beside.get((label.space, label.id), [])
                own = [row for row in rows if row[_BASE] in (None, record)]
                self._put_writes(label.space, label.id, own, {record: state.text})
                odd += [label] if len(own) < len(rows) else []
        if newer is not None:
            parts.append(self._part(newer, below or self._before(newer.record, newer.text)))
        for part in reversed(parts):
            if part.parent_hash is not None and self._is_in_file(part.parent):
                part.parent_hash = None
            self._states.put(part, len(part.data) + 200)
            self._mark(part.id)
        return odd

    def _before(self, record: Record, new: bytes) -> tuple[int, bytes] | None:
        """The text of its parent, if that is at hand and in the file, and worth a comparison."""
        text = self._held.get(record.parent or 0)
        if text is None or record.parent is None or not self._is_in_file(record.parent):
            return None
        return (record.parent, text) if _alike(text, new) else None

    def _part(self, state: State, base: tuple[int, bytes] | None) -> StatePart:
        data, number = state.text, None
        if base is not None and base[0] < state.record.id:
            splices = msgspec.msgpack.encode([part for op in find(base[1], state.text).items for part in op])
            if len(splices) < len(data):
                data, number = splices, base[0]
        r = state.record
        return StatePart(
            r.id,
            r.parent,
            None if r.parent is None else state.parent_hash,
            r.kind,
            r.at,
            r.step,
            r.note,
            r.metadata,
            r.hash,
            state.salt,
            number,
            data,
        )

    def _hold(self, record: int, text: bytes) -> None:
        self._held[record] = text
        while len(self._held) > 1 and (
            len(self._held) > _HELD_MAX or sum(map(len, self._held.values())) > _HELD_BYTES_MAX
        ):
            self._held.popitem(last=False)

    # --- what stands beside the states

    def _put_writes(self, space: int, id_: bytes, rows: Rows, texts: dict[int, bytes]) -> None:
        name = self._view.spaces.get(space, "")
        for found in writes_of(rows, texts):
            part = WritePart(name, id_, found.task, found.idx, found.channel, found.path, found.text)
            self._writes.put(part, len(found.text) + 200)

    def _put_odd_writes(self, space: int, id_: bytes, own: int | None) -> Generator[Any, Any, None]:
        """Those that were stored against another checkpoint than their own, which was put again since."""
        rows, bases = yield read(partial(_odd_writes, self._tenant, self._view.row, space, id_))
        rows = [row for row in rows if own is None or row[_BASE] not in (None, own)]
        yield partial(self._put_writes, space, id_, rows, bases)

    def _waiting_writes(self) -> Generator[Any, Any, None]:
        """Those that came before their checkpoint."""
        if not self._is_whole:
            return
        for space, id_ in (yield read(partial(_waiting, self._tenant, self._view.row.thread))):
            yield from self._put_odd_writes(space, id_, None)

    def _end(self) -> None:
        view, writer = self._view, self._writer
        for box in (self._states, self._writes):
            box.flush()
        spaces = [SpacePart(name, view.heads.get(number)) for number, name in view.spaces.items() if number != MAIN]
        if spaces:
            writer.block("S", encode_parts(spaces))
        labels = _Box(writer, "L")
        for label in view.labels:
            labels.put(LabelPart(view.spaces.get(label.space, ""), label.id, label.record, label.run))
        labels.flush()
        writer.end()


def _alike(old: bytes, new: bytes) -> bool:
    """Whether much of a text stands in another one. Comparing texts that have nothing in common takes long."""
    step = max(1, len(new) // _SAMPLES)
    samples = [new[at : at + _SAMPLE_BYTES] for at in range(0, len(new), step)]
    return sum(sample in old for sample in samples) * 2 >= len(samples)


def _states(stretch: Stretch, states: Iterator[tuple[Record, bytes]]) -> Iterator[State]:
    salts = stretch.chain.packed_salts()
    for record, text in states:
        link = stretch.links[record.id]
        yield State(record, text, salts.get(record.id, link.salt), link.parent_hash or b"")


def _row(tenant: int, tree: int, record: int) -> Program[Record | None]:
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=record), last=True)
    return record_of(rows[0]) if rows else None


def _one(tenant: int, tree: int, record: int) -> Program[State | None]:
    """One state by itself. Raises Damaged."""
    chain = yield from read_chain(tenant, tree, record)
    loaded = yield from read_state(tenant, tree, record)
    if chain is None or loaded is None:
        return None
    return State(loaded.record, loaded.data, chain.salt, chain.parent_hash or b"")


def _writes_of(tenant: int, row: ThreadRow, labels: list[Label]) -> Program[dict[tuple[int, bytes], Rows]]:
    """What is pending on some ids, as it is stored."""
    found: dict[tuple[int, bytes], Rows] = {}
    for start in range(0, len(labels), _BATCH):
        some = labels[start : start + _BATCH]
        answers = yield Batch(*(select_writes(tenant, row.thread, label.space, label.id) for label in some))
        for label, rows in zip(some, answers, strict=True):
            if rows:
                found[label.space, label.id] = rows
    return found


def _odd_writes(tenant: int, row: ThreadRow, space: int, id_: bytes) -> Program[tuple[Rows, dict[int, bytes]]]:
    [rows] = yield Batch(select_writes(tenant, row.thread, space, id_))
    return rows, (yield from odd_bases(tenant, row.tree, rows, ()))


def _waiting(tenant: int, thread: int) -> Program[list[tuple[int, bytes]]]:
    [rows] = yield Batch(_WAITING(tenant=tenant, thread=thread), last=True)
    return [(space, id_) for space, id_ in rows]


def export(
    ctx: Context,
    name: str,
    number: int | None,
    path: str | os.PathLike[str],
    branch: int | None,
    progress: Progress | None,
) -> Generator[Any, Any, Exported]:
    """All of it: yields flows to drive and functions to call (they touch files or take time)."""
    tenant = yield ctx.tenant()
    if tenant is None:
        raise no_thread(name)
    view = yield read(partial(look, tenant, name, number, branch))
    with (yield partial(part_for, path)) as part:
        for _ in range(_ATTEMPTS):
            one = Export(ctx, tenant, view, part, is_whole=branch is None)
            try:
                yield from one.steps(progress)
            except Gone:
                view = yield read(partial(look, tenant, name, number, branch))
                continue
            size = yield part.keep
            row = CopyRow(one.token.hex(), "export", part.place, tenant, ctx.clock_us(), view.stamp, size)
            try:
                yield write(partial(add_copy, row))
            except ReadOnlyStore:
                pass  # there is nowhere to remember it
            return Exported(part.place, name, one.done, size, branch is None)
    raise Conflict(f"thread {name!r} was pruned each time it was to be exported; export it when that is done")
