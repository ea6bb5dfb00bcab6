"""Saving checkpoints under ids of the caller, and attaching values to them, as flows.

A state is text here, what was attached to it too: what they mean, and how they are encoded, is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from perdure.errors import Conflict, Damaged, NotFound, OutcomeUnknown, PerdureError, ThreadDeleted
from perdure.log import gc
from perdure.log.append import Appended, Draft, append, base_after, head_statement, prepare, stored_as_drafted
from perdure.log.cache import Base
from perdure.log.labels import Label, LabelRow, ParentChanged, find_named
from perdure.log.pending import Against, Stored, Write, is_large, put_writes, write_statements
from perdure.log.reading import Loaded, read_state, read_thread_state
from perdure.log.records import SALT_BYTES, Record
from perdure.log.thread_table import ThreadRow, metadata_of, try_thread
from perdure.log.turns import Held, Turn
from perdure.storage import metrics
from perdure.storage.events import event
from perdure.storage.program import Append, Batch, ConstraintFailed, Flow, Program, Statement, read, write
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.flows import base_of
from perdure.threads.instrumentation import record_size, warn_if_large
from perdure.threads.saves import ATTEMPTS, ONE, Moved, Saving, append_once, commit, on_head, place_of, straight_draft
from perdure.threads.thread_cache import CachedThread, Tip

_log = logging.getLogger("perdure")


class Part(NamedTuple):
    """Where a part of a state is in its text, of which version it is, and what else its writer knows of it."""

    version: Any
    start: int
    end: int
    known: Any = None


class Encoded(NamedTuple):
    """The text of a state, and where its parts are: what did not change may be taken from the parent's text.

    `record` is the checkpoint whose text this is, or (to be saved) the one that parts were taken from. If the parent's
    id means another one by now, `whole` encodes the state anew. The first `head` bytes are the parent's too; what is
    known of the parts takes `weight_bytes` of memory."""

    text: bytes
    parts: Mapping[str, Part] = MappingProxyType({})
    record: int | None = None
    whole: Callable[[], Encoded] | None = None
    head: int = 0
    weight_bytes: int = 0


class Ending(Protocol):
    """What ends with attachments, in the same transaction; with an `error` they must not be stored."""

    @property
    def statement(self) -> Statement: ...

    @property
    def error(self) -> PerdureError | None: ...

    def finish(self) -> None: ...


class Turns(Protocol):
    """Which process may extend a thread that effects are run for: one at a time."""

    def of(self, ctx: StoreContext, gone: str = "") -> Turn:
        """The turn of this process. `gone` is an owner that has certainly ended."""
        ...

    def is_dead(self, ctx: StoreContext, owner: str) -> bool: ...

    def refuse(self, name: str) -> PerdureError:
        """What a writer gets while another process is at work in the thread."""
        ...


turns: Turns | None = None  # set by the layer that runs effects


def parent_text(ctx: StoreContext, name: str, namespace: str, parent: bytes) -> Encoded | None:
    """The text of a checkpoint that is about to be followed, if it is at hand."""
    tenant = ctx.known_tenant
    thread = ctx.threads.get((tenant, name)) if tenant is not None else None
    tip = thread.tips.get(namespace) if thread is not None else None
    if thread is None or tenant is None or tip is None or tip.id != parent:
        return None
    base = ctx.cache.get((tenant, thread.tree, tip.record))
    return None if base is None or not base.parts else Encoded(base.data, base.parts, tip.record)


@metrics.operation("save")
def save(ctx: StoreContext, saving: LineSave) -> Flow[None]:
    """Save a state's text under its id, after its parent's."""
    name, label, encoded = saving.name, saving.label, saving.encoded
    if len(encoded.text) > ctx.warn_bytes:
        warn_if_large(ctx, name, encoded.text)
    if (following := saving.following()) is not None and (yield from saving.append(following)):
        return
    if saving.after is not None:
        yield from store(saving.after)
    tenant = saving.tenant = yield from ctx.ensure_tenant()
    saving.label = label._replace(reused=encoded.record)
    try:
        yield from saving.flow()
    except ParentChanged:
        assert encoded.whole is not None
        saving.encoded, saving.label = encoded.whole(), label
        yield from saving.flow()
    except ThreadDeleted:
        if label.parent is not None:
            raise ThreadDeleted(f"thread {name!r} was deleted meanwhile: this checkpoint was not stored") from None
        ctx.threads.forget((tenant, name))  # it has no parent: the thread starts anew
        yield from saving.flow()


def prepare_save(saving: LineSave) -> PreparedSave | None:
    """Prepare a plain next state, to be written with the one that follows it, or by `store`. What follows can be built
    on it at once. None: it must be saved."""
    following = saving.following()
    if following is None or metrics.sink is not None or len(saving.encoded.text) > saving.ctx.warn_bytes:
        return None
    saving.settle(following.draft, on_head(following.draft, following.record))
    return PreparedSave(saving, following)


def store(held: PreparedSave) -> Flow[None]:
    """Write a state that was prepared, if it was not written yet."""
    saving, (_, base, draft, record, label) = held.saving, held.following
    if held.is_stored:
        return
    unknown: OutcomeUnknown | None = None
    try:
        held.is_stored = yield Append([head_statement(draft, base, saving.tenant, record, label)], ONE)
    except OutcomeUnknown as error:
        unknown = error
    except ConstraintFailed:
        pass  # the id is taken, or damage: the general way finds out which
    if not held.is_stored:
        yield from held.look_for(unknown)


class Following(NamedTuple):
    """The plain next state of a thread's own line, ready to be written."""

    thread: CachedThread
    base: Base
    draft: Draft
    record: Record
    label: Label


