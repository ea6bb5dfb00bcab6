"""Rows that repair takes out of use: kept as they are, in a table, by the transaction that removes or changes them.

So no crash can lose them. What is encrypted stays so: a row is kept as it is stored.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Generator, Mapping
from functools import cache
from typing import Any

import orjson
from blake3 import blake3

from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Rows, Sql, Statement

_KEY_MAX = 400  # of a key as text; PostgreSQL's indexes have a limit
_ADD = Sql(
    """INSERT INTO quarantine (tenant, kind, key, reason, content) VALUES (:tenant, :kind, :key, :reason, :content)
    ON CONFLICT (tenant, kind, key) DO NOTHING"""
)


def plain(value: Any) -> Any:
    """A value of a row, as JSON has it: bytes in base 64, whatever else is odd as text."""
    if isinstance(value, bytes):
        return {"base64": b64encode(value).decode()}
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def as_json(values: Mapping[str, Any]) -> str:
    return orjson.dumps({name: plain(value) for name, value in values.items()}, default=repr).decode()


def keep(tenant: int, kind: str, key: Mapping[str, Any], reason: str, row: Mapping[str, Any]) -> Statement:
    """A statement that keeps one row."""
    text = as_json(key)
    if len(text) > _KEY_MAX:
        text = text[:_KEY_MAX] + "#" + blake3(text.encode()).hexdigest()
    return _ADD(tenant=tenant, kind=kind, key=text, reason=reason, content=as_json(row))


@cache
def _statements(table: str) -> tuple[Sql, Sql]:
    """What reads a row of a table by its key, and what removes it."""
    owned = owned_tables()[table]
    where = " AND ".join(["tenant = :tenant", *(f"{name} = :k_{name}" for name in owned.key)])
    return (
        Sql(f"SELECT {', '.join(owned.columns)} FROM {table} WHERE {where}"),
        Sql(f"DELETE FROM {table} WHERE {where}"),
    )


def set_aside(
    tenant: int, table: str, key: tuple[Any, ...], reason: str, *, drop: bool
) -> Generator[Batch, list[Rows], bool]:
    """Keep a row as it is stored and, with `drop`, remove it. False: there is none."""
    owned, (select, delete) = owned_tables()[table], _statements(table)
    params = {f"k_{name}": value for name, value in zip(owned.key, key, strict=True)}
    [rows] = yield Batch(select(tenant=tenant, **params))
    if not rows:
        return False
    named = dict(zip(owned.key, key, strict=True))
    statements = [keep(tenant, table, named, reason, dict(zip(owned.columns, row, strict=True))) for row in rows]
    if drop:
        statements.append(delete(tenant=tenant, **params))
    yield Batch(*statements)
    return True
