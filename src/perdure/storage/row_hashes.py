"""The hash that a stored value ends with, so that one that was changed, or moved to another row, is never believed.

It covers the value and what identifies its row: tenant, table, column and key (`cells.py`). A statement that names such
a cell in `seals` stores the value with its hash; one that names it in `opens` gets the value back only if the hash
holds. With encryption it stands inside of what is encrypted. What has a hash elsewhere has none here: states (the
record's hash) and large results (their name).
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from perdure.errors import Damaged
from perdure.storage.cells import UNREADABLE, Cell

if TYPE_CHECKING:
    from perdure.storage.program import Rows, Sql

HASH_BYTES = 16
_TEXT_CHARS = 22  # of base 64 without its padding
_pack = msgspec.msgpack.Encoder().encode


def with_hash(cell: Cell, tenant: int, by: tuple[Any, ...], value: Any) -> Any:
    """A value as it is stored."""
    if cell.sort == "text":
        return value + _text_hash(cell, tenant, by, value.encode())
    return value + _hash(cell, tenant, by, value)


def without_hash(cell: Cell, tenant: int, by: tuple[Any, ...], stored: Any) -> Any:
    """The value of a row, if it is the one that was stored there. Raises Damaged."""
    try:
        if cell.sort == "text":
            value, found = stored[:-_TEXT_CHARS], stored[-_TEXT_CHARS:]
            holds = found == _text_hash(cell, tenant, by, value.encode())
        else:
            value, found = stored[:-HASH_BYTES], stored[-HASH_BYTES:]
            holds = found == _hash(cell, tenant, by, value)
    except (TypeError, AttributeError, UnicodeError):  # SQLite lets a column hold anything
        holds = False
    if not holds:
        raise Damaged(
            f"a value in {cell.label} was changed, or belongs to another row: run `perdure store verify`, "
            "and restore it from a backup"
        )
    return value


def check_rows(sql: Sql, params: Mapping[str, Any], rows: Rows) -> Rows:
    """The rows of a statement with its values as they were stored. Raises Damaged; a statement that is `tolerant` gets
    something unreadable instead."""
    table = [list(row) for row in rows]
    for index, cell in sql.checks:
        for row in table:
            if row[index] is not None and row[index] is not UNREADABLE:
                by = tuple([row[at] if isinstance(at, int) else params[at] for at in cell.by])
                try:
                    row[index] = without_hash(cell, params["tenant"], by, row[index])
                except Damaged:
                    if not sql.tolerant:
                        raise
                    row[index] = UNREADABLE
    return [tuple(row) for row in table]


def _hash(cell: Cell, tenant: int, by: tuple[Any, ...], value: bytes) -> bytes:
    return blake3(_pack((tenant, cell.label, *by)) + value).digest(HASH_BYTES)


def _text_hash(cell: Cell, tenant: int, by: tuple[Any, ...], value: bytes) -> str:
    return b2a_base64(_hash(cell, tenant, by, value), newline=False).decode()[:_TEXT_CHARS]
