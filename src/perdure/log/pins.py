"""Pins: named checkpoints of a thread that no retention removes. Only erasing does.

A pin holds one record, not the history before it. If that is removed, the pinned record is encoded again.
"""

from __future__ import annotations

from perdure.errors import NotFound, Pinned, UsageError
from perdure.log.gc_plan import PinRow, has_record
from perdure.log.ids import show_id
from perdure.log.reading import read_live
from perdure.log.thread_table import ThreadRow, find_thread
from perdure.storage.program import Batch, Program, Sql

_COLUMNS = "thread, name, record, at"
_OF_THREAD = Sql(f"SELECT {_COLUMNS} FROM pin WHERE tenant = :tenant AND thread = :thread ORDER BY at, name")
_NAMED = Sql(f"SELECT {_COLUMNS} FROM pin WHERE tenant = :tenant AND thread = :thread AND name = :name")
_ADD = Sql(
    """INSERT INTO pin (tenant, thread, name, tree, record, at) VALUES (:tenant, :thread, :name, :tree, :record, :at)
    ON CONFLICT (tenant, thread, name) DO NOTHING"""
)
DROP = Sql("DELETE FROM pin WHERE tenant = :tenant AND thread = :thread AND name = :name RETURNING name")


def add_pin(tenant: int, thread: str, number: int, name: str, record: int | None, at: int) -> Program[PinRow]:
    """Pin a record of a thread, or its head if `record` is None. Pinning the same record again changes nothing.

    Raise UsageError if the name holds another record, and NotFound if the thread has no such record."""
    row = yield from find_thread(tenant, thread, number, lock=True)
    record = row.head if record is None else record
    pinned = (yield from read_live(tenant, row.tree, record)) if record is not None else None
    if pinned is None or not (yield from has_record(tenant, row, pinned)):
        named = f"checkpoint {show_id(record)}" if record is not None else "checkpoint yet"
        other = "; it is one of another thread, which shares history with this one" if pinned is not None else ""
        raise NotFound(f"thread {thread!r} has no {named}: nothing was pinned{other}")
    key = {"tenant": tenant, "thread": row.thread, "name": name}
    _, rows = yield Batch(_ADD(**key, tree=row.tree, record=pinned.id, at=at), _NAMED(**key))
    pin = PinRow._make(rows[0])
    if pin.record != pinned.id:
        raise UsageError(
            f"pin {name!r} of thread {thread!r} holds checkpoint {show_id(pin.record)}: unpin it first, or choose "
            "another name"
        )
    return pin


def pins_of(tenant: int, thread: int) -> Program[list[PinRow]]:
    [rows] = yield Batch(_OF_THREAD(tenant=tenant, thread=thread))
    return [PinRow._make(row) for row in rows]


def refuse_pinned(tenant: int, row: ThreadRow) -> Program[None]:
    """Raise Pinned if a thread that is to be deleted has pins."""
    pins = [pin.name for pin in (yield from pins_of(tenant, row.thread))]
    if pins:
        some = ", ".join(map(repr, pins[:5])) + (", …" if len(pins) > 5 else "")
        raise Pinned(
            f"thread {row.name!r} has pinned checkpoints ({some}): nothing was deleted; unpin them first, or delete it "
            "with force=True (`perdure thread delete --force`)"
        )
