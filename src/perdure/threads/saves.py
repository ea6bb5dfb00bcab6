"""Saving a state: prepared on the caller's thread, then written in one short transaction.

`straight_save` is the line that nearly every save takes: the next state on the head of a thread whose newest state this
process has in memory. There is nothing to read or to decide, so one statement moves the head from where it was and
inserts the record, or changes nothing. `save` is the general way, which must write the same. A save that is part of
another transaction is prepared and written there (`Saving.program`); `journal` is where the layer above says that saves
made inside of it are its own (see `runs/calls/saving.py`); this layer knows nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
import orjson

from perdure.errors import Conflict, Damaged, NotFound, OutcomeUnknown, StoreError
from perdure.log.append import (
    Appended,
    Draft,
    Place,
    append,
    append_to_head,
    as_subprogram,
    base_after,
    head_statement,
    prepare,
    seal,
    start_thread,
    stored_as_drafted,
)
from perdure.log.cache import Base
from perdure.log.ids import new_id, show_id
from perdure.log.labels import Label
from perdure.log.reading import read_thread_state
from perdure.log.records import SALT_BYTES, Record
from perdure.log.thread_table import try_thread
from perdure.storage import metrics
from perdure.storage.events import event
from perdure.storage.program import (
    Append,
    Batch,
    ConstraintFailed,
    Flow,
    Program,
    Rows,
    Statement,
    aside,
    drive,
    read,
    write,
)
from perdure.threads import flows
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.instrumentation import record_size, warn_if_large, warn_unknown
from perdure.values.codec import encode

ATTEMPTS = 64  # another writer succeeds each time one of these fails
ONE = (1,)
_ASIDE_BYTES = 256_000  # a larger text is compared and compressed on a thread, while an event loop turns
_log = logging.getLogger("perdure")


class Moved(Exception):
    """What a save was prepared for is not there any more: prepare it again. `after`: the id that it must follow."""

    def __init__(self, after: int) -> None:
        super().__init__("the base of a save has moved")
        self.after = after


class Save(msgspec.Struct, frozen=True):
    """A save or an update, as a thread's handle was asked for it."""

    ctx: StoreContext
    cursor: Cursor
    note: str | None = None
    metadata: Mapping[str, Any] | None = None
    parent: int | None = None
    expect: int | None = None
    text: bytes = b""
    merge: Callable[[bytes], bytes] | None = None  # an update: the text from what is there, or else from `text`
    asked: tuple[Any, ...] = ()  # of an update: what is merged
    kind: str = "state"
    base: int | None = None  # what the difference is made against, where that is not the parent

    @property
    def wanted(self) -> bytes:
        """What was passed, as text: a run that is replayed compares it."""
        about = [*self.asked, self.note, self.metadata, self.parent, self.expect]
        return encode(about, self.ctx.codec) + self.text

    def prepare(self, after: int = 0) -> Flow[Saving]:
        """Everything but the writing. `after`: an id that the new one must be greater than."""
        if self.merge is None:
            return (yield from self._prepared(self.text, self.expect, self.kind, after))
        try:
            row, loaded, _ = yield from flows.load(self.ctx, self.cursor)
        except NotFound:
            if not self.text:
                raise
            return (yield from self._prepared(self.merge(self.text), None, self.kind, after))
        # Not what was loaded is expected: an ancestor stands in for a damaged head.
        return (yield from self._prepared(self.merge(loaded.data), row.head, "update", after))

    def _prepared(self, text: bytes, expect: int | None, kind: str, after: int) -> Flow[Saving]:
        ctx, cursor, parent = self.ctx, self.cursor, self.parent
        is_large = len(text) > _ASIDE_BYTES
        if len(text) > ctx.warn_bytes:
            yield from aside(partial(warn_if_large, ctx, cursor.name, text))
        tenant = yield from ctx.ensure_tenant()
        follows = yield from _follows(cursor, tenant, parent or expect or cursor.record)
        anchor = self.base or follows
        base = yield from _base(ctx, cursor, tenant, anchor)
        branching = base is not None and (parent is not None or base.record.thread != cursor.thread)
        about = orjson.dumps(self.metadata).decode() if self.metadata else None
        salt = ctx.entropy(SALT_BYTES)
        make = partial(prepare, text, base, salt, kind=kind, note=self.note, metadata=about, branching=branching)
        draft = (yield from aside(make)) if is_large else make()
        at = ctx.clock_us()
        record = ctx.new_record_id(at, max(after, follows or 0, anchor or 0))
        cursor.own.append(record)
        return Saving(ctx, cursor, tenant, draft, place_of(cursor, tenant, parent, expect), record, at, follows)


