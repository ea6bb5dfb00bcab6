"""The hash that a stored value ends with, so that one that was changed, or moved to another row, is never believed.

It covers the value and what identifies its row: tenant, table, column and key. A statement names such columns in
`seals` and `opens`. In an encrypted store the hash is inside of what is encrypted. Values with a hash elsewhere have
none here: states, notes and metadata of checkpoints, and large results.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from perdure.errors import Damaged
from perdure.storage.columns import UNREADABLE, EncryptedColumn

if TYPE_CHECKING:
    from perdure.storage.program import Rows, Sql

HASH_BYTES = 16
_TEXT_CHARS = 22  # of base 64 without its padding
_pack = msgspec.msgpack.Encoder().encode


def with_hash(column: EncryptedColumn, tenant: int, by: tuple[Any, ...], value: Any) -> Any:
    """Return a value with its hash, as it is stored."""
    if column.kind == "text":
        return value + _text_hash(column, tenant, by, value.encode())
    return value + blake3(_pack((tenant, column.label, *by)) + value).digest(HASH_BYTES)  # `_hash`, without the call


def without_hash(column: EncryptedColumn, tenant: int, by: tuple[Any, ...], stored: Any) -> Any:
    """Return the value of a row without its hash. Raises Damaged if it is not the one that was stored there."""
    try:
        if column.kind == "text":
            value, stored_hash = stored[:-_TEXT_CHARS], stored[-_TEXT_CHARS:]
            holds = stored_hash == _text_hash(column, tenant, by, value.encode())
        else:
            value, stored_hash = stored[:-HASH_BYTES], stored[-HASH_BYTES:]
            holds = stored_hash == _hash(column, tenant, by, value)
    except (TypeError, AttributeError, UnicodeError):  # SQLite lets a column hold anything
        holds = False
    if not holds:
        raise Damaged(
            f"a value in {column.label} was changed, or belongs to another row: run `perdure store verify`, "
            "and restore it from a backup"
        )
    return value


def check_rows(sql: Sql, params: Mapping[str, Any], rows: Rows) -> Rows:
    """Return the rows of a statement with their values without hashes.

    Raises Damaged for a value that fails its check. In a statement that is `tolerant`, it becomes UNREADABLE.
    """
    table = [list(row) for row in rows]
    for index, column in sql.checks:
        for row in table:
            if row[index] is not None and row[index] is not UNREADABLE:
                by = tuple([row[at] if isinstance(at, int) else params[at] for at in column.by])
                try:
                    row[index] = without_hash(column, params["tenant"], by, row[index])
                except Damaged:
                    if not sql.tolerant:
                        raise
                    row[index] = UNREADABLE
    return [tuple(row) for row in table]


def _hash(column: EncryptedColumn, tenant: int, by: tuple[Any, ...], value: bytes) -> bytes:
    return blake3(_pack((tenant, column.label, *by)) + value).digest(HASH_BYTES)


def _text_hash(column: EncryptedColumn, tenant: int, by: tuple[Any, ...], value: bytes) -> str:
    return b2a_base64(_hash(column, tenant, by, value), newline=False).decode()[:_TEXT_CHARS]
