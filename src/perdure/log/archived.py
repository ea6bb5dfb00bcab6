"""The stubs of archived threads: each says where the thread is, and keeps its name taken."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from perdure.errors import Archived
from perdure.storage.program import Batch, Program, Rows, Sql, Statement

_FIND = Sql("SELECT place FROM archived WHERE tenant = :tenant AND name = :name")
_LIST = Sql("SELECT name, place, at FROM archived WHERE tenant = :tenant ORDER BY name")
_ADD = Sql(
    """INSERT INTO archived (tenant, name, place, at) VALUES (:tenant, :name, :place, :at)
    ON CONFLICT (tenant, name) DO NOTHING"""
)
_DROP = Sql("DELETE FROM archived WHERE tenant = :tenant AND name = :name")


class Stub(NamedTuple):
    name: str
    place: str
    at: int


def add_stub(tenant: int, stub: Stub) -> Statement:
    return _ADD(tenant=tenant, **stub._asdict())


def drop_stub(tenant: int, name: str) -> Program[None]:
    yield Batch(_DROP(tenant=tenant, name=name))


def find_place(tenant: int, name: str) -> Program[str | None]:
    [rows] = yield Batch(_FIND(tenant=tenant, name=name))
    return rows[0][0] if rows else None


def list_stubs(tenant: int) -> Program[list[Stub]]:
    [rows] = yield Batch(_LIST(tenant=tenant))
    return [Stub._make(row) for row in rows]


def check_archived(tenant: int, name: str) -> Generator[Batch, list[Rows], None]:
    """Raise Archived if there is a stub: asked where a thread was not found."""
    place = yield from find_place(tenant, name)
    if place is not None:
        raise Archived(
            f"thread {name!r} is archived at {place}: bring it back with `perdure thread unarchive {name}` "
            f"(store.ops.unarchive({name!r}))",
            place=place,
        )