@dataclass(slots=True, eq=False)
class PreparedSave:
    """A state that is to be written with the one that follows it, or by `store`."""

    saving: LineSave
    following: Following
    is_stored: bool = False

    def look_for(self, unknown: OutcomeUnknown | None) -> Flow[None]:
        """Find it in the store, or write it there by the general way."""
        saving, following = self.saving, self.following
        done: Appended | None = None
        with suppress(Held, ConstraintFailed):  # the general way finds out why
            done = yield from saving.look_for(following, unknown)
        if done is None or done.record is None or not done.on_head:  # nothing can be built on what is known of it
            following.thread.tips.clear()
            saving.ctx.cache.drop((saving.tenant, following.thread.tree, following.record.id))
        if done is None or done.record is None:
            yield from save(saving.ctx, saving)
        self.is_stored = True


@dataclass(slots=True, eq=False)
class LineSave:
    """One save, and what it knows of its thread."""

    ctx: StoreContext
    name: str
    encoded: Encoded
    label: Label
    kind: str
    note: str | None
    tags: Mapping[str, Any]
    writes: Sequence[Write] = ()  # to attach to the parent
    after: PreparedSave | None = None  # the parent, if it is to be written first
    tenant: int = 0
    thread: CachedThread | None = None
    merge: Mapping[str, Any] | None = None  # metadata that the thread does not have yet
    parent: int | None = None  # the parent's record

    def following(self) -> Following | None:
        """The usual case, without a look into the store: the state follows the newest one of the thread's own line,
        which is in memory. None: it is another case, or that is not known."""
        ctx, label, encoded = self.ctx, self.label, self.encoded
        tenant = ctx.known_tenant
        thread = None if tenant is None or label.space else ctx.threads.get((tenant, self.name))
        tip = None if thread is None else thread.tips.get("")
        if tenant is None or thread is None or tip is None or tip.id != label.parent:
            return None
        base = ctx.cache.get((tenant, thread.tree, tip.record))
        if base is None or base.record.thread != thread.thread or encoded.record not in (None, tip.record):
            return None
        if not self.tags.items() <= thread.metadata.items():
            return None
        self.tenant, self.thread = tenant, thread
        head = encoded.head if encoded.record is not None else 0
        draft, record = straight_draft(ctx, base, encoded.text, self.kind, self.note, thread.thread, thread.tree, head)
        if turns is not None:
            label = label._replace(turn=turns.of(ctx))
        return Following(thread, base, draft, record, label)

    def append(self, following: Following) -> Flow[bool]:
        """Write the next state, with what is attached to its parent. False: something has changed."""
        thread, base, draft, record, label = following
        held = None if self.after is None or self.after.is_stored else self.after
        statements: list[Statement] = []
        if held is not None:
            _, before, first, parent, name = held.following
            statements.append(head_statement(first, before, self.tenant, parent, name))
        if self.writes and label.parent is not None:
            against = Against(base.record.id, base.data, base.generation, is_new=held is not None)
            statements += write_statements(self.tenant, thread.thread, label.parent, self.writes, against)
        counts = ONE * (held is not None) + (None,) * (len(statements) - (held is not None)) + ONE
        try:
            if (yield Append([*statements, head_statement(draft, base, self.tenant, record, label)], counts)):
                if held is not None:
                    held.is_stored = True
                self.settle(draft, on_head(draft, record))
                return True
        except OutcomeUnknown as unknown:
            if held is not None:
                yield from held.look_for(unknown)
            yield from self._attach()
            done = yield from self.look_for(following, unknown)
            if done.record is not None:
                self.settle(draft, done)
                return True
        except ConstraintFailed:
            pass  # the id is taken, or damage: the general way finds out which
        return False

    def look_for(self, following: Following, unknown: OutcomeUnknown | None) -> Flow[Appended]:
        """What became of a state, perhaps of one whose COMMIT was not acknowledged: it is found, or written now."""
        thread, _, draft, record, label = following
        cursor = Cursor(self.name)
        cursor.resolve(thread.thread, thread.tree)
        careful = partial(append, draft, place_of(cursor, self.tenant), record.id, record.at, label)
        return (yield from commit(record.id, careful, unknown))

    def flow(self) -> Flow[None]:
        ctx = self.ctx
        if self._may_start and (yield from self._start()):
            return
        yield from self._find_thread()
        yield from self._attach()
        gone, after = "", 0  # an owner of the thread that has ended; an id that the new one must be greater than
        for _ in range(ATTEMPTS):
            saving = yield from self._prepare(after, gone)
            try:
                done = yield from saving.flow()
            except Moved as moved:
                saving.drop(moved)
                after = moved.after
                if not after and self.thread is not None:
                    self.thread.tips.clear()
            except Held as held:
                if turns is None or held.owner == gone or not turns.is_dead(ctx, held.owner):
                    raise _is_held(self.name) from None
                gone = held.owner
            else:
                self.settle(saving.draft, done)
                return
        raise Conflict(f"thread {self.name!r} was compacted during every attempt: nothing was written; save it again")

    @property
    def _may_start(self) -> bool:
        """Whether this is most likely the first checkpoint of a thread: a run that found one would follow it."""
        label = self.label
        return label.parent is None and not label.space and self.ctx.threads.get((self.tenant, self.name)) is None

    def _start(self) -> Flow[bool]:
        """Begin the thread, without looking anything up. False: there is one of this name."""
        self.thread, self.merge = None, dict(self.tags) or None
        saving = yield from self._prepare(0, "")
        done: Appended | None
        try:
            done = yield from write(saving.start)
        except OutcomeUnknown as unknown:
            done = yield from commit(saving.record, saving.append, unknown)
        if done is None or done.record is None:
            return False
        self.settle(saving.draft, done)
        return True

    def _find_thread(self) -> Flow[None]:
        """What is known of the thread, from memory or the store."""
        name, label = (self.tenant, self.name), self.label
        self.thread = self.ctx.threads.get(name)
        if self.thread is None and (row := (yield from read(partial(try_thread, *name)))) is not None:
            self.thread = self.ctx.threads.note(name, row.thread, row.tree, metadata_of(row))
        if label.parent is not None and (
            self.thread is None or (yield from _is_too_late(self.ctx, name, label.space, label.parent))
        ):
            raise ThreadDeleted(
                f"thread {self.name!r} does not exist any more: this checkpoint cannot follow its parent"
            )
        known = self.thread is not None and self.tags.items() <= self.thread.metadata.items()
        self.merge = dict(self.tags) if self.tags and not known else None

    def _prepare(self, after: int, gone: str) -> Flow[Saving]:
        ctx, thread = self.ctx, self.thread
        base = yield from self._base()
        branching = base is not None and (
            base.record.id != self.parent or thread is None or base.record.thread != thread.thread
        )
        text, salt = self.encoded.text, ctx.entropy(SALT_BYTES)
        head = self.encoded.head if base is not None and base.record.id == self.label.reused else 0
        draft = prepare(text, base, salt, kind=self.kind, note=self.note, metadata=None, branching=branching, head=head)
        at = ctx.clock_us()
        record = ctx.new_record_id(at, max(after, base.record.id if base is not None else 0, self.parent or 0))
        cursor = Cursor(self.name, self.merge)
        if thread is not None:
            cursor.resolve(thread.thread, thread.tree)
        label = self.label if turns is None else self.label._replace(turn=turns.of(ctx, gone))
        place = place_of(cursor, self.tenant)
        return Saving(ctx, cursor, self.tenant, draft, place, record, at, self.parent, label)

    def _attach(self) -> Flow[None]:
        """Attach the writes by themselves, before what follows them."""
        writes, self.writes = self.writes, ()
        if writes and self.label.parent is not None:
            yield from attach(self.ctx, self.name, self.label.space, self.label.parent, writes)

    def _base(self) -> Flow[Base | None]:
        """What to make the difference against. Where there is no parent, the thread's newest state will do: another
        line of the thread begins with much of what its caller has."""
        thread, label, cache = self.thread, self.label, self.ctx.cache
        self.parent = None
        if thread is None:
            return None
        tip = thread.tips.get(label.space)
        is_parent = tip is not None and tip.id == label.parent
        if tip is not None and is_parent and (cached := cache.get((self.tenant, thread.tree, tip.record))) is not None:
            self.parent = tip.record
            return cached
        try:
            row, self.parent, found = yield from read(partial(self._read_base, thread))
        except Damaged:
            return None  # the new record will carry its full text, and the careful path finds the parent
        return base_of(found, row) if isinstance(found, Loaded) else found

    def _read_base(self, thread: CachedThread) -> Program[tuple[ThreadRow, int | None, Loaded | Base | None]]:
        row = yield from try_thread(self.tenant, self.name, thread.thread)
        assert row is not None  # a number that is gone raises
        parent: LabelRow | None = None
        if self.label.parent is not None:
            parent = yield from find_named(self.tenant, row.thread, self.label.space, self.label.parent)
        wanted, follows = (row.head, None) if parent is None else (parent.record, parent.record)
        if wanted is None:
            return row, None, None
        known = self.ctx.cache.get((self.tenant, thread.tree, wanted))
        if known is not None and known.record.thread == row.thread and known.generation == row.generation:
            return row, follows, known
        return row, follows, (yield from read_state(self.tenant, row.tree, wanted))

    def settle(self, draft: Draft, done: Appended) -> None:
        """Remember what the next save will build on."""
        ctx, record, base = self.ctx, done.record, draft.base
        assert record is not None
        if (sink := metrics.sink) is not None:
            record_size(ctx, draft, sink)
        thread = self.thread
        if thread is None or self.merge or thread.thread != done.thread:
            known = {} if thread is None else thread.metadata
            about = {**known, **(self.merge or {})}
            thread = ctx.threads.note((self.tenant, self.name), done.thread, done.tree, about)
        if done.on_head:
            thread.note_tip(self.label.space, Tip(self.label.id, record.id))
        if stored_as_drafted(draft, record):
            replaced = base is not None and base.record.id == record.parent
            now = base_after(draft, record, done.generation)
            now.know(self.encoded.parts, self.encoded.weight_bytes)
            ctx.cache.put(
                (self.tenant, done.tree, record.id),
                now,
                instead_of=(self.tenant, done.tree, base.record.id) if base is not None and replaced else None,
            )


