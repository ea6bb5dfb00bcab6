"""Large results, stored outside the journal, once per tenant, under the hash of their content."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from blake3 import blake3

from perdure.errors import JournalDamaged
from perdure.runs.journal.entries import Entry
from perdure.runs.tables import BLOB_BODY
from perdure.storage.program import Batch, ConstraintFailed, Flow, Program, Sql, Statement, change

BLOB_MIN_BYTES = 64 * 1024
_PAGE = 100
_HASH_BYTES = 20
_INSERT = "INSERT INTO blob (tenant, hash, body) VALUES (:tenant, :hash, :body) ON CONFLICT (tenant, hash) DO "
# On PostgreSQL the update locks an existing blob, so that no sweep removes it before the reference is written.
_ADD = Sql(sqlite=_INSERT + "NOTHING", postgres=_INSERT + "UPDATE SET hash = excluded.hash", seals={"body": BLOB_BODY})
_REFER = Sql(
    """INSERT INTO run_blob (tenant, run, hash) VALUES (:tenant, :run, :hash)
    ON CONFLICT (tenant, run, hash) DO NOTHING"""
)
_DROP_LOOSE = Sql(
    """DELETE FROM blob WHERE tenant = :tenant AND hash IN (
        SELECT b.hash FROM blob b WHERE b.tenant = :tenant AND NOT EXISTS (
            SELECT 1 FROM run_blob u WHERE u.tenant = b.tenant AND u.hash = b.hash) LIMIT :limit) RETURNING hash"""
)
_SIZE = Sql("SELECT length(body) FROM blob WHERE tenant = :tenant AND hash = :hash")
_READ = Sql("SELECT body FROM blob WHERE tenant = :tenant AND hash = :hash", opens={0: BLOB_BODY}, tolerant=True)


def blob_hash(body: bytes) -> bytes:
    return blake3(body).digest(_HASH_BYTES)


def out_of_line(entry: Entry) -> Entry:
    """Return the entry with the hash of its blob in place of its value."""
    assert entry.value is not None
    return msgspec.structs.replace(entry, value=None, extra={**(entry.extra or {}), "blob": blob_hash(entry.value)})


def blob_statements(tenant: int, run: int, body: bytes) -> list[Statement]:
    """Return the statements that store a blob, unless it exists, and the run's reference to it."""
    key = blob_hash(body)
    return [_ADD(tenant=tenant, hash=key, body=body), _REFER(tenant=tenant, run=run, hash=key)]


def read_blob(tenant: int, key: bytes) -> Program[bytes]:
    """Return a blob, checked against its hash. Raises JournalDamaged."""
    [rows] = yield Batch(_READ(tenant=tenant, hash=key), last=True)
    if not rows or type(rows[0][0]) is not bytes or blob_hash(rows[0][0]) != key:
        raise JournalDamaged(
            f"the large result {key.hex()} is {'damaged' if rows else 'gone'}; restore it from a backup"
        )
    return bytes(rows[0][0])


def blob_sizes(tenant: int, keys: Sequence[bytes]) -> Program[dict[bytes, int]]:
    """Return the sizes of blobs in bytes, without reading them."""
    sizes: dict[bytes, int] = {}
    for start in range(0, len(keys), _PAGE):
        some = keys[start : start + _PAGE]
        answers = yield Batch(*(_SIZE(tenant=tenant, hash=key) for key in some))
        sizes |= {key: rows[0][0] for key, rows in zip(some, answers, strict=True) if rows}
    return sizes


def refer_statement(tenant: int, run: int, key: bytes) -> Statement:
    """Return the statement that stores a run's reference to an existing blob."""
    return _REFER(tenant=tenant, run=run, hash=key)


def drop_loose_blobs(tenant: int) -> Flow[None]:
    try:
        while len((yield from change(_DROP_LOOSE(tenant=tenant, limit=_PAGE)))) == _PAGE:
            pass
    except ConstraintFailed:
        return  # a run has just referred to one of them: the next sweep looks again
