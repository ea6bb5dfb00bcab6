"""The save request of a thread's handle, for the save engine (`threads/save_engine.py`).

The runs layer sets `journal` to take over the saves that are made inside a run (`runs/calls/saving.py`). This module
knows only the protocol `SaveJournal`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import orjson

from perdure.errors import Conflict, Damaged, NotFound
from perdure.log.ancestors import skip_length
from perdure.log.append import NOTHING, Appended, Place, base_after, head_moved, prepare, seal
from perdure.log.cache import Base
from perdure.log.reading import read_thread_state
from perdure.log.records import SALT_BYTES, Record
from perdure.log.thread_table import try_thread
from perdure.storage.events import event
from perdure.storage.program import Flow, aside, read
from perdure.threads import flows
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.external_rows import keys_in
from perdure.threads.externals import keep
from perdure.threads.instrumentation import warn_if_large
from perdure.threads.save_engine import Moved, PreparedSave, prepare_next
from perdure.values.external import External, encode_noting, noting

_ASIDE_BYTES = 256_000  # larger texts are compared and compressed in a thread, so that they do not block an event loop
_ASIDE_EXTENDED_BYTES = 2_000_000  # and of an extended list, which is compressed whole now and then
_log = logging.getLogger("perdure")


class Unchanged(Exception):
    """Raised by `Save.merge` if there is nothing to save."""


class Save(msgspec.Struct, frozen=True):
    """The request of one `save` or `update` of a thread's handle."""

    ctx: StoreContext
    cursor: Cursor
    note: str | None = None
    metadata: Mapping[str, Any] | None = None
    parent: int | None = None
    expect: int | None = None
    text: bytes = b""
    merge: Callable[[bytes], bytes] | None = None  # of an update: makes the text from the newest one, or from `text`
    asked: tuple[Any, ...] = ()  # of an update: its arguments
    kind: str = "state"
    base: int | None = None  # the record that the difference is made against, if not the parent
    along: tuple[Save, ...] = ()  # updates of other threads, in the same transaction
    values: Sequence[External[Any]] = ()  # the large values that the text refers to, and that may be new

    @property
    def name(self) -> str:
        return self.cursor.name

    @property
    def arguments(self) -> bytes:
        """The arguments of the call as text. A replayed run compares it with its journal."""
        about = [*self.asked, self.note, self.metadata, self.parent, self.expect]
        return encode_noting(about, self.ctx.codec)[0] + self.text

    def prepare_warm(self) -> PreparedSave | None:
        ctx, cursor = self.ctx, self.cursor
        tenant, thread, follows = ctx.known_tenant, cursor.thread, self.expect or cursor.record
        if tenant is None or thread is None or follows is None or cursor.merge or cursor.on_branch:
            return None
        if self.parent is not None or self.expect == NOTHING or self.merge is not None or self.base is not None:
            return None
        assert not self.along  # only updates have some
        if self.values or self._keys_in(self.text):
            return None
        base = ctx.cache.get((tenant, cursor.tree, follows)) if len(self.text) <= ctx.warn_bytes else None
        if base is None or base.record.thread != thread or skip_length(base.record.step + 1):
            return None
        metadata = orjson.dumps(self.metadata).decode() if self.metadata else None
        prepared = prepare_next(self, tenant, base, self.text, self.kind, self.note, metadata)
        cursor.own.append(prepared.record)
        return prepared

    def prepare(self, after: int = 0) -> Flow[PreparedSave]:
        prepared = yield from self._prepare(after)
        for each in self.along:
            with suppress(Unchanged):
                prepared.along.append((yield from each.prepare()))
                prepared.warm = None  # one append writes one record
        return prepared

    def _prepare(self, after: int) -> Flow[PreparedSave]:
        if self.merge is None:
            return (yield from self._prepared(self.text, self.expect, self.kind, after))
        if (newest := self._newest_in_memory()) is not None:
            text, values = self._merged(newest.data)
            return (yield from self._prepared(text, newest.record.id, "update", after, values))
        try:
            row, loaded, _ = yield from flows.load(self.ctx, self.cursor)
        except NotFound:
            if not self.text:
                raise
            if self.expect not in (None, NOTHING):
                raise head_moved(self.cursor.name, self.expect, None) from None
            text, values = self._merged(self.text)
            return (yield from self._prepared(text, NOTHING, self.kind, after, values))
        if self.expect not in (None, row.head):
            raise head_moved(self.cursor.name, self.expect, row.head)
        # Expect the row's head, not the loaded record: that is an ancestor if the head is damaged.
        text, values = self._merged(loaded.data)
        return (yield from self._prepared(text, row.head, "update", after, values))

    def _merged(self, data: bytes) -> tuple[bytes, list[External[Any]]]:
        assert self.merge is not None
        with noting(self.ctx.codec) as values:
            return self.merge(data), values

    def _keys_in(self, text: bytes) -> list[bytes]:
        """Return the hashes of large values in a text. A new state has some only if the store has a place for them."""
        return keys_in(text) if self.ctx.objects is not None or self.kind != "state" or self.merge is not None else []

    def _newest_in_memory(self) -> Base | None:
        """Return the state that the handle last saved or loaded, if it is in memory. It is a guess at the newest one.

        The save expects it to be the head. If it is not, `retry_after` lets the next attempt load the head.
        """
        cursor, tenant = self.cursor, self.ctx.known_tenant
        if tenant is None or cursor.thread is None or cursor.record is None or cursor.merge or cursor.on_branch:
            return None
        if self.expect not in (None, cursor.record):
            return None
        base = self.ctx.cache.get((tenant, cursor.tree, cursor.record))
        return base if base is not None and base.record.thread == cursor.thread else None

    def _prepared(
        self, text: bytes, expect: int | None, kind: str, after: int, values: Sequence[External[Any]] = ()
    ) -> Flow[PreparedSave]:
        ctx, cursor, parent = self.ctx, self.cursor, self.parent
        if keys := self._keys_in(text):
            yield from keep(ctx, keys, [*values, *self.values])
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
        draft = (yield from aside(make)) if _takes_long(text, base) else make()
        at = ctx.clock_us()
        record = ctx.new_record_id(at, max(after, follows or 0, anchor or 0))
        cursor.own.append(record)
        is_next = expect in (None, follows) and not cursor.merge and base is not None and base.record.id == follows
        is_next = is_next and base is not None and not skip_length(base.record.step + 1)
        prepared = PreparedSave(self, tenant, draft, record, at, values=keys)
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
        if not done.on_head:  # from here on the handle follows its branch, so earlier ids are no longer its own
            cursor.own.clear()
            cursor.own.append(record.id)
            if self.parent is None and not cursor.on_branch:
                _warn_branched(cursor.name)
            cursor.on_branch = True
        cursor.record, cursor.found_nothing = record.id, False

    def drop(self, prepared: PreparedSave) -> None:
        self.cursor.disown(prepared.record)

    def retry_after(self, error: Exception) -> None:
        """Allow another attempt if the base moved, and for an update also after a Conflict. Raise any other error."""
        is_free = self.merge is not None and self.expect is None
        if not isinstance(error, Moved) and not (is_free and isinstance(error, Conflict)):
            raise error
        if is_free:
            self.cursor.record = None  # not the newest: load that one
        for each in self.along:
            each.retry_after(error)


