"""Rolling back: a new head that equals an old checkpoint. History stays; nothing is undone but what comes next.

A checkpoint of a line carries its id, and what is attached to it is found by that id. So going back to one makes a new
one, with an id of its own that follows it: nothing is attached to it.
"""

from __future__ import annotations

from functools import partial

from perdure.errors import Conflict
from perdure.log.append import Place, append, prepare
from perdure.log.envelopes import renamed
from perdure.log.gc_plan import has_record
from perdure.log.ids import show_id
from perdure.log.label_ids import new_label_id
from perdure.log.labels import LABELLED_KIND, MAIN, Label, greatest_label
from perdure.log.reading import Loaded, read_live, read_thread_state
from perdure.log.records import SALT_BYTES, Record
from perdure.log.thread_table import ThreadRow
from perdure.storage.program import ConstraintFailed, Flow, read
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.flows import base_of, gone, locate
from perdure.threads.saves import ATTEMPTS, Save, commit, save


def rollback(ctx: StoreContext, cursor: Cursor, to: int, note: str | None) -> Flow[tuple[Record, bool]]:
    """A new head that equals an old checkpoint. Its difference to that checkpoint is next to nothing."""
    tenant, _ = yield from locate(ctx, cursor)
    reason = note or f"rolled back to {show_id(to)}"
    for _ in range(ATTEMPTS):
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, to))
        if loaded is None or not (yield from read(partial(has_record, tenant, row, loaded.record))):
            raise gone(cursor, to)
        if row.head is not None and not (yield from read(partial(read_live, tenant, row.tree, row.head))):
            cursor.record, cursor.lost_head = to, row.head  # nothing to follow: this is how to repair it
        if loaded.record.kind == LABELLED_KIND:
            made = yield from _put_again(ctx, cursor, tenant, loaded, row, reason)
            if made is not None:
                return made
            continue
        try:
            again = Save(ctx, cursor, reason, expect=row.head, text=loaded.data, kind="rollback", base=to)
            return (yield from save(ctx, cursor, again))
        except Conflict:
            continue
    raise Conflict(f"other writers move the head of thread {cursor.name!r}: nothing was written; roll back again")


def _put_again(
    ctx: StoreContext, cursor: Cursor, tenant: int, loaded: Loaded, row: ThreadRow, note: str
) -> Flow[tuple[Record, bool] | None]:
    """The same checkpoint under a new id, and whether it is the head. None: the base has moved, or the id is taken."""
    assert cursor.thread is not None
    greatest = yield from read(partial(greatest_label, tenant, cursor.thread, MAIN))
    at = ctx.clock_us()
    new = new_label_id(at, ctx.entropy(8), greatest.id if greatest is not None else b"")
    text, old = renamed(loaded.data, new)
    draft = prepare(
        text,
        base_of(loaded, row),
        ctx.entropy(SALT_BYTES),
        kind=LABELLED_KIND,
        note=note,
        metadata=None,
        branching=True,
    )
    record = ctx.new_record_id(at, loaded.record.id)
    place = Place(tenant, cursor.name, cursor.thread)
    label = Label("", new, old, None)
    try:
        done = yield from commit(record, partial(append, draft, place, record, at, label))
    except ConstraintFailed as error:
        if error.kind != "unique":
            raise
        return None
    if done.record is None:
        return None
    cursor.record, cursor.found_nothing = done.record.id, False
    cursor.own.clear()
    cursor.own.append(done.record.id)
    return done.record, done.on_head