class Saving(msgspec.Struct):
    """A state that is ready to be written."""

    ctx: StoreContext
    cursor: Cursor
    tenant: int
    draft: Draft
    place: Place
    record: int
    at: int
    follows: int | None
    label: Label | None = None  # the id that the caller of a line gives it
    done: Appended | None = None  # by the last attempt of the transaction

    def program(self) -> Generator[Batch, list[Rows], Appended]:
        """Write the record in another transaction, which may continue after it. Safe to repeat. Raises Moved."""
        sealed = self._sealed()
        if sealed is not None and self.draft.base is not None:
            quick = append_to_head(self.draft, self.draft.base, self.tenant, sealed, self.label)
            if (yield from as_subprogram(quick)):
                return self._note(on_head(self.draft, sealed))
        try:
            return self._note((yield from as_subprogram(self.append())))
        except ConstraintFailed as error:
            if error.kind != "unique":
                raise  # damage, or a defect of ours: saving again would not help, and would hide it
            raise Moved(self.record) from error

    def flow(self) -> Flow[Appended]:
        """Write the record in a transaction of its own. Raises Moved."""
        sealed, base = self._sealed(), self.draft.base
        unknown: OutcomeUnknown | None = None
        try:
            if sealed is not None and base is not None:
                try:
                    statement = head_statement(self.draft, base, self.tenant, sealed, self.label)
                    if (yield from append_once(statement)):
                        return self._note(on_head(self.draft, sealed))
                except OutcomeUnknown as error:
                    unknown = error
            return self._note((yield from commit(self.record, self.append, unknown)))
        except ConstraintFailed as error:
            if error.kind != "unique":
                raise  # damage, or a defect of ours: saving again would not help, and would hide it
            raise Moved(self.record) from error

    def append(self) -> Program[Appended]:
        """Write the record by the general way."""
        return append(self.draft, self.place, self.record, self.at, self.label)

    def start(self) -> Program[Appended | None]:
        """Write the record as the first of a new thread. None: there is a thread of that name."""
        assert self.label is not None
        return start_thread(self.draft, self.place, self.record, self.at, self.label)

    def _sealed(self) -> Record | None:
        """The record for the short path, where it applies."""
        cursor, base, place = self.cursor, self.draft.base, self.place
        expected = place.expect in (None, self.follows) and not cursor.merge  # what the short path does not look at
        if not expected or base is None or base.record.id != self.follows or base.record.thread != cursor.thread:
            return None
        if self.label is not None and self.label.space:
            return None  # it moves the head of another line
        return seal(self.draft, base.record.thread, cursor.tree, self.record, self.at, base.record)

    def _note(self, done: Appended) -> Appended:
        self.done = done
        if done.record is None:
            raise Moved(done.after)
        return done

    def settle(self) -> Appended:
        """It is committed: the handle stands on it now."""
        assert self.done is not None
        advance_cursor(self.ctx, self.cursor, self.tenant, self.draft, self.done, asked=self.place.parent is not None)
        return self.done

    def drop(self, moved: Moved | None = None) -> None:
        """It was not written. What it was made against is not to be trusted any more if that has moved."""
        self.cursor.disown(self.record)
        if moved is not None and not moved.after and self.draft.base is not None:
            self.ctx.cache.drop((self.tenant, self.cursor.tree, self.draft.base.record.id))


