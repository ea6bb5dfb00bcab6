"""The part of a save's transaction that concerns large values: the record refers to them, and none was removed."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from perdure.storage.program import Batch, Rows, Sql

IS_THERE = "tenant = :tenant AND hash = :hash AND gone_at IS NULL"
_USE = Sql(
    """INSERT INTO external_use (tenant, tree, hash, first, last) VALUES (:tenant, :tree, :hash, :record, :record)
    ON CONFLICT (tenant, tree, hash) DO UPDATE SET
        first = CASE WHEN external_use.first < excluded.first THEN external_use.first ELSE excluded.first END,
        last = CASE WHEN external_use.last > excluded.last THEN external_use.last ELSE excluded.last END"""
)
_WRITTEN = Sql(f"UPDATE external SET at = {{now}}, is_written = 1 WHERE {IS_THERE} RETURNING 1")
# As the encoder writes it. In a text that is a value, the quotation marks are escaped.
_MARK = b'"perdure.External"'
_REFERENCE = re.compile(rb'"perdure\.External",1,\["([0-9a-f]{64})",\d+\]')


def keys_in(text: bytes) -> list[bytes]:
    """Return the hashes of the values that a state refers to."""
    if _MARK not in text:
        return []
    return sorted({bytes.fromhex(digits.decode()) for digits in _REFERENCE.findall(text)})


def refer(tenant: int, tree: int, record: int, keys: Sequence[bytes], now: int) -> Generator[Batch, list[Rows], bool]:
    """Write that a record refers to values. Return False if one of them was retired: nothing may be committed then."""
    for key in keys:  # in one order, so that two saves cannot deadlock
        _, there = yield Batch(
            _USE(tenant=tenant, tree=tree, hash=key, record=record), _WRITTEN(tenant=tenant, hash=key, now=now)
        )
        if not there:
            return False
    return True
