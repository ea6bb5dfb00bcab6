"""The save engine: a prepared append and the two routes that write it.

A request (`Save` of a handle, `LineSave` of a line) prepares a state on the caller's thread. The warm route
(`save_now`) takes the base's text from the cache and writes one append without a flow. The general route (`save`) reads
the base, and handles new threads, branches and moved bases under a lock. Both write the same rows.
`PreparedSave.program` writes a prepared save inside another transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from perdure.errors import Conflict, OutcomeUnknown, StoreError, ThreadDeleted
from perdure.log.append import (
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
from perdure.log.records import SALT_BYTES
from perdure.log.turns import Held
from perdure.storage import metrics
from perdure.storage.program import (
    Append,
    Batch,
    ConstraintFailed,
    Flow,
    Program,
    Rows,
    Statement,
    as_subprogram,
    drive,
    write,
)
from perdure.threads.attachments import attach
from perdure.threads.context import StoreContext
from perdure.threads.external_rows import Retired, refer
from perdure.threads.instrumentation import record_size, warn_unknown

ATTEMPTS = 64  # an attempt fails only because another writer has succeeded
_ONE = (1,)
_NUMBERS = 32  # how many thread numbers a process reserves at once


class Moved(Exception):
    """Raised when the base of a prepared save has moved: prepare it again, with an id greater than `after`."""

    def __init__(self, after: int) -> None:
        super().__init__("the base of a save has moved")
        self.after = after


class SaveRequest(Protocol):
    """A state to save and its place. The routes use it through these methods."""

    @property
    def ctx(self) -> StoreContext: ...

    @property
    def name(self) -> str:
        """The name of the thread."""
        ...

    def prepare_warm(self) -> PreparedSave | None:
        """Prepare without I/O. Return None if the base is not in memory, or the save does not simply follow it."""
        ...

    def prepare(self, after: int = 0) -> Flow[PreparedSave]:
        """Prepare, reading the base if necessary. The new id must be greater than `after`."""
        ...

    def place(self, tenant: int) -> Place:
        """Return where the record goes, for the general route."""
        ...

    def settle(self, done: Appended, after: Base | None) -> None:
        """Note that the state is stored. The caller's next save follows it and builds on `after`."""
        ...

    def drop(self, prepared: PreparedSave) -> None:
        """Note that the state was not stored."""
        ...

    def retry_after(self, error: Exception) -> None:
        """Get ready to prepare the state again after an error. Raise the error if a retry would not help."""
        ...


