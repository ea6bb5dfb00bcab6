"""A record: its columns, and the hash that covers what it says.

The hash chains meaning: parent's hash, id, kind, time, note, metadata, step and the content's salted hash. Moving a
base, re-keyframing or encrypting changes no hash. Loading a state checks it, `verify` checks every record.
A list of checkpoints shows note and metadata as they are stored: without the content their hash cannot be checked.
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
from perdure.storage.program import Sql

NO_HASH = bytes(32)  # the parent's hash of a first record
SALT_BYTES = 16
# In column keyframe of a tombstone: it was erased, and the history continues behind it. Behind others it has ended.
ERASED = 2
NUMBER_MAX = 1 << 61
_NAMES = [column.name for column in RECORD.columns]
COLUMNS = ", ".join(_NAMES)
R_COLUMNS = ", ".join(f"r.{name}" for name in _NAMES)  # the same, of a record named r
_pack = msgspec.msgpack.Encoder().encode
# What is secret of a row that was selected as COLUMNS has it, and of one that is written.
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
    body: int | None


new_record: Callable[[type[Record], tuple[Any, ...]], Record] = tuple.__new__  # what Record(…) does, without a call


_SHAPES = set(product(*(column.python_types for column in RECORD.columns)))  # what the types of a row can be


def _in_bounds(record: Record) -> bool:
    """Whether the numbers that others are computed from leave room for that."""
    return (
        0 <= record.id <= ID_MAX - ROOM
        and 0 <= record.step <= NUMBER_MAX
        and (record.body is None or 0 <= record.body <= NUMBER_MAX)
    )


def record_of(row: tuple[Any, ...]) -> Record:
    """A record from a row that selected COLUMNS. Raises Damaged for one whose columns are not even of their types."""
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
    """Return the hash of a record: over what it says and, through its parent's hash, over everything before it."""
    return blake3(parent_hash + content + _pack((record, kind, at, step, note, metadata))).digest()


def hash_holds(record: Record, parent_hash: bytes, content: bytes) -> bool:
    """Return whether a record says what it said when it was saved. `content` is the digest of its state."""
    said = (record.id, record.kind, record.at, record.step, record.note, record.metadata)
    return chain_hash(parent_hash, *said, content) == record.hash


# In a recursive query: `needed` is all that a thread is made of, whichever thread has written it. What a fork wrote is
# found by an index; the first thread of a tree has none, because its saves would pay for it.
RECORDS_OF_THREAD = """needed (id) AS (
    SELECT id FROM record WHERE tenant = :tenant AND thread = :thread AND thread <> tree AND tree = :tree
    UNION SELECT id FROM record WHERE CAST(:thread AS bigint) = CAST(:tree AS bigint)
        AND tenant = :tenant AND tree = :tree AND thread = :thread
    UNION SELECT head FROM thread WHERE tenant = :tenant AND thread = :thread
    UNION SELECT origin FROM thread WHERE tenant = :tenant AND thread = :thread
    UNION SELECT record FROM label WHERE tenant = :tenant AND thread = :thread
    UNION SELECT record FROM pin WHERE tenant = :tenant AND thread = :thread
    UNION SELECT base FROM write WHERE tenant = :tenant AND thread = :thread
    UNION SELECT CASE way.n WHEN 0 THEN r.parent WHEN 1 THEN r.base ELSE r.key END
        FROM needed CROSS JOIN record r
        CROSS JOIN (SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2) way
        WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = needed.id)"""


def each(text: str, **options: Any) -> Sql:
    """Return a statement on many rows, whose numbers (`{ids}`) are given as JSON: one is faster than hundreds."""
    return Sql(
        sqlite=text.format(ids="SELECT value FROM json_each(:ids)"),
        postgres=text.format(ids="SELECT v::bigint FROM json_array_elements_text(:ids::json) v"),
        **options,
    )