def _is_held(name: str) -> PerdureError:
    if turns is not None:
        return turns.refuse(name)
    return Conflict(f"thread {name!r} is being run by another process: nothing was written; save again later")


def attach(
    ctx: StoreContext, name: str, namespace: str, id_: bytes, writes: Sequence[Write], ending: Ending | None = None
) -> Flow[None]:
    """Attach values to a checkpoint, and end what ends with them. Safe to repeat. Those for a thread that was deleted
    meanwhile are dropped."""
    if ending is not None and (error := ending.error) is not None:
        yield from write(partial(_one, ending.statement))
        raise error
    also = () if ending is None else (ending.statement,)
    tenant = yield from ctx.ensure_tenant()
    thread = ctx.threads.get((tenant, name))
    number = thread.thread if thread is not None else None
    against = None if thread is None else (yield from _against(ctx, tenant, name, thread, namespace, id_, writes))
    at = ctx.clock_us()
    stored = Stored(None)
    if not (yield from _is_too_late(ctx, (tenant, name), namespace, id_)):
        if (
            number is not None
            and not (namespace or also)
            and (yield from append_once(*write_statements(tenant, number, id_, writes, against)))
        ):
            return
        try:
            put = partial(put_writes, tenant, name, number, namespace, id_, writes, at=at, beside=also)
            stored = yield from write(partial(put, against=against))
            if stored.moved:
                stored = yield from write(partial(put, against=None))
        except NotFound:
            pass
    if stored.thread is None:
        found = event("writes.dropped", thread=name)
        _log.warning("thread %r was deleted: values that came too late were dropped", name, extra=found)
    if ending is not None:
        ending.finish()


