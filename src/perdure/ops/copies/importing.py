"""Taking a thread into a store from the file that it was exported to: with the same ids and hashes, under a number of
this store's own.

    1  check       the file's hash, before anything of it is used
    2  states      batch by batch, into a thread without a name or a head, which nobody sees; the hash of each is made
                   anew from what the file says, and must be what it says; how they are stored is decided anew
    3  publish     one transaction: ids and namespaces, the head, the name

A kill before 3 leaves a thread that nobody sees. The next import removes it, once nothing was added to it for an hour.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson

from perdure.errors import Conflict, PerdureError, Undecodable, UsageError
from perdure.log.append import INSERT, base_after, insert_params, prepare, seal
from perdure.log.cache import Base
from perdure.log.gc import delete
from perdure.log.ids import show_id
from perdure.log.labels import ensure_space
from perdure.log.pending import Write, put_writes
from perdure.log.reading import RECORD, read_state
from perdure.log.records import ERASED, NO_HASH, Record, record_of
from perdure.log.thread_table import MINUTE_US, create_thread, find_thread, merge_metadata, try_thread
from perdure.ops.copies.copied import Imported
from perdure.ops.copies.sections import SectionReader
from perdure.ops.copies.thread_files import (
    KIND,
    LabelPart,
    SpacePart,
    StatePart,
    ThreadPart,
    TombPart,
    WritePart,
    decode_parts,
)
from perdure.storage.base import ConstraintFailed
from perdure.storage.columns import NOTE, RECORD_METADATA
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, Statement, read, write
from perdure.threads.checks import check_name
from perdure.threads.context import Context
from perdure.threads.flows import base_of
from perdure.values.delta import apply_splices

_ATTEMPTS = 5
_BASES_MAX = 16
_BASES_BYTES_MAX = 64 << 20
_HASHES_MAX = 50_000
_BATCH_RECORDS = 200
_BATCH_BYTES = 4 << 20
_LEFT_US = 3600 * 1_000_000
_HIDDEN = "(import "  # the names of threads that are being made

_TOMB = Sql(
    """INSERT INTO record (tenant, tree, id, thread, parent, base, keyframe, key, kind, at, step, note, metadata, size,
        cost, hash, body, stamp)
    VALUES (:tenant, :tree, :id, :thread, :parent, :base, :keyframe, :key, :kind, :at, :step, :note, :metadata, :size,
        :cost, :hash, NULL, {stamp})""",
    seals={"note": NOTE, "metadata": RECORD_METADATA},
)
_LABEL = Sql(
    """INSERT INTO label (tenant, thread, space, id, record, run)
    VALUES (:tenant, :thread, :space, :id, :record, :run)"""
)
_MISSING = Sql(
    """SELECT l.record FROM label l WHERE l.tenant = :tenant AND l.thread = :thread AND NOT EXISTS (
        SELECT 1 FROM record r WHERE r.tenant = l.tenant AND r.tree = :thread AND r.id = l.record
        AND r.body IS NOT NULL) LIMIT 1"""
)
_SPACE_HEAD = Sql("UPDATE space SET head = :head WHERE tenant = :tenant AND thread = :thread AND space = :space")
_TOUCH = Sql("UPDATE thread SET updated_at = :at, active = :active WHERE tenant = :tenant AND thread = :thread")
_PUBLISH = Sql(
    """UPDATE thread SET name = :name, head = :head, head_hash = :head_hash, created_at = :created_at,
        updated_at = :updated_at, active = :active WHERE tenant = :tenant AND thread = :thread"""
)
_COUNT = Sql("SELECT count(*) FROM record WHERE tenant = :tenant AND tree = :tree AND body IS NOT NULL")
_LEFT = Sql(
    """SELECT name FROM thread WHERE tenant = :tenant AND head IS NULL AND updated_at < :before AND name >= :low
    AND name < :high"""
)
_splices = msgspec.msgpack.Decoder(list[int | bytes]).decode


class Moved(Exception):
    """A compaction has rearranged what was imported so far: what comes next was made for how it was."""


class Import:
    """One import of one file, in the order of its methods."""

    def __init__(self, ctx: Context, reader: SectionReader, header: ThreadPart, name: str | None) -> None:
        self._ctx, self._reader, self._header = ctx, reader, header
        self.name = check_name(name) if name is not None else header.name
        self._tenant = self._thread = 0
        self._hidden = f"{_HIDDEN}{header.token.hex()} {ctx.entropy(8).hex()})"
        self._statements: list[Statement] = []
        self._weight = 0
        self._bases: OrderedDict[int, tuple[Base, bool]] = OrderedDict()  # the texts; whether something builds on it
        self._hashes: OrderedDict[int, bytes] = OrderedDict()
        self._owed: dict[int, bytes] = {}  # hashes of parents that come later, as their children say
        self.done = 0
        self._spaces: list[SpacePart] = []
        self._labels: list[LabelPart] = []

    def look(self) -> Flow[Imported | None]:
        """Whether it is here already. Raises UsageError if another thread has the name."""
        self._tenant = yield from self._ctx.ensure_tenant()
        there = yield from read(partial(_there, self._tenant, self.name))
        if there is None:
            return None
        row, count = there
        head = self._header
        if (row.head, row.head_hash) == (head.head, head.head_hash) and count >= head.checkpoints:
            return Imported(self.name, head.checkpoints, show_id(head.head), already=True)
        raise _taken(self.name)

    def begin(self) -> Flow[None]:
        """A thread that nobody sees; and those go that a kill has left."""
        at = self._ctx.clock_us()
        for name in (yield from read(partial(_left, self._tenant, at - _LEFT_US))):
            yield from delete(self._tenant, name, None)
        self._thread = yield from write(partial(_create, self._tenant, self._hidden, at))

    def undo(self) -> Flow[None]:
        yield from delete(self._tenant, self._hidden, self._thread)

    def states(self, progress: Progress | None) -> Generator[Any, Any, None]:
        """2. Yields flows, and functions that take time."""
        blocks = self._reader.blocks()
        while (block := (yield partial(self._next, blocks))) is not None:
            section, parts = block
            if section == "D":
                for tomb in parts:
                    self._add_tomb(tomb)
            elif section == "T":
                for state in parts:
                    yield from self._take(state)
            elif section == "W":
                for space, id_, writes in _by_id(parts):
                    yield self._put_writes(space, id_, writes)
            elif section == "S":
                self._spaces += parts
            elif section == "L":
                self._labels += parts
            if progress is not None:
                progress(self._reader.at(), self._reader.bytes)
        yield self._flush()

    def _next(self, blocks: Iterator[tuple[str, bytes]]) -> tuple[str, list[Any]] | None:
        for section, data in blocks:
            return section, decode_parts(section, data)
        return None

    def _take(self, part: StatePart) -> Generator[Any, Any, None]:
        """One checkpoint: what it is made of, and its place."""
        base: Base | None = None
        branching = False
        if part.base is not None:
            known = self._bases.get(part.base)
            if known is None:
                yield self._flush()
                base, branching = (yield self._fetch(part.base)), True
            else:
                base, branching = known
                self._bases.move_to_end(part.base)
        parent_hash = yield from self._parent_hash(part)
        yield partial(self._add, part, base, branching, parent_hash)
        if len(self._statements) >= _BATCH_RECORDS or self._weight >= _BATCH_BYTES:
            yield self._flush()

    def _fetch(self, record: int) -> Flow[Base]:
        loaded = yield from read(partial(read_state, self._tenant, self._thread, record))
        if loaded is None:
            raise UsageError(f"a checkpoint is made of one that is not in it ({show_id(record)})")
        return base_of(loaded, 0)

    def _parent_hash(self, part: StatePart) -> Generator[Any, Any, bytes]:
        if part.parent is None:
            return NO_HASH
        known = self._hashes.get(part.parent)
        if known is None and part.parent_hash is not None:
            if self._owed.setdefault(part.parent, part.parent_hash) != part.parent_hash:
                raise _wrong(part.parent)
            return part.parent_hash
        if known is None:
            yield self._flush()
            known = yield read(partial(_hash, self._tenant, self._thread, part.parent))
        if known is None:
            raise UsageError(f"the parent of checkpoint {show_id(part.id)} is not in it")
        return known

    def _add(self, part: StatePart, base: Base | None, branching: bool, parent_hash: bytes) -> None:
        """Make the row and the body of a checkpoint, if it is what its hash says."""
        text = part.data
        if base is not None:
            try:
                text = apply_splices(base.data, _splices(part.data))
            except (Undecodable, msgspec.MsgspecError) as error:
                raise UsageError(f"the difference of checkpoint {show_id(part.id)} cannot be applied") from error
        draft = prepare(
            text, base, part.salt, kind=part.kind, note=part.note, metadata=part.metadata, branching=branching
        )
        parent = None if part.parent is None else _stub(part.parent, part.step - 1, parent_hash)
        sealed = seal(draft, self._thread, self._thread, part.id, part.at, parent)
        if sealed.hash != part.hash or sealed.step != part.step:
            raise _wrong(part.id)
        self._know(part.id, part.hash)
        self._statements.append(INSERT(**insert_params(draft, self._tenant, sealed)))
        self._weight += len(draft.diff or b"") + len(draft.full or b"") + 500
        self.done += 1
        if base is not None and base.record.id in self._bases:
            self._bases[base.record.id] = base, True
        self._bases[part.id] = base_after(draft, sealed, 0), False
        while len(self._bases) > 2 and (
            len(self._bases) > _BASES_MAX or sum(len(kept.data) for kept, _ in self._bases.values()) > _BASES_BYTES_MAX
        ):
            self._bases.popitem(last=False)

    def _add_tomb(self, part: TombPart) -> None:
        self._know(part.id, part.hash)
        record = Record(
            self._thread,
            part.id,
            self._thread,
            part.parent,
            None,
            ERASED if part.erased else 0,
            part.id,
            part.kind,
            part.at,
            part.step,
            part.note,
            part.metadata,
            part.size,
            0,
            part.hash,
            body=None,
            stamp=0,
        )
        params = record._asdict()
        del params["body"], params["stamp"]
        self._statements.append(_TOMB(tenant=self._tenant, **params))

    def _know(self, record: int, hash_: bytes) -> None:
        if self._owed.pop(record, hash_) != hash_:
            raise _wrong(record)
        self._hashes[record] = hash_
        if len(self._hashes) > _HASHES_MAX:
            self._hashes.popitem(last=False)

    def _flush(self) -> Flow[None]:
        statements, self._statements, self._weight = self._statements, [], 0
        if statements:
            at = self._ctx.clock_us()
            alive = _TOUCH(tenant=self._tenant, thread=self._thread, at=at, active=at // MINUTE_US)
            insert = partial(_insert, self._tenant, self._hidden, self._thread, [*statements, alive])
            try:
                yield from write(insert, solo=True)
            except ConstraintFailed as error:
                raise UsageError("it has two checkpoints with one id") from error

    def _put_writes(self, space: str, id_: bytes, writes: list[Write]) -> Flow[None]:
        at = self._ctx.clock_us()
        put = partial(put_writes, self._tenant, self._hidden, self._thread, space, id_, writes, None, at)
        yield from write(put)

    def publish(self) -> Flow[Imported]:
        """3: everything else, and the name."""
        head = self._header
        if self._owed:
            raise UsageError(f"checkpoint {show_id(next(iter(self._owed)))} is missing in it")
        if self.done != head.checkpoints:
            raise UsageError(f"it says that it has {head.checkpoints} checkpoints, but there are {self.done}")
        known = yield from read(partial(_hash, self._tenant, self._thread, head.head))
        if known != head.head_hash:
            raise _wrong(head.head)
        try:
            yield from write(self._publish, solo=True)
        except ConstraintFailed as error:
            there = yield from read(partial(try_thread, self._tenant, self.name))
            raise (_taken(self.name) if there is not None else UsageError("it has one id twice")) from error
        return Imported(self.name, self.done, show_id(head.head))

    def _publish(self) -> Program[None]:
        head, this = self._header, {"tenant": self._tenant, "thread": self._thread}
        row = yield from find_thread(self._tenant, self._hidden, self._thread, lock=True)
        yield from merge_metadata(self._tenant, row, orjson.loads(head.metadata))
        numbers = {"": 0}
        heads = {part.name: part.head for part in self._spaces}
        for name in dict.fromkeys([*heads, *(label.space for label in self._labels)]):
            numbers[name], _ = yield from ensure_space(self._tenant, self._thread, name)
            yield Batch(_SPACE_HEAD(**this, space=numbers[name], head=heads.get(name)))
        for start in range(0, len(self._labels), _BATCH_RECORDS):
            some = self._labels[start : start + _BATCH_RECORDS]
            yield Batch(
                *(_LABEL(**this, space=numbers[one.space], id=one.id, record=one.record, run=one.run) for one in some)
            )
        [missing] = yield Batch(_MISSING(**this))
        if missing:
            raise UsageError(f"an id points at a checkpoint that is not in it ({show_id(missing[0][0])})")
        yield Batch(
            _PUBLISH(
                **this,
                name=self.name,
                head=head.head,
                head_hash=head.head_hash,
                created_at=head.created_at,
                updated_at=head.updated_at,
                active=head.updated_at // MINUTE_US,
            )
        )


def _there(tenant: int, name: str) -> Program[Any]:
    row = yield from try_thread(tenant, name)
    if row is None:
        return None
    [[(count,)]] = yield Batch(_COUNT(tenant=tenant, tree=row.tree))
    return row, int(count)


def _left(tenant: int, before: int) -> Program[list[str]]:
    """Threads that an import was killed over."""
    high = _HIDDEN[:-1] + chr(ord(_HIDDEN[-1]) + 1)
    [rows] = yield Batch(_LEFT(tenant=tenant, before=before, low=_HIDDEN, high=high), last=True)
    return [name for (name,) in rows if name.startswith(_HIDDEN)]


def _create(tenant: int, name: str, at: int) -> Program[int]:
    row = yield from create_thread(tenant, name, {}, at)
    if row is None:
        raise UsageError("two imports drew the same random name; import it again")
    return row.thread


def _insert(tenant: int, name: str, thread: int, statements: list[Statement]) -> Program[None]:
    row = yield from find_thread(tenant, name, thread, lock=True)
    if row.generation != 0:
        raise Moved
    yield Batch(*statements, last=True)


def _hash(tenant: int, tree: int, record: int) -> Program[bytes | None]:
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=record), last=True)
    return record_of(rows[0]).hash if rows else None


def _stub(record: int, step: int, hash_: bytes) -> Record:
    """As much of a parent as its child's hash is made of."""
    return Record(0, record, 0, None, None, 0, 0, "", 0, step, None, None, 0, 0, hash_, None, 0)