class PreparedSave(msgspec.Struct, eq=False):
    """A state that is ready to be written.

    With a label it may carry writes that are attached to its parent. It may also carry the parent itself (`before`), if
    that was prepared but not written.
    """

    request: SaveRequest
    tenant: int
    draft: Draft
    record: int
    at: int
    label: Label | None = None
    where: Place | None = None  # None: ask the request when it is needed
    values: Sequence[bytes] = ()  # the hashes of the large values that it refers to
    starts: bool = False  # it probably begins its thread
    writes: Sequence[Write] = ()
    before: PreparedSave | None = None
    along: list[PreparedSave] = msgspec.field(default_factory=list)  # of other threads, in the same transaction
    warm: Base | None = None  # the base of the next save, if one append can write this one
    done: Appended | None = None  # the result of the transaction's last attempt
    is_stored: bool = False

    @property
    def name(self) -> str:
        """The name of the thread."""
        return self.request.name

    # --- one append

    def statements(self) -> tuple[Sequence[Statement], Sequence[int | None]]:
        """Return the statements of one append, and how many rows each must change (None: any number)."""
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
        """Write the record in its own transaction, by one append if possible. Raises Moved."""
        unknown: OutcomeUnknown | None = None
        try:
            if self.warm is not None and not self.values and (yield Append(*self.statements())):
                return self.note_appended()
            if self.starts:
                return self._note((yield from self._start()))
        except OutcomeUnknown as error:
            unknown = error
        except ConstraintFailed:
            pass  # an id is taken, or damage: the general route finds out which
        return (yield from self.look_for(unknown))

    def _start(self) -> Flow[Appended]:
        """Begin the thread. Raises Moved if a thread of this name exists: it may have a base for the save."""
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
        """Write the record inside another transaction, which may continue after it. Safe to repeat. Raises Moved."""
        draft = self.draft
        if self.warm is not None and draft.base is not None and not self.values:
            quick = append_to_head(draft, draft.base, self.tenant, self.warm.record, self.label)
            if (yield from as_subprogram(quick)):
                return self.note_appended()
        try:
            return self._note((yield from as_subprogram(self.append())))
        except ConstraintFailed as error:
            raise self._moved(error) from error

    def append(self) -> Program[Appended]:
        """Write the record wherever it belongs, under a lock, after those of other threads. Raises Moved."""
        for each in self.along:
            try:
                yield from each.program()
            except Conflict:
                raise Moved(0) from None  # an update, which may follow another one
        appending = append(self.draft, self._place(), self.record, self.at, self.label)
        return (yield from (self._with_values(appending) if self.values else appending))

    def _with_values(self, appending: Program[Appended]) -> Program[Appended]:
        """Append, and refer to the large values. Raises Moved if one was retired since it was kept."""
        done: Appended = yield from as_subprogram(appending)
        if done.record is not None:
            try:
                yield from refer(self.tenant, done.tree, self.record, self.values, self.at)
            except Retired:
                raise Moved(0) from None
        return done

    def look_for(self, unknown: OutcomeUnknown | None) -> Flow[Appended]:
        """Write the parent and its writes, then the record, unless the record is there already.

        `unknown` is the error of a COMMIT that may have written it.
        """
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
        """Return the error for a refused record. Only a taken id is worth another attempt; damage is not."""
        return Moved(self.record) if error.kind == "unique" else error

    # --- the outcome

    def _note(self, done: Appended) -> Appended:
        self.done = done
        if done.record is None:
            raise Moved(done.after)
        self.is_stored = True
        return done

    def note_appended(self) -> Appended:
        """Note that one append has written the record."""
        assert self.warm is not None
        record, self.is_stored = self.warm.record, True
        if self.before is not None:
            self.before.is_stored = True
        self.done = Appended(record, record.thread, record.tree, self.warm.generation, on_head=True)
        return self.done

    def settle(self) -> Appended:
        """Note that the save is committed, so that the next one builds on it."""
        for each in self.along:
            each.settle()
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
            # A caller that names the parent may name it again: keep the old text. Otherwise the new one replaces it.
            is_replaced = base is not None and base.record.id == record.parent
            is_replaced = is_replaced and (self.where is None or self.where.parent is None)
            old = (self.tenant, done.tree, record.parent) if is_replaced and record.parent is not None else None
            ctx.cache.put((self.tenant, done.tree, record.id), after, instead_of=old)
        return done

    def drop(self, error: Exception | None = None) -> None:
        """Note that the save was not written. Drop its base from the cache if that has moved."""
        for each in self.along:
            each.drop(error)
        self.request.drop(self)
        base = self.draft.base
        if isinstance(error, Moved) and not error.after and base is not None:
            self.request.ctx.cache.drop((self.tenant, base.record.tree, base.record.id))

    # --- a save that the next one carries

    def hold(self) -> None:
        """Let the next save build on this one before it is written. That save writes it, or `store` does."""
        self.note_appended()
        self.is_stored = False
        self.settle()

    def store(self, unknown: OutcomeUnknown | None = None) -> Flow[None]:
        """Write the save unless it is written. `unknown` is the error of a COMMIT that may have written it."""
        if self.is_stored:
            return
        done: Appended | None = None
        try:
            done = yield from (self.flow() if unknown is None else self.look_for(unknown))
        except (Held, Moved, ConstraintFailed):
            pass  # the general route finds out why
        if done is None or not done.on_head:  # no save can build on it
            self.drop()
        if done is None:
            yield from save(self.request)
        self.is_stored = True


def save_now(request: SaveRequest, *, is_measured: bool = False) -> Appended:
    """Save and block, by the warm route if it applies, else by the general one."""
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
    """Save by the general route, as a flow. `write` commits a prepared save, by default in its own transaction."""
    if (sink := metrics.sink) is None:
        return (yield from _save(request, write))
    with metrics.measuring(sink, "save", request.ctx.driver, request.name):
        return (yield from _save(request, write))


def _save(request: SaveRequest, write: Callable[[PreparedSave], Flow[Any]] = PreparedSave.flow) -> Flow[Appended]:
    after = 0
    for _ in range(ATTEMPTS):
        prepared: PreparedSave | None = None
        try:
            prepared = yield from request.prepare(after)
            yield from write(prepared)
        except (Moved, Conflict, Held, ParentChanged, ThreadDeleted) as error:
            if prepared is not None:
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
    """Prepare the next state after a base, for one append. Its first `head` bytes are known to equal the base's."""
    ctx, last = request.ctx, base.record
    chance = ctx.entropy(SALT_BYTES + 4)
    draft = prepare(text, base, chance[:SALT_BYTES], kind=kind, note=note, metadata=metadata, head=head)
    at = ctx.clock_us()
    record = new_id(at, int.from_bytes(chance[SALT_BYTES:], "little"), last.id)
    sealed = seal(draft, last.thread, last.tree, record, at, last)
    warm = base_after(draft, sealed, base.generation)  # before COMMIT waits for the disk: the CPU caches are still warm
    return PreparedSave(request, tenant, draft, record, at, label, warm=warm)


def commit(
    record: int, careful: Callable[[], Program[Appended]], unknown: OutcomeUnknown | None = None
) -> Flow[Appended]:
    """Write a record by a program that first looks for it. `unknown` is from a COMMIT that may have written it."""
    for _ in range(2):
        if unknown is not None:
            warn_unknown(show_id(record))
        try:
            # Safe after a lost COMMIT: the program looks for the record before it writes.
            return (yield from write(careful))
        except OutcomeUnknown as error:
            unknown = error
        except StoreError as error:
            if unknown is None:
                raise
            # This error's "nothing was written" holds for the search, not for the COMMIT before it.
            raise OutcomeUnknown(f"{unknown} Looking for checkpoint {show_id(record)} failed: {error}") from unknown
    assert unknown is not None
    raise unknown