def _takes_long(text: bytes, base: Base | None) -> bool:
    """Return whether an event loop should not wait for the difference. Of a list with more items it is quickly made."""
    if len(text) <= _ASIDE_BYTES:
        return False
    return base is None or len(text) > _ASIDE_EXTENDED_BYTES or not text.startswith(base.data[:-1])


def _follows(cursor: Cursor, tenant: int, stands_on: int | None) -> Flow[int | None]:
    """Return the record that a save follows: `stands_on`, or else the head. None if a load found no checkpoint."""
    if cursor.thread is not None and stands_on is not None:
        return stands_on
    row = yield from read(partial(try_thread, tenant, cursor.name, cursor.thread))
    if row is None:
        return stands_on
    cursor.resolve(row.thread, row.tree)
    return row.head if stands_on is None and not cursor.found_nothing else stands_on


def _base(ctx: StoreContext, cursor: Cursor, tenant: int, anchor: int | None) -> Flow[Base | None]:
    """Return the base of a difference, from the cache or the store. Return None if there is none, or it is damaged."""
    if anchor is None or cursor.thread is None:
        return None
    if (cached := ctx.cache.get((tenant, cursor.tree, anchor))) is not None:
        return cached
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, anchor))
    except Damaged:
        return None  # the new record stores its full text
    return None if loaded is None else flows.base_of(loaded, row)


def place_of(cursor: Cursor, tenant: int, parent: int | None = None, expect: int | None = None) -> Place:
    """Return the place of a handle's save, from the current position of its cursor."""
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


# --- saves inside a run


class SaveJournal(Protocol):
    """A run's journal, as saves use it. The runs layer implements it."""

    def joins(self, ctx: StoreContext) -> bool:
        """Return whether a write to this store is committed with the journal.

        Raises UsageError if it must be, but cannot.
        """
        ...

    def save(self, save: Save) -> tuple[Record, bool]: ...

    async def asave(self, save: Save) -> tuple[Record, bool]: ...


journal: SaveJournal | None = None


def journal_of(ctx: StoreContext) -> SaveJournal | None:
    """Return the journal that records saves made here, or None outside a run. Raises UsageError."""
    return journal if journal is not None and journal.joins(ctx) else None
