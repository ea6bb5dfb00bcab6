"""What a damaged row of the log was before, as far as its checksum tells. Pure.

A row's checksum is the CRC-32 of its columns, plus two numbers. If one byte or one bit has changed, what it was can be
computed. Several changes cannot be undone so; then the hash of the record must prove what is left.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from perdure.errors import Damaged
from perdure.log.ids import ID_MAX
from perdure.log.records import NUMBER_MAX, Record, columns_checksum, record_of
from perdure.values.mending import one_byte_off

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Any]).decode
_COVERED = 15  # columns that the CRC covers, beside the tenant
_INTEGERS = [
    at
    for at, name in enumerate(("tenant", *Record._fields[:_COVERED]))
    if name not in ("kind", "note", "metadata", "hash")
]
_BITS = 63
_AT = {name: at for at, name in enumerate(("tenant", *Record._fields[:_COVERED]))}


def restored_rows(tenant: int, row: tuple[Any, ...]) -> Iterator[tuple[int, Record]]:
    """Rows that this one may have been, each with its tenant: those that fit the checksum and differ in one place."""
    columns, (checksum, body, stamp) = (tenant, *row[:_COVERED]), row[_COVERED:]
    if type(checksum) is not int or type(stamp) is not int or not (body is None or type(body) is int):
        return
    wanted = checksum - (body or 0) - stamp
    if not 0 <= wanted < 1 << 32:
        return
    for candidate in _one_change(columns, wanted):
        record = _sound((*candidate[1:], checksum, body, stamp))
        if record is not None and type(candidate[0]) is int:
            yield candidate[0], record


def _one_change(columns: tuple[Any, ...], wanted: int) -> Iterator[tuple[Any, ...]]:
    try:
        packed = _pack(columns)
    except (TypeError, OverflowError, ValueError):
        return
    for changed in one_byte_off(packed, wanted):
        try:
            values = _unpack(changed)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if len(values) == len(columns):
            yield tuple(values)
    for at, other in _likely(columns):
        candidate = (*columns[:at], other, *columns[at + 1 :])
        if zlib.crc32(_pack(candidate)) == wanted:
            yield candidate
    for at in _INTEGERS:
        value = columns[at]
        if type(value) is not int:
            continue
        # A number of another length is more than one byte when it is packed.
        for other in (*(value ^ 1 << bit for bit in range(_BITS)), value ^ -(1 << 63)):
            if -(1 << 63) <= other < 1 << 63:
                candidate = (*columns[:at], other, *columns[at + 1 :])
                if zlib.crc32(_pack(candidate)) == wanted:
                    yield candidate


def _likely(columns: tuple[Any, ...]) -> Iterator[tuple[int, Any]]:
    """What columns mostly are, if they are damaged beyond one byte: pointers are often the same, flags are few."""
    pointers = [_AT[name] for name in ("id", "parent", "base", "key")]
    for at in pointers:
        for value in {columns[other] for other in pointers if type(columns[other]) is int} | {None}:
            yield at, value
    yield from ((_AT["thread"], columns[_AT["tree"]]), *((_AT["keyframe"], flag) for flag in (0, 1, 2)))
    yield from ((_AT[name], None) for name in ("note", "metadata"))


def body_by_checksum(tenant: int, record: Record) -> int | None:
    """The number of the body that a row pointed at, if nothing but that has changed."""
    found = record.checksum - columns_checksum(tenant, record[:_COVERED]) - record.stamp
    return found if found not in (0, record.body) and -NUMBER_MAX <= found <= NUMBER_MAX else None


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
            checksum=0,
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
            checksum=0,
            body=None,
            stamp=_number(record.stamp),
        )
    )
