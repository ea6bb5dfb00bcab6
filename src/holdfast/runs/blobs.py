"""Large results, stored once per tenant under the hash of what they say, beside the journal."""

from __future__ import annotations

import msgspec
from blake3 import blake3

from holdfast.errors import JournalDamaged
from holdfast.runs.entries import Entry
from holdfast.storage.program import Batch, Program, Sql, Statement

BLOB_MIN_BYTES = 64 * 1024
_HASH_BYTES = 20
_INSERT = "INSERT INTO blob (tenant, hash, body) VALUES (:tenant, :hash, :body) ON CONFLICT (tenant, hash) DO "
# PostgreSQL: one that is there already is locked, so that a sweep cannot remove it before the reference is written.
_ADD = Sql(sqlite=_INSERT + "NOTHING", postgres=_INSERT + "UPDATE SET hash = excluded.hash")
_REFER = Sql(
    """INSERT INTO run_blob (tenant, run, hash) VALUES (:tenant, :run, :hash)
    ON CONFLICT (tenant, run, hash) DO NOTHING"""
)
_READ = Sql("SELECT body FROM blob WHERE tenant = :tenant AND hash = :hash")


def _hash(body: bytes) -> bytes:
    return blake3(body).digest(_HASH_BYTES)


def out_of_line(entry: Entry) -> Entry:
    """The entry with a reference in place of its value."""
    assert entry.value is not None
    return msgspec.structs.replace(entry, value=None, more={**(entry.more or {}), "blob": _hash(entry.value)})


def blob_statements(tenant: int, run: int, body: bytes) -> list[Statement]:
    """What stores a blob, if it is not there, and says that a run needs it."""
    key = _hash(body)
    return [_ADD(tenant=tenant, hash=key, body=body), _REFER(tenant=tenant, run=run, hash=key)]


def read_blob(tenant: int, key: bytes) -> Program[bytes]:
    """A blob, checked against its hash. Raises JournalDamaged."""
    [rows] = yield Batch(_READ(tenant=tenant, hash=key), last=True)
    if not rows or _hash(rows[0][0]) != key:
        raise JournalDamaged(
            f"the large result {key.hex()} is {'damaged' if rows else 'gone'}; restore it from a backup"
        )
    return bytes(rows[0][0])


def refer_statement(tenant: int, run: int, key: bytes) -> Statement:
    """What says that a run needs a blob that is there."""
    return _REFER(tenant=tenant, run=run, hash=key)
