"""The save request of a line: checkpoints under the caller's ids, for the save engine.

A state is text here: the caller encodes it and knows its meaning. This module never writes a record; the engine does
(`threads/save_engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from perdure.errors import Conflict, Damaged, PerdureError, ThreadDeleted
from perdure.log import gc
from perdure.log.ancestors import skip_length
from perdure.log.append import Appended, Place, base_after, prepare, seal
from perdure.log.cache import Base
from perdure.log.labels import Label, LabelRow, ParentChanged, find_named
from perdure.log.pending import Write
from perdure.log.reading import Loaded, read_state
from perdure.log.records import SALT_BYTES
from perdure.log.thread_table import ThreadRow, metadata_of, try_thread
from perdure.log.turns import Held, Turn
from perdure.storage import metrics
from perdure.storage.program import Flow, Program, aside, read
from perdure.threads.attachments import attach, is_too_late
from perdure.threads.context import StoreContext
from perdure.threads.externals import keep
from perdure.threads.flows import base_of
from perdure.threads.instrumentation import warn_if_large
from perdure.threads.save_engine import Moved, PreparedSave, prepare_next
from perdure.threads.thread_cache import CachedThread, Tip
from perdure.values.external import External


class Part(NamedTuple):
    """A part of a state: its version, its range in the text, and what else its writer keeps about it (`known`).

    `keys` are the hashes of the large values that it refers to."""

    version: Any
    start: int
    end: int
    known: Any = None
    keys: tuple[bytes, ...] = ()


class Encoded(NamedTuple):
    """The text of a state and its parts. Parts that did not change may be copied from the parent's text.

    `record` is the checkpoint of this text; in a state to be saved it is the one that parts were copied from. If the
    parent's id means another record by now, `whole` encodes the state again. The first `head` bytes equal the parent's.
    `weight_bytes` is the memory that `Part.known` takes. The text refers to the large values of `keys`; `values` are
    those that may be new.
    """

    text: bytes
    parts: Mapping[str, Part] = MappingProxyType({})
    record: int | None = None
    whole: Callable[[], Encoded] | None = None
    head: int = 0
    weight_bytes: int = 0
    keys: tuple[bytes, ...] = ()
    values: Sequence[External[Any]] = ()


class Turns(Protocol):
    """Single-writer ownership of threads whose nodes run effects."""

    def of(self, ctx: StoreContext, gone: str = "") -> Turn:
        """Return the turn of this process. `gone` is an owner that has certainly ended."""
        ...

    def is_dead(self, ctx: StoreContext, owner: str) -> bool: ...

    def refuse(self, ctx: StoreContext, name: str) -> PerdureError:
        """Return the error for a writer while another process owns the thread."""
        ...


turns: Turns | None = None  # set by the layer that runs effects


def turn_of(ctx: StoreContext, gone: str = "") -> Turn:
    """Return the turn of this process in a thread. `gone` is an owner that has certainly ended."""
    return Turn() if turns is None else turns.of(ctx, gone)


def parent_text(ctx: StoreContext, name: str, namespace: str, parent: bytes) -> Encoded | None:
    """Return the text and parts of a parent if it is the newest of its namespace and in memory, else None."""
    tenant = ctx.known_tenant
    thread = ctx.threads.get((tenant, name)) if tenant is not None else None
    tip = thread.tips.get(namespace) if thread is not None else None
    if thread is None or tenant is None or tip is None or tip.id != parent:
        return None
    base = ctx.cache.get((tenant, thread.tree, tip.record))
    return None if base is None or not base.parts else Encoded(base.data, base.parts, tip.record)


def prepare_held(request: LineSave) -> PreparedSave | None:
    """Prepare a next state without writing it. The save after it writes it too, or `PreparedSave.store` does.

    The next save can build on it at once. Return None if the state must be saved now.
    """
    if (sink := metrics.sink) is None:
        return _prepare_held(request)
    with metrics.measuring(sink, "save", request.ctx.driver, request.name) as outcome:
        prepared = _prepare_held(request)
        outcome.counts = prepared is not None  # if None, the caller saves, and that save is counted
        return prepared


def _prepare_held(request: LineSave) -> PreparedSave | None:
    prepared = request.prepare_warm() if request.label.parent is not None else None
    if prepared is not None:
        prepared.hold()
    return prepared


@dataclass(slots=True, eq=False)
class LineSave:
    """The save request of a line's checkpoint, with what is known of its thread."""

    ctx: StoreContext
    name: str
    encoded: Encoded
    label: Label
    kind: str
    note: str | None
    tags: Mapping[str, Any]
    writes: Sequence[Write] = ()  # to attach to the parent
    before: PreparedSave | None = None  # the parent, if it is to be written first
    thread: CachedThread | None = None
    merge: Mapping[str, Any] | None = None  # metadata that the thread does not have yet
    is_refused: bool = False  # an attempt failed: the cache may be stale

    def prepare_warm(self) -> PreparedSave | None:
        """Prepare the next state of the thread's own line. Return None if the newest text is not in memory."""
        ctx, label, encoded = self.ctx, self.label, self.encoded
        tenant = ctx.known_tenant
        if tenant is None or label.space or self.is_refused or len(encoded.text) > ctx.warn_bytes:
            return None
        if encoded.keys or any(one.values for one in self.writes):
            return None
        thread = ctx.threads.get((tenant, self.name))
        if thread is None:
            return self._prepare_start(tenant) if label.parent is None and ctx.numbers else None
        tip = thread.tips.get("")
        if tip is None or tip.id != label.parent or encoded.record not in (None, tip.record):
            return None
        base = ctx.cache.get((tenant, thread.tree, tip.record))
        if base is None or base.record.thread != thread.thread or not self.tags.items() <= thread.metadata.items():
            return None
        if skip_length(base.record.step + 1):  # `append` finds the ancestor
            return None
        self.thread = thread
        head = encoded.head if encoded.record is not None else 0
        prepared = prepare_next(self, tenant, base, encoded.text, self.kind, self.note, head=head, label=label)
        prepared.writes, prepared.before = self.writes, self.before
        return prepared

    def prepare(self, after: int = 0) -> Flow[PreparedSave]:
        """Prepare, reading from the store what is not in memory."""
        if (warm := self.prepare_warm()) is not None:
            return warm
        ctx, label = self.ctx, self.label
        if keys := self.encoded.keys:
            yield from keep(ctx, keys, self.encoded.values)
        if len(self.encoded.text) > ctx.warn_bytes:
            yield from aside(partial(warn_if_large, ctx, self.name, self.encoded.text))
        if self.before is not None:
            yield from self.before.store()
            self.before = None
        tenant = yield from ctx.ensure_tenant()
        may_start = label.parent is None and not (label.space or self.is_refused or keys)
        if may_start and ctx.threads.get((tenant, self.name)) is None:
            return self._prepare_start(tenant)
        yield from self._find_thread(tenant)
        writes, self.writes = self.writes, ()
        if writes and label.parent is not None:
            yield from attach(ctx, self.name, label.space, label.parent, writes)
        base, parent = yield from self._base(tenant)
        if label.reused not in (None, parent):
            self._encode_whole()
        return self._prepared(tenant, base, parent, after)

    def _prepared(self, tenant: int, base: Base | None, parent: int | None, after: int) -> PreparedSave:
        ctx, thread, label = self.ctx, self.thread, self.label
        is_next = base is not None and base.record.id == parent
        is_own = base is not None and thread is not None and base.record.thread == thread.thread
        head = self.encoded.head if base is not None and base.record.id == label.reused else 0
        draft = prepare(
            self.encoded.text,
            base,
            ctx.entropy(SALT_BYTES),
            kind=self.kind,
            note=self.note,
            metadata=None,
            branching=base is not None and not (is_next and is_own),
            head=head,
        )
        at = ctx.clock_us()
        record = ctx.new_record_id(at, max(after, base.record.id if base is not None else 0, parent or 0))
        prepared = PreparedSave(self, tenant, draft, record, at, label, self.place(tenant), values=self.encoded.keys)
        is_plain = not self.merge and not label.space
        if base is not None and is_next and is_own and is_plain and not skip_length(base.record.step + 1):
            sealed = seal(draft, base.record.thread, base.record.tree, record, at, base.record)
            prepared.warm = base_after(draft, sealed, base.generation)
        return prepared

    def _prepare_start(self, tenant: int) -> PreparedSave:
        """Prepare the first checkpoint of an unknown thread.

        Probably no thread has this name: a caller that had loaded one would name a parent.
        """
        ctx = self.ctx
        self.thread, self.merge = None, self.tags or None
        salt, at = ctx.entropy(SALT_BYTES), ctx.clock_us()
        draft = prepare(self.encoded.text, None, salt, kind=self.kind, note=self.note, metadata=None)
        record = ctx.new_record_id(at, 0)
        prepared = PreparedSave(self, tenant, draft, record, at, self.label, self.place(tenant), starts=True)
        with suppress(IndexError):
            number = ctx.numbers.popleft()  # ascending: in any other order pages of the tables would stay half empty
            prepared.warm = base_after(draft, seal(draft, number, number, record, at, None), 0)
        return prepared

    def place(self, tenant: int) -> Place:
        return Place(tenant, self.name, None if self.thread is None else self.thread.thread, self.merge)

    def settle(self, done: Appended, after: Base | None) -> None:
        """Cache what the next save will build on."""
        thread, record = self.thread, done.record
        assert record is not None
        if thread is None or self.merge or thread.thread != done.thread:
            known = {} if thread is None else thread.metadata
            tenant = self.ctx.known_tenant
            assert tenant is not None
            about = {**known, **(self.merge or {})}
            thread = self.ctx.threads.note((tenant, self.name), done.thread, done.tree, about)
        if done.on_head:
            thread.note_tip(self.label.space, Tip(self.label.id, record.id))
        if after is not None:
            after.know(self.encoded.parts, self.encoded.weight_bytes)

    def drop(self, prepared: PreparedSave) -> None:
        self.is_refused = True
        if self.thread is not None:
            self.thread.tips.clear()
            self.ctx.cache.drop((prepared.tenant, self.thread.tree, prepared.record))

    def retry_after(self, error: Exception) -> None:
        label, tenant = self.label, self.ctx.known_tenant
        if isinstance(error, Held):
            if turns is None or error.owner == label.turn.gone or not turns.is_dead(self.ctx, error.owner):
                raise _is_held(self.ctx, self.name) from None
            self.label = label._replace(turn=turns.of(self.ctx, error.owner))
        elif isinstance(error, ParentChanged):
            self._encode_whole()
        elif isinstance(error, ThreadDeleted):
            if label.parent is not None:
                raise ThreadDeleted(
                    f"thread {self.name!r} was deleted meanwhile: this checkpoint was not stored"
                ) from None
            assert tenant is not None
            self.ctx.threads.forget((tenant, self.name))  # it has no parent: the thread starts anew
        elif not isinstance(error, Moved):
            raise error

    def _encode_whole(self) -> None:
        """Encode the whole state again: the parent's id no longer means the record that parts were copied from."""
        assert self.encoded.whole is not None
        self.encoded, self.label = self.encoded.whole(), self.label._replace(reused=None)

    def _find_thread(self, tenant: int) -> Flow[None]:
        """Find the thread, in memory or in the store. Raises ThreadDeleted if it was deleted with the parent."""
        name, label = (tenant, self.name), self.label
        self.thread = self.ctx.threads.get(name)
        if self.thread is None and (row := (yield from read(partial(try_thread, *name)))) is not None:
            self.thread = self.ctx.threads.note(name, row.thread, row.tree, metadata_of(row))
        if label.parent is not None and (
            self.thread is None or (yield from is_too_late(self.ctx, name, label.space, label.parent))
        ):
            raise ThreadDeleted(
                f"thread {self.name!r} does not exist any more: this checkpoint cannot follow its parent"
            )
        known = self.thread is not None and self.tags.items() <= self.thread.metadata.items()
        self.merge = self.tags if self.tags and not known else None

    def _base(self, tenant: int) -> Flow[tuple[Base | None, int | None]]:
        """Return the base of the difference, and the parent's record.

        Without a parent, the base is the thread's newest state: a new line of a thread often begins with much of its
        text.
        """
        thread, label, cache = self.thread, self.label, self.ctx.cache
        if thread is None:
            return None, None
        tip = thread.tips.get(label.space)
        is_parent = tip is not None and tip.id == label.parent
        if tip is not None and is_parent and (cached := cache.get((tenant, thread.tree, tip.record))) is not None:
            return cached, tip.record
        try:
            row, parent, state = yield from read(partial(self._read_base, tenant, thread))
        except Damaged:
            return None, None  # the new record stores its full text, and the general route finds the parent
        return base_of(state, row) if isinstance(state, Loaded) else state, parent

    def _read_base(
        self, tenant: int, thread: CachedThread
    ) -> Program[tuple[ThreadRow, int | None, Loaded | Base | None]]:
        row = yield from try_thread(tenant, self.name, thread.thread)
        assert row is not None  # try_thread raises for the number of a deleted thread
        parent: LabelRow | None = None
        if self.label.parent is not None:
            parent = yield from find_named(tenant, row.thread, self.label.space, self.label.parent)
        number, follows = (row.head, None) if parent is None else (parent.record, parent.record)
        if number is None:
            return row, None, None
        known = self.ctx.cache.get((tenant, thread.tree, number))
        if known is not None and known.record.thread == row.thread and known.generation == row.generation:
            return row, follows, known
        return row, follows, (yield from read_state(tenant, row.tree, number))


def _is_held(ctx: StoreContext, name: str) -> PerdureError:
    if turns is not None:
        return turns.refuse(ctx, name)
    return Conflict(f"thread {name!r} is being run by another process: nothing was written; save again later")


def run_key(run: str) -> bytes:
    """Return the key that a run's checkpoints are stored under: a hash, because the id itself may be encrypted."""
    return blake3(run.encode("utf-8", "surrogatepass")).digest(16)


def delete_runs(ctx: StoreContext, runs: Iterable[str]) -> Flow[None]:
    """Delete the checkpoints that runs have saved, in all threads. Those that later ones are rebuilt from stay."""
    tenant = yield from ctx.tenant()
    if tenant is not None and (keys := [run_key(run) for run in runs]):
        yield from gc.delete_runs(tenant, keys)