@metrics.operation("save")
def save(
    ctx: StoreContext, cursor: Cursor, wanted: Save, write: Callable[[Saving], Flow[Any]] = Saving.flow
) -> Flow[tuple[Record, bool]]:
    """Append a state. Its record, and whether that became the head. An update starts again from a head that moved.
    `write` commits it, by default in a transaction of its own."""
    after = 0
    for _ in range(ATTEMPTS):
        saving = yield from wanted.prepare(after)
        try:
            yield from write(saving)
        except Moved as moved:
            saving.drop(moved)
            after = moved.after
        except Conflict:
            saving.drop()
            if wanted.merge is None:
                raise
        else:
            done = saving.settle()
            assert done.record is not None
            return done.record, done.on_head
    raise Conflict(f"other writers move the head of thread {cursor.name!r}: nothing was written; save again")


def _follows(cursor: Cursor, tenant: int, stands_on: int | None) -> Flow[int | None]:
    """What a save follows: the checkpoint that the handle last loaded or saved; if there is none, the head."""
    if cursor.thread is not None and stands_on is not None:
        return stands_on
    row = yield from read(partial(try_thread, tenant, cursor.name, cursor.thread))
    if row is None:
        return stands_on
    cursor.resolve(row.thread, row.tree)
    return row.head if stands_on is None and not cursor.found_nothing else stands_on


def _base(ctx: StoreContext, cursor: Cursor, tenant: int, anchor: int | None) -> Flow[Base | None]:
    """What to make the difference against, from the cache or the store. None: nothing that can be read."""
    if anchor is None or cursor.thread is None:
        return None
    if (cached := ctx.cache.get((tenant, cursor.tree, anchor))) is not None:
        return cached
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, anchor))
    except Damaged:
        return None  # the new record will carry its full text
    return None if loaded is None else flows.base_of(loaded, row)


def place_of(cursor: Cursor, tenant: int, parent: int | None = None, expect: int | None = None) -> Place:
    return Place(
        tenant,
        cursor.name,
        cursor.thread,
        cursor.merge,
        parent,
        expect,
        cursor.record,
        cursor.own,
        cursor.lost_head,
        cursor.found_nothing,
    )


def advance_cursor(
    ctx: StoreContext, cursor: Cursor, tenant: int, draft: Draft, done: Appended, *, asked: bool
) -> None:
    """Move the cursor to a new record, and cache what the next save builds on. `asked`: the caller gave the parent."""
    record = done.record
    assert record is not None
    if (sink := metrics.sink) is not None:
        record_size(ctx, draft, sink)
    cursor.resolve(done.thread, done.tree)
    cursor.merge = None
    if stored_as_drafted(draft, record):
        before = draft.base.record.id if draft.base is not None else None
        ctx.cache.put(
            (tenant, done.tree, record.id),
            base_after(draft, record, done.generation),
            instead_of=(tenant, done.tree, before) if before is not None and before == cursor.record else None,
        )
    if not done.on_head:  # from here on the handle follows its branch: the head is no longer its own
        cursor.own.clear()
        cursor.own.append(record.id)
        if not asked and not cursor.on_branch:
            _log.warning(
                "thread %r: another writer has saved since this handle loaded it, so that its saves are a branch from "
                "here on (is_head is False): load() takes the handle back to the head, and expect= refuses such a "
                "save; see docs/how-to/threads.md",
                cursor.name,
                extra=event("thread.branched", thread=cursor.name),
            )
        cursor.on_branch = True
    cursor.record, cursor.found_nothing = record.id, False


def append_once(*statements: Statement) -> Flow[bool]:
    """Run statements that change one row each or nothing, by the driver's shortest way. False: one changed nothing."""
    done: bool = yield Append(statements, ONE * len(statements))
    return done


def commit(
    record: int, careful: Callable[[], Program[Appended]], unknown: OutcomeUnknown | None = None
) -> Flow[Appended]:
    """Write a record by a program that first looks for it: its COMMIT may not have been acknowledged (`unknown`)."""
    for _ in range(2):
        if unknown is not None:
            warn_unknown(show_id(record))
        try:
            # It looks for the record before it writes.
            return (yield from write(careful))
        except OutcomeUnknown as error:
            unknown = error
        except StoreError as error:
            if unknown is None:
                raise
            # This error's "nothing was written" is true of the search, not of the commit before it.
            raise OutcomeUnknown(f"{unknown} Looking for checkpoint {show_id(record)} failed: {error}") from unknown
    assert unknown is not None
    raise unknown


