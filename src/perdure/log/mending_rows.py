"""What can be used of a damaged row of the log: its hash must prove what is left. Pure."""

from __future__ import annotations

from typing import Any

from perdure.errors import Damaged
from perdure.log.ids import ID_MAX
from perdure.log.records import NUMBER_MAX, Record, record_of


def _sound(row: tuple[Any, ...]) -> Record | None:
    try:
        return record_of(row)
    except Damaged:
        return None


def _number(value: object, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value <= NUMBER_MAX else otherwise


def sane_of(row: tuple[Any, ...]) -> Record | None:
    """A row that cannot be used, made usable where only columns are odd that its content does not need: its hash will
    tell whether that was all. None: not even that."""
    record = Record._make(row)
    if type(record.body) is not int or type(record.id) is not int or type(record.hash) is not bytes:
        return None
    parent, base = (
        value if type(value) is int and 0 <= value <= ID_MAX else None for value in (record.parent, record.base)
    )
    note, metadata = (value if type(value) is str else None for value in (record.note, record.metadata))
    return _sound(
        record._replace(
            thread=_number(record.thread, _number(record.tree)),
            keyframe=record.keyframe if record.keyframe in (0, 1) else 0,
            key=record.key if type(record.key) is int and 0 <= record.key <= ID_MAX else record.id,
            kind=record.kind if type(record.kind) is str else "",
            at=_number(record.at),
            step=_number(record.step),
            size=_number(record.size),
            cost=_number(record.cost),
            stamp=_number(record.stamp),
            parent=parent,
            base=base,
            note=note,
            metadata=metadata,
        )
    )


def tombstone_of(row: tuple[Any, ...]) -> Record | None:
    """What can stay of a row whose content is lost: enough for its children's hashes. None: not even that."""
    record = Record._make(row)
    if type(record.hash) is not bytes or len(record.hash) != 32 or type(record.id) is not int:
        return None
    parent = record.parent if type(record.parent) is int and 0 <= record.parent < record.id else None
    return _sound(
        record._replace(
            thread=_number(record.thread, _number(record.tree)),
            parent=parent,
            base=None,
            keyframe=2,  # ERASED: the history goes on behind it
            key=record.id,
            kind=record.kind if type(record.kind) is str else "",
            at=_number(record.at),
            step=_number(record.step),
            note=None,
            metadata=None,
            size=0,
            cost=0,
            body=None,
            stamp=_number(record.stamp),
        )
    )
