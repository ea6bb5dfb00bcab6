"""Rollback: save the state of an old checkpoint as the new head. No checkpoint is removed.

The text of a line's checkpoint holds its id, and attachments are found by that id. So a rollback on a line saves the
text under a new id that follows the old one. The new checkpoint has no attachments.
"""

from __future__ import annotations

from functools import partial

from perdure.errors import Conflict
from perdure.log.envelopes import renamed
from perdure.log.gc_plan import has_record
from perdure.log.ids import show_id
from perdure.log.label_ids import new_label_id
from perdure.log.labels import LABELLED_KIND, MAIN, Label, greatest_label
from perdure.log.reading import Loaded, read_live, read_thread_state
from perdure.log.records import Record
from perdure.storage.program import Flow, read
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.external_rows import keys_in
from perdure.threads.flows import gone, locate
from perdure.threads.line_saves import Encoded, LineSave, turn_of
from perdure.threads.save_engine import ATTEMPTS, save
from perdure.threads.saves import Save


def rollback(ctx: StoreContext, cursor: Cursor, to: int, note: str | None) -> Flow[tuple[Record, bool]]:
    """Save an old checkpoint's state as the new head. Stored as a difference to it, it takes almost no space."""
    tenant, _ = yield from locate(ctx, cursor)
    reason = note or f"rolled back to {show_id(to)}"
    for _ in range(ATTEMPTS):
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, to))
        if loaded is None or not (yield from read(partial(has_record, tenant, row, loaded.record))):
            raise gone(cursor, to)
        if row.head is not None and not (yield from read(partial(read_live, tenant, row.tree, row.head))):
            cursor.record, cursor.lost_head = to, row.head  # the head's record is missing: the rollback repairs that
        if loaded.record.kind == LABELLED_KIND:
            return (yield from _put_again(ctx, cursor, tenant, loaded, reason))
        try:
            again = Save(ctx, cursor, reason, expect=row.head, text=loaded.data, kind="rollback", base=to)
            done = yield from save(again)
            assert done.record is not None
            return done.record, done.on_head
        except Conflict:
            continue
    raise Conflict(f"other writers move the head of thread {cursor.name!r}: nothing was written; roll back again")


def _put_again(ctx: StoreContext, cursor: Cursor, tenant: int, loaded: Loaded, note: str) -> Flow[tuple[Record, bool]]:
    """Save a line's checkpoint again under a new id. Return its record, and whether that is the head."""
    assert cursor.thread is not None
    greatest = yield from read(partial(greatest_label, tenant, cursor.thread, MAIN))
    new = new_label_id(ctx.clock_us(), ctx.entropy(8), greatest.id if greatest is not None else b"")
    text, old = renamed(loaded.data, new)
    label = Label("", new, old, None, forks=True, turn=turn_of(ctx))
    encoded = Encoded(text, keys=tuple(keys_in(text)))
    done = yield from save(LineSave(ctx, cursor.name, encoded, label, LABELLED_KIND, note, {}))
    assert done.record is not None
    cursor.record, cursor.found_nothing = done.record.id, False
    cursor.own.clear()
    cursor.own.append(done.record.id)
    return done.record, done.on_head