# --- the straight line


def straight_save(ctx: StoreContext, cursor: Cursor, text: bytes, note: str | None) -> tuple[Record, bool] | None:
    """Append a state to the head. Its record, and whether that is the head; None: it was not done."""
    tenant, parent, thread = ctx.known_tenant, cursor.record, cursor.thread
    if tenant is None or parent is None or thread is None or cursor.merge or cursor.on_branch:
        return None
    if len(text) > ctx.warn_bytes:
        return None
    base = ctx.cache.get((tenant, cursor.tree, parent))
    if base is None or base.record.thread != thread:
        return None
    draft, sealed = straight_draft(ctx, base, text, "state", note, thread, cursor.tree)
    cursor.own.append(sealed.id)
    after = base_after(draft, sealed, base.generation)  # while the caches are warm: COMMIT waits for the disk
    try:
        if ctx.driver.append((head_statement(draft, base, tenant, sealed),), ONE):
            cursor.record = sealed.id
            if metrics.sink is not None:
                record_size(ctx, draft, metrics.sink)
            ctx.cache.put((tenant, cursor.tree, sealed.id), after, instead_of=(tenant, cursor.tree, parent))
            return sealed, True
    except OutcomeUnknown as unknown:
        done = look_for(ctx, draft, place_of(cursor, tenant), sealed, unknown)
        if done.record is not None:
            advance_cursor(ctx, cursor, tenant, draft, done, asked=False)
            return done.record, done.on_head
    except ConstraintFailed:
        pass  # the id is taken, or damage: the general way finds out which
    cursor.disown(sealed.id)
    return None


def measured_straight_save(
    ctx: StoreContext, cursor: Cursor, text: bytes, note: str | None
) -> tuple[Record, bool] | None:
    """`straight_save` for a process that is measured. What was not done is not counted: the general way counts it."""
    if (sink := metrics.sink) is None:
        return straight_save(ctx, cursor, text, note)
    with metrics.measuring(sink, "save", ctx.driver, cursor.name) as outcome:
        done = straight_save(ctx, cursor, text, note)
        outcome.counts = done is not None
        return done


def straight_draft(
    ctx: StoreContext, base: Base, text: bytes, kind: str, note: str | None, thread: int, tree: int, head: int = 0
) -> tuple[Draft, Record]:
    """The next state after a base, and its record. The first `head` bytes are known to be the base's."""
    chance = ctx.entropy(SALT_BYTES + 4)
    draft = prepare(text, base, chance[:SALT_BYTES], kind=kind, note=note, metadata=None, head=head)
    at = ctx.clock_us()
    record = new_id(at, int.from_bytes(chance[SALT_BYTES:], "little"), base.record.id)
    return draft, seal(draft, thread, tree, record, at, base.record)


def look_for(
    ctx: StoreContext, draft: Draft, place: Place, sealed: Record, unknown: OutcomeUnknown, label: Label | None = None
) -> Appended:
    """What became of a record whose COMMIT was not acknowledged: it is found, or written now."""
    careful = partial(append, draft, place, sealed.id, sealed.at, label)
    return drive(ctx.driver, commit(sealed.id, careful, unknown))


def on_head(draft: Draft, sealed: Record) -> Appended:
    assert draft.base is not None
    return Appended(sealed, sealed.thread, sealed.tree, draft.base.generation, on_head=True)


# --- saves inside of something else


class SaveJournal(Protocol):
    """The journal of a run, of the layer above, as a save sees it."""

    def joins(self, ctx: StoreContext) -> bool:
        """Return whether a write to this store is committed with the journal. Raises UsageError if it has to be, and
        cannot."""
        ...

    def save(self, save: Save) -> tuple[Record, bool]: ...

    async def asave(self, save: Save) -> tuple[Record, bool]: ...


journal: SaveJournal | None = None


def journal_of(ctx: StoreContext) -> SaveJournal | None:
    """The journal that records saves made here; None: it is a plain save. Raises UsageError."""
    return journal if journal is not None and journal.joins(ctx) else None