def _one(statement: Statement) -> Program[None]:
    yield Batch(statement, last=True)


def _is_too_late(ctx: StoreContext, name: tuple[int, str], namespace: str, id_: bytes) -> Flow[bool]:
    """Whether a checkpoint belongs to a thread of this name that was deleted, and not to one that was begun since."""
    if not ctx.threads.is_too_late(name, id_):
        return False

    def program() -> Program[bool]:
        row = yield from try_thread(*name)
        return row is None or (yield from find_named(name[0], row.thread, namespace, id_)) is None

    return (yield from read(program))


def _against(
    ctx: StoreContext, tenant: int, name: str, thread: CachedThread, namespace: str, id_: bytes, writes: Sequence[Write]
) -> Flow[Against | None]:
    """A record to compress values against: their own, if its text is at hand. For large ones any of the thread will do,
    because much of them stands there too."""
    tip = thread.tips.get(namespace)
    own = tip is not None and tip.id == id_
    if not own and not is_large(writes):
        return None
    for one in [tip] if own and tip is not None else reversed(thread.newest()):
        base = ctx.cache.get((tenant, thread.tree, one.record))
        if base is not None and base.record.thread == thread.thread:  # its generation is the thread's
            return Against(one.record, base.data, base.generation)
    if not is_large(writes):
        return None
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, name, thread.thread, None))
    except (NotFound, Damaged):
        return None
    return None if loaded is None else Against(loaded.record.id, loaded.data, row.generation)


def run_key(run: str) -> bytes:
    """What a run's checkpoints are found by: not the run's id itself, which may be hidden by encryption."""
    return blake3(run.encode("utf-8", "surrogatepass")).digest(16)


def delete_runs(ctx: StoreContext, runs: Iterable[str]) -> Flow[None]:
    """Delete the checkpoints that runs have saved, in all threads, except those that a later one is rebuilt from."""
    tenant = yield from ctx.tenant()
    if tenant is not None and (keys := [run_key(run) for run in runs]):
        yield from gc.delete_runs(tenant, keys)
