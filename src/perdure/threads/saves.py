"""The save engine: a prepared append and the two routes that write it.

A request (`Save` of a handle, `LineSave` of a line) prepares a state on the caller's thread. The warm route takes the
base's text from the cache and writes one append without a flow (`save_now`). The general route (`save`) reads the base,
and handles new threads, branches and moved bases under a lock. Both write the same rows.
A save that is a part of another transaction is prepared by its request and written by `PreparedSave.program`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import orjson

from perdure.errors import Conflict, Damaged, NotFound, OutcomeUnknown, StoreError, ThreadDeleted
from perdure.log.append import (
    NOTHING,
    Appended,
    Draft,
    Place,
    append,
    append_to_head,
    base_after,
    head_statement,
    prepare,
    seal,
    start_statements,
    start_thread,
    stored_as_drafted,
)
from perdure.log.cache import Base
from perdure.log.ids import new_id, show_id
from perdure.log.labels import Label, ParentChanged
from perdure.log.pending import Against, Write, write_statements
from perdure.log.reading import read_thread_state
from perdure.log.records import SALT_BYTES, Record
from perdure.log.thread_table import try_thread
from perdure.log.turns import Held
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
    as_subprogram,
    aside,
    drive,
    read,
    write,
)
from perdure.threads import flows
from perdure.threads.attachments import attach
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.instrumentation import record_size, warn_if_large, warn_unknown
from perdure.values.codec import encode

ATTEMPTS = 64  # another writer succeeds each time one of these fails
_ONE = (1,)
_NUMBERS = 32  # that a process takes for itself and its next threads
_ASIDE_BYTES = 256_000  # a larger text is compared and compressed on a thread, while an event loop turns
_log = logging.getLogger("perdure")


class Moved(Exception):
    """What a save was prepared for is not there any more: prepare it again. `after`: the id that it must follow."""

    def __init__(self, after: int) -> None:
        super().__init__("the base of a save has moved")
        self.after = after


class SaveRequest(Protocol):
    """A state that a caller wants saved, and where: what the routes ask of it."""

    @property
    def ctx(self) -> StoreContext: ...

    @property
    def name(self) -> str:
        """The name of the thread."""
        ...

    def prepare_warm(self) -> PreparedSave | None:
        """Prepare without I/O. Return None if the base is not in memory, or the save is not the plain next state."""
        ...

    def prepare(self, after: int = 0) -> Flow[PreparedSave]:
        """Prepare, with whatever has to be read. `after` is an id that the new one must be greater than."""
        ...

    def place(self, tenant: int) -> Place:
        """Return where the record goes, for the general route."""
        ...

    def settle(self, done: Appended, after: Base | None) -> None:
        """Note that the state is stored: the next save of the same caller follows it, and builds on `after`."""
        ...

    def drop(self, prepared: PreparedSave) -> None:
        """Note that the state was not stored."""
        ...

    def retry_after(self, error: Exception) -> None:
        """Get ready to prepare the state again after an error. Raise it if that would not help."""
        ...


class PreparedSave(msgspec.Struct, eq=False):
    """A state that is ready to be written. With a label it may carry writes that are attached to its parent, and the
    parent itself (`before`), if that was prepared and is to be written with it."""

    request: SaveRequest
    tenant: int
    draft: Draft
    record: int
    at: int
    label: Label | None = None
    where: Place | None = None  # None: the request is asked when it is needed
    starts: bool = False  # it begins its thread, most likely
    writes: Sequence[Write] = ()
    before: PreparedSave | None = None
    follows: int | None = None  # the record that it was prepared to follow
    warm: Base | None = None  # where one append will do: its record, and what the save after it builds on
    done: Appended | None = None  # by the last attempt of the transaction
    is_stored: bool = False

    @property
    def name(self) -> str:
        """The name of the thread."""
        return self.request.name

    # --- one append

    def statements(self) -> tuple[Sequence[Statement], Sequence[int | None]]:
        """Return what one append runs: the statements, and how many rows each has to change (None: any number)."""
        draft, base, label = self.draft, self.draft.base, self.label
        assert self.warm is not None
        sealed = self.warm.record
        if self.starts or base is None:
            assert label is not None
            started = start_statements(draft, self._place(), sealed, label)
            return started, _ONE * len(started)
        own = head_statement(draft, base, self.tenant, sealed, label)
        before = None if self.before is None or self.before.is_stored else self.before
        if before is None and not self.writes:
            return (own,), _ONE
        statements: list[Statement] = []
        counts: list[int | None] = []
        if before is not None:
            first, _ = before.statements()
            statements, counts = [*first], [1]
        if self.writes and label is not None and label.parent is not None:
            against = Against(base.record.id, base.data, base.generation, is_new=before is not None)
            attached = write_statements(self.tenant, sealed.thread, label.parent, self.writes, against)
            statements += attached
            counts += [None] * len(attached)
        return [*statements, own], [*counts, 1]

    def flow(self) -> Flow[Appended]:
        """Write the record in a transaction of its own, by one append if that will do. Raises Moved."""
        unknown: OutcomeUnknown | None = None
        try:
            if self.warm is not None and (yield Append(*self.statements())):
                return self.note_appended()
            if self.starts:
                return self._note((yield from self._start()))
        except OutcomeUnknown as error:
            unknown = error
        except ConstraintFailed:
            pass  # an id is taken, or damage: the general route finds out which
        return (yield from self.look_for(unknown))

    def _start(self) -> Flow[Appended]:
        """Begin the thread. Raises Moved if there is one of this name: it may have a base."""
        done: Appended | None = None
        if self.warm is None:
            assert self.label is not None
            begin = partial(start_thread, self.draft, self._place(), self.record, self.at, self.label, _NUMBERS)
            done, numbers = yield from write(begin)
            self.request.ctx.numbers.extend(numbers)
        if done is None:
            raise Moved(0)
        return done

    def program(self) -> Generator[Batch, list[Rows], Appended]:
        """Write the record in another transaction, which may continue after it. Safe to repeat. Raises Moved."""
        draft = self.draft
        if self.warm is not None and draft.base is not None:
            quick = append_to_head(draft, draft.base, self.tenant, self.warm.record, self.label)
            if (yield from as_subprogram(quick)):
                return self.note_appended()
        try:
            return self._note((yield from as_subprogram(self.append())))
        except ConstraintFailed as error:
            raise self._moved(error) from error

    def append(self) -> Program[Appended]:
        """Write the record wherever it belongs, under a lock."""
        return append(self.draft, self._place(), self.record, self.at, self.label)

    def look_for(self, unknown: OutcomeUnknown | None) -> Flow[Appended]:
        """Write what goes before the record, then the record, unless it is found. `unknown`: a COMMIT that should have
        written it was not answered."""
        label = self.label
        if self.before is not None:
            yield from self.before.store(unknown)
        if self.writes and label is not None and label.parent is not None:
            yield from attach(self.request.ctx, self.name, label.space, label.parent, self.writes)
        try:
            return self._note((yield from commit(self.record, self.append, unknown)))
        except ConstraintFailed as error:
            raise self._moved(error) from error

    def _place(self) -> Place:
        if self.where is None:
            self.where = self.request.place(self.tenant)
        return self.where

    def _moved(self, error: ConstraintFailed) -> Exception:
        """Return the error for a refused record. Only a taken id is a reason to prepare it again: damage is not."""
        return Moved(self.record) if error.kind == "unique" else error

    # --- what became of it

    def _note(self, done: Appended) -> Appended:
        self.done = done
        if done.record is None:
            raise Moved(done.after)
        self.is_stored = True
        return done

    def note_appended(self) -> Appended:
        """Note that one append has written it."""
        assert self.warm is not None
        record, self.is_stored = self.warm.record, True
        if self.before is not None:
            self.before.is_stored = True
        self.done = Appended(record, record.thread, record.tree, self.warm.generation, on_head=True)
        return self.done

    def settle(self) -> Appended:
        """Note that it is committed: the next save builds on it."""
        ctx, done, base, after = self.request.ctx, self.done, self.draft.base, self.warm
        assert done is not None
        record = done.record
        assert record is not None
        if (sink := metrics.sink) is not None:
            record_size(ctx, self.draft, sink)
        if after is None or after.record is not record:
            stands = stored_as_drafted(self.draft, record)
            after = base_after(self.draft, record, done.generation) if stands else None
        self.request.settle(done, after)
        if after is not None:
            # A caller that names the parent may do so again; any other needs the old text no more.
            is_replaced = base is not None and base.record.id == record.parent
            is_replaced = is_replaced and (self.where is None or self.where.parent is None)
            old = (self.tenant, done.tree, record.parent) if is_replaced and record.parent is not None else None
            ctx.cache.put((self.tenant, done.tree, record.id), after, instead_of=old)
        return done

    def drop(self, error: Exception | None = None) -> None:
        """Note that it was not written. Forget its base if that has moved."""
        self.request.drop(self)
        base = self.draft.base
        if isinstance(error, Moved) and not error.after and base is not None:
            self.request.ctx.cache.drop((self.tenant, base.record.tree, base.record.id))

    # --- a save that the next one carries

    def hold(self) -> None:
        """Let the next save build on it before it is written: with that save, or by `store`."""
        self.note_appended()
        self.is_stored = False
        self.settle()

    def store(self, unknown: OutcomeUnknown | None = None) -> Flow[None]:
        """Write it if it was not written yet. `unknown`: a COMMIT that should have written it was not answered."""
        if self.is_stored:
            return
        done: Appended | None = None
        try:
            done = yield from (self.flow() if unknown is None else self.look_for(unknown))
        except (Held, Moved, ConstraintFailed):
            pass  # the general route finds out why
        if done is None or not done.on_head:  # nothing can be built on it
            self.drop()
        if done is None:
            yield from save(self.request)
        self.is_stored = True


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
    def name(self) -> str:
        return self.cursor.name

    @property
    def wanted(self) -> bytes:
        """The arguments of the call as text: a run that is replayed compares it."""
        about = [*self.asked, self.note, self.metadata, self.parent, self.expect]
        return encode(about, self.ctx.codec) + self.text

    def prepare_warm(self) -> PreparedSave | None:
        ctx, cursor = self.ctx, self.cursor
        tenant, thread, follows = ctx.known_tenant, cursor.thread, self.expect or cursor.record
        if tenant is None or thread is None or follows is None or cursor.merge or cursor.on_branch:
            return None
        if self.parent is not None or self.expect == NOTHING or self.merge is not None or self.base is not None:
            return None
        base = ctx.cache.get((tenant, cursor.tree, follows)) if len(self.text) <= ctx.warn_bytes else None
        if base is None or base.record.thread != thread:
            return None
        metadata = orjson.dumps(self.metadata).decode() if self.metadata else None
        prepared = prepare_next(self, tenant, base, self.text, self.kind, self.note, metadata)
        cursor.own.append(prepared.record)
        return prepared

    def prepare(self, after: int = 0) -> Flow[PreparedSave]:
        if self.merge is None:
            return (yield from self._prepared(self.text, self.expect, self.kind, after))
        try:
            row, loaded, _ = yield from flows.load(self.ctx, self.cursor)
        except NotFound:
            if not self.text:
                raise
            return (yield from self._prepared(self.merge(self.text), None, self.kind, after))
        # The row's head is expected, not what was loaded: an ancestor stands in for a damaged head.
        return (yield from self._prepared(self.merge(loaded.data), row.head, "update", after))

    def _prepared(self, text: bytes, expect: int | None, kind: str, after: int) -> Flow[PreparedSave]:
        ctx, cursor, parent = self.ctx, self.cursor, self.parent
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
        draft = (yield from aside(make)) if len(text) > _ASIDE_BYTES else make()
        at = ctx.clock_us()
        record = ctx.new_record_id(at, max(after, follows or 0, anchor or 0))
        cursor.own.append(record)
        is_next = expect in (None, follows) and not cursor.merge and base is not None and base.record.id == follows
        prepared = PreparedSave(self, tenant, draft, record, at, follows=follows)
        prepared.where = place_of(cursor, tenant, parent, expect)
        if is_next and base is not None and base.record.thread == cursor.thread:
            sealed = seal(draft, base.record.thread, base.record.tree, record, at, base.record)
            prepared.warm = base_after(draft, sealed, base.generation)
        return prepared

    def place(self, tenant: int) -> Place:
        return place_of(self.cursor, tenant, self.parent, self.expect)

    def settle(self, done: Appended, after: Base | None) -> None:
        cursor, record = self.cursor, done.record
        assert record is not None
        cursor.thread, cursor.tree = done.thread, done.tree
        cursor.merge = None
        if not done.on_head:  # from here on the handle follows its branch: the head is no longer its own
            cursor.own.clear()
            cursor.own.append(record.id)
            if self.parent is None and not cursor.on_branch:
                _warn_branched(cursor.name)
            cursor.on_branch = True
        cursor.record, cursor.found_nothing = record.id, False

    def drop(self, prepared: PreparedSave) -> None:
        self.cursor.disown(prepared.record)

    def retry_after(self, error: Exception) -> None:
        """An update starts again from a head that moved."""
        if not isinstance(error, Moved) and (self.merge is None or not isinstance(error, Conflict)):
            raise error


def save_now(request: SaveRequest, *, is_measured: bool = False) -> Appended:
    """Save, blocking: by the warm route where it applies, else by the general one."""
    if not is_measured and (sink := metrics.sink) is not None:
        with metrics.measuring(sink, "save", request.ctx.driver, request.name):
            return save_now(request, is_measured=True)
    prepared = request.prepare_warm()
    if prepared is not None and prepared.warm is not None:
        try:
            if request.ctx.driver.append(*prepared.statements()):
                prepared.note_appended()
                return prepared.settle()
        except OutcomeUnknown as unknown:
            try:
                drive(request.ctx.driver, prepared.look_for(unknown))
                return prepared.settle()
            except Moved:
                pass  # it was not written
        except ConstraintFailed:
            pass  # an id is taken, or damage: the general route finds out which
        request.drop(prepared)
    return drive(request.ctx.driver, _save(request))


def save(request: SaveRequest, write: Callable[[PreparedSave], Flow[Any]] = PreparedSave.flow) -> Flow[Appended]:
    """Save as a flow, by the general route. `write` commits a prepared save, by default in its own transaction."""
    if (sink := metrics.sink) is None:
        return (yield from _save(request, write))
    with metrics.measuring(sink, "save", request.ctx.driver, request.name):
        return (yield from _save(request, write))


def _save(request: SaveRequest, write: Callable[[PreparedSave], Flow[Any]] = PreparedSave.flow) -> Flow[Appended]:
    after = 0
    for _ in range(ATTEMPTS):
        prepared = yield from request.prepare(after)
        try:
            yield from write(prepared)
        except (Moved, Conflict, Held, ParentChanged, ThreadDeleted) as error:
            prepared.drop(error)
            request.retry_after(error)
            after = error.after if isinstance(error, Moved) else 0
        else:
            return prepared.settle()
    raise Conflict(f"other writers move the head of thread {request.name!r}: nothing was written; save again")


def prepare_next(
    request: SaveRequest,
    tenant: int,
    base: Base,
    text: bytes,
    kind: str,
    note: str | None,
    metadata: str | None = None,
    *,
    head: int = 0,
    label: Label | None = None,
) -> PreparedSave:
    """Prepare the next state after a base, for one append. The first `head` bytes are known to be the base's."""
    ctx, last = request.ctx, base.record
    chance = ctx.entropy(SALT_BYTES + 4)
    draft = prepare(text, base, chance[:SALT_BYTES], kind=kind, note=note, metadata=metadata, head=head)
    at = ctx.clock_us()
    record = new_id(at, int.from_bytes(chance[SALT_BYTES:], "little"), last.id)
    sealed = seal(draft, last.thread, last.tree, record, at, last)
    warm = base_after(draft, sealed, base.generation)  # now, while the caches are warm: COMMIT waits for the disk
    return PreparedSave(request, tenant, draft, record, at, label, follows=last.id, warm=warm)


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


