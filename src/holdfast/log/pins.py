"""Pins: checkpoints that no retention removes, each with a name of its own in its thread. Erasing removes them.

A pin holds one record. What its state is built on moves as anywhere else, so that the history before it may go.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from holdfast.errors import NotFound, Pinned, UsageError
from holdfast.log.branches import find_thread
from holdfast.log.ids import show_id
from holdfast.log.reading import read_live
from holdfast.storage.program import Batch, Program, Rows, Sql

_COLUMNS = "thread, name, record, at"
_IN_TREE = Sql(f"SELECT {_COLUMNS} FROM pin WHERE tenant = :tenant AND tree = :tree ORDER BY thread, name")
_OF_THREAD = Sql(f"SELECT {_COLUMNS} FROM pin WHERE tenant = :tenant AND thread = :thread ORDER BY at, name")
_NAMED = Sql(f"SELECT {_COLUMNS} FROM pin WHERE tenant = :tenant AND thread = :thread AND name = :name")
_ADD = Sql(
    """INSERT INTO pin (tenant, thread, name, tree, record, at) VALUES (:tenant, :thread, :name, :tree, :record, :at)
    ON CONFLICT (tenant, thread, name) DO NOTHING"""
)
_DROP = Sql("DELETE FROM pin WHERE tenant = :tenant AND thread = :thread AND name = :name RETURNING name")
_DROP_RECORD = Sql("DELETE FROM pin WHERE tenant = :tenant AND tree = :tree AND record = :record")
_DROP_RECORDS_OF = Sql(
    """DELETE FROM pin WHERE tenant = :tenant AND tree = :tree AND record IN (
        SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread)"""
)


class PinRow(NamedTuple):
    """A row of table pin."""

    thread: int
    name: str
    record: int
    at: int


def pins_in(tenant: int, tree: int) -> Generator[Batch, list[Rows], list[PinRow]]:
    """All pins of a tree's threads."""
    [rows] = yield Batch(_IN_TREE(tenant=tenant, tree=tree))
    return [PinRow._make(row) for row in rows]


def pins_of(tenant: int, thread: int) -> Program[list[PinRow]]:
    """The pins of a thread, oldest first."""
    [rows] = yield Batch(_OF_THREAD(tenant=tenant, thread=thread), last=True)
    return [PinRow._make(row) for row in rows]


def add_pin(tenant: int, thread: str, number: int, name: str, record: int | None, at: int) -> Program[PinRow]:
    """Pin a record of a thread, or its head. The same pin again is the same pin; another record is refused."""
    row = yield from find_thread(tenant, thread, number, lock=True)
    record = row.head if record is None else record
    found = (yield from read_live(tenant, row.tree, record)) if record is not None else None
    if found is None:
        named = f"checkpoint {show_id(record)}" if record is not None else "checkpoint yet"
        raise NotFound(f"thread {thread!r} has no {named}: nothing was pinned")
    this = {"tenant": tenant, "thread": row.thread, "name": name}
    _, rows = yield Batch(_ADD(**this, tree=row.tree, record=found.id, at=at), _NAMED(**this))
    pin = PinRow._make(rows[0])
    if pin.record != found.id:
        raise UsageError(
            f"pin {name!r} of thread {thread!r} holds checkpoint {show_id(pin.record)}: unpin it first, or choose "
            "another name"
        )
    return pin


def drop_pin(tenant: int, thread: int, name: str) -> Program[bool]:
    """Remove a pin. False: there is none of this name."""
    [rows] = yield Batch(_DROP(tenant=tenant, thread=thread, name=name), last=True)
    return bool(rows)


def drop_pins_on(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    """Remove every pin on a record."""
    yield Batch(_DROP_RECORD(tenant=tenant, tree=tree, record=record))


def drop_pins_on_records_of(tenant: int, tree: int, thread: int) -> Generator[Batch, list[Rows], None]:
    """Remove every pin on a record that a thread owns, whichever thread of the tree has made it."""
    yield Batch(_DROP_RECORDS_OF(tenant=tenant, tree=tree, thread=thread))


def pinned(name: str, pins: list[str]) -> Pinned:
    """The error for a thread that is not deleted because of its pins."""
    some = ", ".join(repr(pin) for pin in pins[:5]) + (", …" if len(pins) > 5 else "")
    return Pinned(
        f"thread {name!r} has pinned checkpoints ({some}): nothing was deleted; unpin them first, or delete it with "
        "force=True (`holdfast delete --force`)"
    )
