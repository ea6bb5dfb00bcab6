"""The part of a transaction that concerns large values: what it writes refers to them, and none was removed.

A use is a row of a table that declares `holds_values`. It is written with the text that refers to the value, after the
value's own row was locked: collection (`externals.collect`) locks that row first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from perdure.log.ids import first_id
from perdure.storage.program import Batch, Rows, Sql, Statement

IS_THERE = "tenant = :tenant AND hash = :hash AND gone_at IS NULL"
_USE = Sql(
    """INSERT INTO external_use (tenant, tree, hash, first, last) VALUES (:tenant, :tree, :hash, :first, :last)
    ON CONFLICT (tenant, tree, hash) DO UPDATE SET
        first = CASE WHEN external_use.first < excluded.first THEN external_use.first ELSE excluded.first END,
        last = CASE WHEN external_use.last > excluded.last THEN external_use.last ELSE excluded.last END"""
)
_LOCK = Sql(f"UPDATE external SET at = {{now}} WHERE {IS_THERE} RETURNING 1")
# As the encoder writes it. It escapes quotation marks in strings, and writes a dict that looks like a tag as pairs: so
# no value of another kind has this text.
_MARK = b'{"^obj":["perdure.External",'
_REFERENCE = re.compile(rb'\{"\^obj":\["perdure\.External",1,\["([0-9a-f]{64})",\d+\]\]\}')


HOUR_US = 3_600_000_000


class Retired(Exception):
    """Raised to roll back a transaction that refers to a value which was retired since it was stored."""


def keys_in(text: bytes) -> list[bytes]:
    """Return the hashes of the values that a text refers to."""
    if _MARK not in text:
        return []
    return sorted({bytes.fromhex(digits.decode()) for digits in _REFERENCE.findall(text)})


Writes = Generator[Batch, list[Rows], None]


def refer(tenant: int, tree: int, record: int, keys: Sequence[bytes], now: int) -> Writes:
    """Write that a record refers to values. Raises Retired."""
    yield from use_each(tenant, keys, now, lambda key: _use(tenant, tree, key, record, record))


def refer_later(tenant: int, tree: int, keys: Sequence[bytes], now: int) -> Writes:
    """Write that a record which is not there yet, but within an hour, will refer to values. Raises Retired."""
    first, last = first_id(now), first_id(now + HOUR_US)
    yield from use_each(tenant, keys, now, lambda key: _use(tenant, tree, key, first, last))


def _use(tenant: int, tree: int, key: bytes, first: int, last: int) -> Statement:
    return _USE(tenant=tenant, tree=tree, hash=key, first=first, last=last)


def use_each(tenant: int, keys: Sequence[bytes], now: int, use: Callable[[bytes], Statement]) -> Writes:
    """Lock values, and write a use of each. Raises Retired."""
    for key in sorted(keys):  # in one order, so that two writers cannot deadlock
        there, _ = yield Batch(_LOCK(tenant=tenant, hash=key, now=now), use(key))
        if not there:
            raise Retired
