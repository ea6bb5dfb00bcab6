"""Stubs of archived threads and runs. A stub records where the data is, and keeps the name reserved."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, NamedTuple

from perdure.errors import Archived
from perdure.storage.program import Batch, Program, Rows, Sql, Statement

Sort = Literal["thread", "run"]
_FIND = Sql("SELECT place FROM archived WHERE tenant = :tenant AND kind = :kind AND name = :name")
_LIST = Sql("SELECT kind, name, place, at FROM archived WHERE tenant = :tenant ORDER BY kind DESC, name")
_ADD = Sql(
    """INSERT INTO archived (tenant, kind, name, place, at) VALUES (:tenant, :kind, :name, :place, :at)
    ON CONFLICT (tenant, kind, name) DO NOTHING"""
)
_DROP = Sql("DELETE FROM archived WHERE tenant = :tenant AND kind = :kind AND name = :name RETURNING place")


class Stub(NamedTuple):
    kind: Sort
    name: str
    place: str
    at: int


def add_stub(tenant: int, stub: Stub) -> Statement:
    return _ADD(tenant=tenant, **stub._asdict())


def drop_stubs(tenant: int, kind: Sort, *names: str) -> Program[bool]:
    """Delete the stubs of these names. Return whether the first name had one."""
    first, *_ = yield Batch(*(_DROP(tenant=tenant, kind=kind, name=name) for name in names))
    return bool(first)


def find_place(tenant: int, kind: Sort, name: str) -> Program[str | None]:
    [rows] = yield Batch(select_stub(tenant, kind, name))
    return rows[0][0] if rows else None


def list_stubs(tenant: int) -> Program[list[Stub]]:
    [rows] = yield Batch(_LIST(tenant=tenant))
    return [Stub._make(row) for row in rows]


def select_stub(tenant: int, kind: Sort, name: str) -> Statement:
    """Return the statement that selects a stub, for `refuse_archived`."""
    return _FIND(tenant=tenant, kind=kind, name=name)


def check_archived(tenant: int, kind: Sort, name: str) -> Generator[Batch, list[Rows], None]:
    """Raise Archived if a thread or run that was not found has a stub."""
    [rows] = yield Batch(select_stub(tenant, kind, name))
    refuse_archived(kind, name, rows)


def refuse_archived(kind: Sort, name: str, rows: Rows) -> None:
    """Raise Archived if `select_stub` returned a row."""
    for (place,) in rows:
        call = "unarchive" if kind == "thread" else "unarchive_run"
        raise Archived(
            f"{kind} {name!r} is archived at {place}: bring it back with `perdure {kind} unarchive {name}` "
            f"(store.ops.{call}({name!r}))",
            place=place,
        )
