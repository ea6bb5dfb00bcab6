"""A record: its columns, and the hash over its meaning.

The hash covers the parent's hash, id, kind, time, note, metadata, step and the content's salted hash. Moving a base,
writing another keyframe or encrypting changes no hash. Loading a state checks its hash, and `verify` checks every
record. A list of checkpoints shows note and metadata unchecked, because the hash cannot be checked without the content.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from perdure.errors import Damaged
from perdure.log.ids import ID_MAX, ROOM, show_id
from perdure.log.tables import DIFF, FULL_TEXT, RECORD, SALT

NO_HASH = bytes(32)  # the parent's hash for a record without a parent
SALT_BYTES = 16
# In column keyframe of a tombstone: the record was erased, and the history continues behind it. It ends at others.
ERASED = 2
NUMBER_MAX = 1 << 61
_NAMES = [column.name for column in RECORD.columns]
COLUMNS = ", ".join(_NAMES)
R_COLUMNS = ", ".join(f"r.{name}" for name in _NAMES)  # the same, for a table with the alias r
_pack = msgspec.msgpack.Encoder().encode
# The encrypted columns of a row selected as COLUMNS, and those of a row to write.
RECORD_ENCRYPTED = RECORD.opens(_NAMES)
RECORD_SEALS = RECORD.encrypted_columns
INSERT_SEALS = {**RECORD_SEALS, "salt": SALT, "diff": DIFF, "full_text": FULL_TEXT}  # with its body


class Record(NamedTuple):
    """One row of the log, in the order of its table's columns."""

    tree: int
    id: int
    thread: int
    parent: int | None
    base: int | None
    keyframe: int
    key: int
    kind: str
    at: int
    step: int
    note: str | None
    metadata: str | None
    size: int
    cost: int
    hash: bytes
    skip: int | None
    body: int | None


# For a record of which only some fields are known: `UNKNOWN._replace(…)`.
UNKNOWN = Record(0, 0, 0, None, None, 0, 0, "", 0, 0, None, None, 0, 0, b"", None, None)
new_record: Callable[[type[Record], tuple[Any, ...]], Record] = tuple.__new__  # Record(…) without a Python call


_SHAPES = set(product(*(column.python_types for column in RECORD.columns)))  # all valid combinations of types


def _in_bounds(record: Record) -> bool:
    """Return whether numbers can be added to id, step and body without an overflow."""
    return (
        0 <= record.id <= ID_MAX - ROOM
        and 0 <= record.step <= NUMBER_MAX
        and (record.body is None or 0 <= record.body <= NUMBER_MAX)
    )


def record_of(row: tuple[Any, ...]) -> Record:
    """Return the record of a row that selected COLUMNS. Raise Damaged if a value's type or range is wrong."""
    record = Record._make(row)
    if tuple(map(type, row)) not in _SHAPES or not _in_bounds(record):
        named = show_id(record.id) if type(record.id) is int and 0 <= record.id <= ID_MAX else repr(record.id)
        raise Damaged(f"the row of checkpoint {named} is damaged; run `perdure store verify`", checkpoints=(named,))
    return record


def chain_hash(
    parent_hash: bytes,
    record: int,
    kind: str,
    at: int,
    step: int,
    note: str | None,
    metadata: str | None,
    content: bytes,
) -> bytes:
    """Return the hash of a record. Through its parent's hash it covers everything before it."""
    return blake3(parent_hash + content + _pack((record, kind, at, step, note, metadata))).digest()


def hash_holds(record: Record, parent_hash: bytes, content: bytes) -> bool:
    """Return whether a record is unchanged since it was saved. `content`: the digest of its state."""
    said = (record.id, record.kind, record.at, record.step, record.note, record.metadata)
    return chain_hash(parent_hash, *said, content) == record.hash


# For a recursive query: `needed` has all records that a thread consists of, whichever thread wrote them. An index finds
# the records of a fork. The first thread of a tree has no such index, because each of its saves would pay for it.
# Subqueries instead of a join: at a snapshot `record` is a union, which SQLite would read whole at each step.
RECORDS_OF_THREAD = """needed (id) AS (
    SELECT id FROM record WHERE tenant = :tenant AND thread = :thread AND thread <> tree AND tree = :tree
    UNION SELECT id FROM record WHERE CAST(:thread AS bigint) = CAST(:tree AS bigint)
        AND tenant = :tenant AND tree = :tree AND thread = :thread
    UNION SELECT head FROM thread WHERE tenant = :tenant AND thread = :thread
    UNION SELECT origin FROM thread WHERE tenant = :tenant AND thread = :thread
    UNION SELECT record FROM label WHERE tenant = :tenant AND thread = :thread
    UNION SELECT record FROM pin WHERE tenant = :tenant AND thread = :thread
    UNION SELECT base FROM write WHERE tenant = :tenant AND thread = :thread
    UNION SELECT CASE way.n
        WHEN 0 THEN (SELECT r.parent FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = needed.id)
        WHEN 1 THEN (SELECT r.base FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = needed.id)
        ELSE (SELECT r.key FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = needed.id) END
        FROM needed CROSS JOIN (SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2) way)"""
