"""The straight line of a save: the next state on the head of a thread whose newest state this process has in memory.

Nearly every save is one. There is nothing to read or to decide, so no flow is needed: the difference is made, and one
statement moves the head from where it was and inserts the record, or changes nothing. In every other case the answer is
None, nothing was written, and the caller takes the general way (`flows.save`), which must write the same.
"""

from __future__ import annotations

from functools import partial

from perdure.errors import OutcomeUnknown
from perdure.log.append import append, base_after, head_statement, prepare, seal
from perdure.log.ids import new_id
from perdure.log.records import SALT_BYTES, Record
from perdure.storage import metrics
from perdure.storage.base import ConstraintFailed
from perdure.storage.program import drive
from perdure.threads import flows
from perdure.threads.context import Context, Cursor

_ONE = (1,)


def straight_save(ctx: Context, cursor: Cursor, text: bytes, note: str | None) -> tuple[Record, bool] | None:
    """Append a state to the head. Its record, and whether that is the head; None: it was not done."""
    tenant, parent, thread, tree = ctx.known_tenant, cursor.record, cursor.thread, cursor.tree
    if tenant is None or parent is None or thread is None or cursor.merge or cursor.on_branch:
        return None
    if len(text) > ctx.warn_bytes or metrics.sink is not None:
        return None
    base = ctx.cache.get((tenant, tree, parent))
    if base is None or base.record.thread != thread:
        return None
    chance = ctx.entropy(SALT_BYTES + 4)
    draft = prepare(text, base, chance[:SALT_BYTES], kind="state", note=note, metadata=None)
    at = ctx.clock_us()
    record = new_id(at, int.from_bytes(chance[SALT_BYTES:], "little"), parent)
    sealed = seal(draft, thread, tree, record, at, base.record)
    cursor.own.append(record)
    try:
        written = ctx.driver.append((head_statement(draft, base, tenant, sealed),), _ONE)
    except OutcomeUnknown as unknown:
        careful = partial(append, draft, flows.place_of(cursor, tenant, None, None), record, at)
        done = drive(ctx.driver, flows.commit(record, None, careful, unknown))
        if done is None or done.record is None:
            cursor.disown(record)
            return None
        flows.advance_cursor(ctx, cursor, tenant, draft, done, done.record, asked=False)
        return done.record, done.on_head
    except ConstraintFailed:
        written = False  # the id is taken, or damage: the general way finds out which
    if not written:
        cursor.disown(record)
        return None
    cursor.record = record
    ctx.cache.put((tenant, tree, record), base_after(draft, sealed, base.generation), instead_of=(tenant, tree, parent))
    return sealed, True
