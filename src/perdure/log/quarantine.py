"""Rows that repair takes out of use: kept as they are, in a table, by the transaction that removes or changes them.

So no crash can lose them. When the repair is done they go to a file for people, and out of the table. What is encrypted
stays so: a row is kept as it is stored.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from perdure.storage.program import Batch, Program, Rows, Sql, Statement

_KEY_MAX = 400  # of a key as text; PostgreSQL's indexes have a limit
_ADD = Sql(
    """INSERT INTO quarantine (tenant, sort, key, reason, content) VALUES (:tenant, :sort, :key, :reason, :content)
    ON CONFLICT (tenant, sort, key) DO NOTHING"""
)
_PAGE = Sql(
    "SELECT tenant, sort, key, reason, content FROM quarantine ORDER BY tenant, sort, key LIMIT :limit",
)
_DROP = Sql("DELETE FROM quarantine WHERE tenant = :tenant AND sort = :sort AND key = :key")

# Columns of the tables that rows are taken from, the key first.
COLUMNS = {
    "thread": (
        *("thread", "tree", "name", "metadata", "origin", "generation", "head", "head_hash", "created_at"),
        *("updated_at", "active", "retention", "stamp"),
    ),
    "record": (
        *("tree", "id", "thread", "parent", "base", "keyframe", "key", "kind", "at", "step", "note", "metadata"),
        *("size", "cost", "hash", "body", "stamp"),
    ),
    "body": ("id", "salt", "diff", "full_text"),
    "pack": ("pack", "tree", "key", "first", "last", "data"),
    "label": ("thread", "space", "id", "record", "run"),
    "space": ("thread", "name", "space", "head"),
    "write": ("thread", "space", "id", "task", "idx", "channel", "path", "base", "value"),
    "pin": ("thread", "name", "tree", "record", "at"),
    "tag": ("thread", "key", "value"),
    "journal": ("run", "seq", "kind", "body", "stamp"),
    "run_value": ("run", "sort", "value"),
    "ask": ("run", "path", "sort", "question", "terms", "asked_at", "deadline", "status", "answer"),
    "answer": ("run", "path", "who", "value", "at"),
    "signal": ("run", "topic", "seq", "key", "value", "at", "received"),
    "run_blob": ("run", "hash"),
    "blob": ("hash", "body"),
}
KEYS = {
    "thread": ("thread",),
    "record": ("tree", "id"),
    "body": ("id",),
    "pack": ("pack",),
    "label": ("thread", "space", "id"),
    "space": ("thread", "name"),
    "write": ("thread", "space", "id", "task", "idx"),
    "pin": ("thread", "name"),
    "tag": ("key", "value", "thread"),
    "journal": ("run", "seq"),
    "run_value": ("run", "sort"),
    "ask": ("run", "path"),
    "answer": ("run", "path", "who"),
    "signal": ("run", "topic", "seq"),
    "run_blob": ("run", "hash"),
    "blob": ("hash",),
}
_SELECT = {
    table: Sql(
        f"SELECT {', '.join(columns)} FROM {table} WHERE tenant = :tenant AND "
        + " AND ".join(f"{name} = :k_{name}" for name in KEYS[table])
    )
    for table, columns in COLUMNS.items()
}
_DELETE = {
    table: Sql(
        f"DELETE FROM {table} WHERE tenant = :tenant AND " + " AND ".join(f"{name} = :k_{name}" for name in names)
    )
    for table, names in KEYS.items()
}


class Kept(NamedTuple):
    """A row of the table."""

    tenant: int
    sort: str
    key: str
    reason: str
    content: str


def plain(value: Any) -> Any:
    """A value of a row, as JSON has it: bytes in base 64, whatever else is odd as text."""
    if isinstance(value, bytes):
        return {"base64": b64encode(value).decode()}
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def as_json(values: Mapping[str, Any]) -> str:
    return orjson.dumps({name: plain(value) for name, value in values.items()}, default=repr).decode()


def keep(tenant: int, sort: str, key: Mapping[str, Any], reason: str, row: Mapping[str, Any]) -> Statement:
    """A statement that keeps one row."""
    text = as_json(key)
    if len(text) > _KEY_MAX:
        text = text[:_KEY_MAX] + "#" + blake3(text.encode()).hexdigest()
    return _ADD(tenant=tenant, sort=sort, key=text, reason=reason, content=as_json(row))


def _params(table: str, key: tuple[Any, ...]) -> dict[str, Any]:
    return {f"k_{name}": value for name, value in zip(KEYS[table], key, strict=True)}


def set_aside(
    tenant: int, table: str, key: tuple[Any, ...], reason: str, *, drop: bool
) -> Generator[Batch, list[Rows], bool]:
    """Keep a row as it is stored and, with `drop`, remove it. False: there is none."""
    params = _params(table, key)
    [rows] = yield Batch(_SELECT[table](tenant=tenant, **params))
    if not rows:
        return False
    named = dict(zip(KEYS[table], key, strict=True))
    statements = [keep(tenant, table, named, reason, dict(zip(COLUMNS[table], row, strict=True))) for row in rows]
    if drop:
        statements.append(_DELETE[table](tenant=tenant, **params))
    yield Batch(*statements)
    return True


def kept(limit: int) -> Program[list[Kept]]:
    """Some rows of the table, in order."""
    [rows] = yield Batch(_PAGE(limit=limit), last=True)
    return [Kept._make(row) for row in rows]


def drop(rows: list[Kept]) -> Program[None]:
    """Take rows out of the table: they are in the file."""
    yield Batch(*(_DROP(tenant=row.tenant, sort=row.sort, key=row.key) for row in rows), last=True)
