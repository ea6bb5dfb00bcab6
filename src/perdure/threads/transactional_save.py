"""A save that is part of another transaction: prepared on the caller's thread, written beside what it belongs to.

`prepare_saving` does all that needs no lock. `Saving.program` writes the record inside the other transaction, or raises
`Moved`, which undoes that one: then the save is prepared again. `journal` is where the layer above says that saves made
inside of it are its own (see `runs/calls/saving.py`); this layer knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import msgspec
import orjson

from perdure.log.append import Appended, Draft, Place, append, append_to_head, as_subprogram, prepare, seal
from perdure.log.records import SALT_BYTES, Record
from perdure.storage.base import ConstraintFailed
from perdure.storage.program import Batch, Flow, Rows
from perdure.threads import flows
from perdure.threads.context import Context, Cursor
from perdure.threads.size_warning import warn_if_large
from perdure.values.codec import encode


class Moved(Exception):
    """What a save was prepared for is not there any more: prepare it again. `after`: the id that it must follow."""

    def __init__(self, after: int) -> None:
        super().__init__("the base of a save has moved")
        self.after = after


class Saving(msgspec.Struct):
    """A state that is ready to be written."""

    ctx: Context
    cursor: Cursor
    tenant: int
    draft: Draft
    place: Place
    record: int
    at: int
    follows: int | None
    done: Appended | None = None  # by the last attempt of the transaction

    def program(self) -> Generator[Batch, list[Rows], Appended]:
        """Write the record. Safe to repeat; the surrounding transaction may continue after it."""
        sealed = self._sealed()
        if sealed is not None and self.draft.base is not None:
            quick = append_to_head(self.draft, self.draft.base, self.tenant, sealed)
            if (yield from as_subprogram(quick)):
                self.done = Appended(sealed, sealed.thread, sealed.tree, self.draft.base.generation, on_head=True)
                return self.done
        try:
            self.done = yield from as_subprogram(append(self.draft, self.place, self.record, self.at))
        except ConstraintFailed as error:
            if error.kind != "unique":
                raise
            raise Moved(self.record) from error
        if self.done.record is None:
            raise Moved(self.done.after)
        return self.done

    def _sealed(self) -> Record | None:
        """The record for the short path, where it applies."""
        cursor, base, place = self.cursor, self.draft.base, self.place
        expected = place.parent is None and place.expect in (None, self.follows) and not cursor.merge
        if not expected or base is None or base.record.id != self.follows or cursor.thread is None:
            return None
        return seal(self.draft, cursor.thread, cursor.tree, self.record, self.at, base.record)

    def settle(self) -> None:
        """It is committed: the handle stands on it now."""
        assert self.done is not None
        assert self.done.record is not None
        asked = self.place.parent is not None
        flows.advance_cursor(self.ctx, self.cursor, self.tenant, self.draft, self.done, self.done.record, asked=asked)

    def drop(self, moved: Moved | None = None) -> None:
        """It was not written. What it was made against is not to be trusted any more if that has moved."""
        self.cursor.disown(self.record)
        if moved is not None and not moved.after and self.follows is not None:
            self.ctx.cache.drop((self.tenant, self.cursor.tree, self.follows))


def prepare_saving(
    ctx: Context,
    cursor: Cursor,
    text: bytes,
    *,
    kind: str = "state",
    note: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    parent: int | None = None,
    expect: int | None = None,
    after: int = 0,
) -> Flow[Saving]:
    """Everything but the writing. `after`: an id that the new one must be greater than."""
    if len(text) > ctx.warn_bytes:
        warn_if_large(ctx, cursor.name, text)
    tenant = yield from ctx.ensure_tenant()
    follows = yield from flows._follows(cursor, tenant, parent or expect or cursor.record)
    found = yield from flows._base(ctx, cursor, tenant, follows)
    branching = found is not None and (parent is not None or found.record.thread != cursor.thread)
    stored = orjson.dumps(metadata).decode() if metadata else None
    draft = prepare(text, found, ctx.entropy(SALT_BYTES), kind=kind, note=note, metadata=stored, branching=branching)
    at = ctx.clock_us()
    record = ctx.new_record_id(at, max(after, follows or 0))
    cursor.own.append(record)
    return Saving(ctx, cursor, tenant, draft, flows.place_of(cursor, tenant, parent, expect), record, at, follows)


class Save(msgspec.Struct, frozen=True):
    """A save or an update, as a thread's handle was asked for it."""

    ctx: Context
    cursor: Cursor
    asked: list[Any]  # all that was passed but the state
    note: str | None = None
    metadata: Mapping[str, Any] | None = None
    parent: int | None = None
    expect: int | None = None
    text: bytes | None = None
    merge: Callable[[bytes], bytes] | None = None  # an update: the text from what is there

    @property
    def wanted(self) -> bytes:
        """What was passed, as text: a run that is replayed compares it."""
        return encode(self.asked, self.ctx.codec) + (self.text or b"")


class Journal(Protocol):
    """What the layer above makes of a save inside of it. `wants` says whether it is its own."""

    def wants(self, ctx: Context) -> bool: ...

    def save(self, save: Save) -> tuple[Record, bool]: ...

    async def asave(self, save: Save) -> tuple[Record, bool]: ...


journal: Journal | None = None


def journal_of(ctx: Context) -> Journal | None:
    """The journal that records saves made here; None: it is a plain save."""
    return journal if journal is not None and journal.wants(ctx) else None
