"""Making a pin: only on a checkpoint that its thread has.

Apart from `pins.py`, because what a thread has is known where pins are looked at too (`gc_plan.py`).
"""

from __future__ import annotations

from collections.abc import Generator

from perdure.errors import NotFound, UsageError
from perdure.log.gc_plan import nodes_of, reached_by
from perdure.log.ids import show_id
from perdure.log.labels import labels_in
from perdure.log.pins import PIN_COLUMNS, PinRow, pins_in
from perdure.log.reading import read_live
from perdure.log.records import Record
from perdure.log.thread_table import ThreadRow, find_thread
from perdure.storage.program import Batch, Program, Rows, Sql

_NAMED = Sql(f"SELECT {PIN_COLUMNS} FROM pin WHERE tenant = :tenant AND thread = :thread AND name = :name")
_ADD = Sql(
    """INSERT INTO pin (tenant, thread, name, tree, record, at) VALUES (:tenant, :thread, :name, :tree, :record, :at)
    ON CONFLICT (tenant, thread, name) DO NOTHING"""
)


def add_pin(tenant: int, thread: str, number: int, name: str, record: int | None, at: int) -> Program[PinRow]:
    """Pin a record of a thread, or its head. The same pin again is the same pin; another record is refused."""
    row = yield from find_thread(tenant, thread, number, lock=True)
    record = row.head if record is None else record
    found = (yield from read_live(tenant, row.tree, record)) if record is not None else None
    if found is None or not (yield from _has(tenant, row, found)):
        named = f"checkpoint {show_id(record)}" if record is not None else "checkpoint yet"
        other = "; it is one of another thread, which shares history with this one" if found is not None else ""
        raise NotFound(f"thread {thread!r} has no {named}: nothing was pinned{other}")
    this = {"tenant": tenant, "thread": row.thread, "name": name}
    _, rows = yield Batch(_ADD(**this, tree=row.tree, record=found.id, at=at), _NAMED(**this))
    pin = PinRow._make(rows[0])
    if pin.record != found.id:
        raise UsageError(
            f"pin {name!r} of thread {thread!r} holds checkpoint {show_id(pin.record)}: unpin it first, or choose "
            "another name"
        )
    return pin


def _has(tenant: int, row: ThreadRow, record: Record) -> Generator[Batch, list[Rows], bool]:
    """Whether a record is on one of a thread's lines, or was when it was pinned. The whole tree is read only if that is
    in question."""
    if record.id == row.head or record.thread == row.thread:
        return True
    pins = yield from pins_in(tenant, row.tree)
    if any(pin.thread == row.thread and pin.record == record.id for pin in pins):
        return True  # a prune may have cut the line before it since
    nodes = yield from nodes_of(tenant, row.tree)
    return record.id in reached_by(nodes, row, (yield from labels_in(tenant, [row.thread])))