def _follows(cursor: Cursor, tenant: int, stands_on: int | None) -> Flow[int | None]:
    """Return what a save follows: the checkpoint that the handle last loaded or saved; if there is none, the head."""
    if cursor.thread is not None and stands_on is not None:
        return stands_on
    row = yield from read(partial(try_thread, tenant, cursor.name, cursor.thread))
    if row is None:
        return stands_on
    cursor.resolve(row.thread, row.tree)
    return row.head if stands_on is None and not cursor.found_nothing else stands_on


def _base(ctx: StoreContext, cursor: Cursor, tenant: int, anchor: int | None) -> Flow[Base | None]:
    """Return what to make the difference against, from the cache or the store. None: nothing that can be read."""
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
    """Return where a save of a handle goes, as the handle stands now."""
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


def _warn_branched(thread: str) -> None:
    _log.warning(
        "thread %r: another writer has saved since this handle loaded it, so that its saves are a branch from "
        "here on (is_head is False): load() takes the handle back to the head, and expect= refuses such a "
        "save; see docs/how-to/threads.md",
        thread,
        extra=event("thread.branched", thread=thread),
    )


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
    """Return the journal that records saves made here. None: it is a plain save. Raises UsageError."""
    return journal if journal is not None and journal.joins(ctx) else None