def _by_id(parts: list[WritePart]) -> Iterator[tuple[str, bytes, list[Write]]]:
    found: dict[tuple[str, bytes], list[Write]] = {}
    for part in parts:
        own = Write(part.task, part.idx, part.channel, part.path, part.text)
        found.setdefault((part.space, part.id), []).append(own)
    for (space, id_), writes in found.items():
        yield space, id_, writes


def _wrong(record: int) -> UsageError:
    return UsageError(
        f"checkpoint {show_id(record)} is not what its hash says: the file was changed after it was exported"
    )


def _taken(name: str) -> UsageError:
    return UsageError(
        f"there is another thread {name!r} in this store already, or it has gone on since: import it under another "
        "name (name=…), or delete that one first"
    )


def open_file(path: str | os.PathLike[str], progress: Progress | None) -> tuple[SectionReader, ThreadPart]:
    """1: the file, checked, and what it says of its thread."""
    reader = SectionReader(Path(path), KIND, "imported")
    try:
        reader.check(progress)
        for section, data in reader.blocks():
            if section != "H":
                break
            parts: list[ThreadPart] = decode_parts(section, data)
            if len(parts) == 1:
                return reader, parts[0]
        raise UsageError("it does not begin with a thread")
    except PerdureError as error:
        reader.close()
        raise _refused(reader, error) from error


def _refused(reader: SectionReader, error: PerdureError) -> UsageError:
    """Every error names the file, and that it left nothing behind."""
    text = str(error)
    return error if isinstance(error, UsageError) and str(reader.path) in text else reader.refused(text)


def import_file(
    ctx: Context, path: str | os.PathLike[str], name: str | None, progress: Progress | None
) -> Generator[Any, Any, Imported]:
    """All of it: yields flows to drive and functions to call (they touch files or take time)."""
    reader, header = yield partial(open_file, path, None)
    try:
        for _ in range(_ATTEMPTS):
            one = Import(ctx, reader, header, name)
            already = yield one.look()
            if already is not None:
                return already  # type: ignore[no-any-return]
            yield one.begin()
            try:
                yield from one.states(progress)
                return (yield one.publish())  # type: ignore[no-any-return]
            except Moved:
                yield one.undo()
            except UsageError as error:
                yield one.undo()
                raise _refused(reader, error) from error
            except Exception:
                yield one.undo()
                raise
    finally:
        reader.close()
    raise Conflict(f"{path} was not imported: the store is compacted without pause; import it when that is done")
