"""Pins: checkpoints that no retention removes, each with a name of its own in its thread. Erasing removes them.

A pin holds one record. What its state is built on moves as anywhere else, so that the history before it may go.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from perdure.errors import Pinned
from perdure.storage.program import Batch, Program, Rows, Sql

PIN_COLUMNS = "thread, name, record, at"
_IN_TREE = Sql(f"SELECT {PIN_COLUMNS} FROM pin WHERE tenant = :tenant AND tree = :tree ORDER BY thread, name")
_OF_THREAD = Sql(f"SELECT {PIN_COLUMNS} FROM pin WHERE tenant = :tenant AND thread = :thread ORDER BY at, name")
_DROP = Sql("DELETE FROM pin WHERE tenant = :tenant AND thread = :thread AND name = :name RETURNING name")
_DROP_RECORD = Sql("DELETE FROM pin WHERE tenant = :tenant AND tree = :tree AND record = :record")


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


def drop_pin(tenant: int, thread: int, name: str) -> Program[bool]:
    """Remove a pin. False: there is none of this name."""
    [rows] = yield Batch(_DROP(tenant=tenant, thread=thread, name=name), last=True)
    return bool(rows)


def drop_pins_on(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    """Remove every pin on a record."""
    yield Batch(_DROP_RECORD(tenant=tenant, tree=tree, record=record))


def pinned(name: str, pins: list[str]) -> Pinned:
    """The error for a thread that is not deleted because of its pins."""
    some = ", ".join(repr(pin) for pin in pins[:5]) + (", …" if len(pins) > 5 else "")
    return Pinned(
        f"thread {name!r} has pinned checkpoints ({some}): nothing was deleted; unpin them first, or delete it with "
        "force=True (`perdure thread delete --force`)"
    )
