"""Repairing rows that no tenant has: their column `tenant`, or a number that must be positive, is what was damaged.

A tenant whose own row is lost, but not its records, gets a new
name. Bodies and packs go back to the record that points at them, whose hash then tells whether they are right.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from perdure.errors import Damaged
from perdure.log.mended import Done
from perdure.log.quarantine import set_aside
from perdure.log.records import NUMBER_MAX, R_COLUMNS, RECORD_CELLS, record_of
from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Program, Rows, Sql

_PAGE = 200
_HIGH = NUMBER_MAX // 2
_UNKNOWN = "NOT EXISTS (SELECT 1 FROM tenant t WHERE t.tenant = o.tenant)"
_RECORDS = Sql(
    f"SELECT {R_COLUMNS} FROM record r WHERE r.tenant = :tenant LIMIT :limit", opens=RECORD_CELLS, tolerant="all"
)
_ADD_TENANT = Sql("INSERT INTO tenant (tenant, name) VALUES (:number, :name) ON CONFLICT DO NOTHING")
# A body whose tenant, and nothing else, has changed: a record of a tenant that is there misses it.
_OWNERS = {
    "body": Sql(
        """SELECT r.tenant FROM record r JOIN tenant t ON t.tenant = r.tenant WHERE r.body = :number
        AND NOT EXISTS (SELECT 1 FROM body b WHERE b.tenant = r.tenant AND b.id = r.body)"""
    ),
    "pack": Sql(
        """SELECT DISTINCT r.tenant FROM record r JOIN tenant t ON t.tenant = r.tenant WHERE r.body = -:number
        AND NOT EXISTS (SELECT 1 FROM pack p WHERE p.tenant = r.tenant AND p.pack = -r.body)""",
        postgres="""SELECT DISTINCT r.tenant FROM record r JOIN tenant t ON t.tenant = r.tenant
        WHERE r.body = -:number::bigint
        AND NOT EXISTS (SELECT 1 FROM pack p WHERE p.tenant = r.tenant AND p.pack = -r.body)""",
    ),
    "thread": Sql(
        """SELECT DISTINCT r.tenant FROM record r JOIN tenant t ON t.tenant = r.tenant WHERE r.thread = :number
        AND NOT EXISTS (SELECT 1 FROM thread o WHERE o.tenant = r.tenant AND o.thread = :number)"""
    ),
}
_GIVE = {
    table: Sql(f"UPDATE {table} SET tenant = :owner WHERE tenant = :tenant AND {column} = :number")
    for table, column in (("body", "id"), ("pack", "pack"), ("thread", "thread"))
}
_ODD_NUMBERS = {
    "body": Sql(f"SELECT tenant, id FROM body WHERE id <= 0 OR id > {NUMBER_MAX} LIMIT :limit"),
    "pack": Sql(f"SELECT tenant, pack FROM pack WHERE pack <= 0 OR pack > {NUMBER_MAX} LIMIT :limit"),
}


def repair_strangers() -> Program[Done]:
    """Put back what belongs to a tenant that is there; set the rest aside."""
    done = Done()
    # A negative number is a pack's: such a body would stand in for one.
    for table, sql in _ODD_NUMBERS.items():
        while rows := (yield Batch(sql(limit=_PAGE)))[0]:
            for tenant, number in rows:
                yield from set_aside(tenant, table, (number,), "its number is none", drop=True)
                done.mended.append(("(store)", None, f"a row of {table} whose number is none was set aside"))
    answers = yield Batch(
        *(Sql(f"SELECT DISTINCT o.tenant FROM {table} o WHERE {_UNKNOWN}")() for table in owned_tables())
    )
    unknown = sorted({tenant for rows in answers for (tenant,) in rows if type(tenant) is int})
    for tenant in unknown:
        yield from _repair_tenant(tenant, done)
    return done


def _repair_tenant(tenant: int, done: Done) -> Generator[Batch, list[Rows], None]:
    [rows] = yield Batch(_RECORDS(tenant=tenant, limit=_PAGE))
    if any(_is_sound(row) for row in rows):
        name = f"recovered-{tenant}"
        yield Batch(_ADD_TENANT(number=tenant, name=name))
        done.mended.append(("(store)", None, f"the name of tenant {tenant} was lost: it is called {name} now"))
        return
    for table, owned in owned_tables().items():
        find = Sql(f"SELECT {', '.join(owned.key)} FROM {table} WHERE tenant = :tenant LIMIT :limit")
        while keys := (yield Batch(find(tenant=tenant, limit=_PAGE)))[0]:
            for key in keys:
                if not (yield from _given_back(tenant, table, key, done)):
                    yield from set_aside(tenant, table, key, "no tenant has it", drop=True)
                    number = key[1] if table == "record" and type(key[1]) is int and key[1] >= 0 else None
                    done.lost.append(("(store)", number, f"a row of {table} that no tenant has"))


def _given_back(tenant: int, table: str, key: tuple[Any, ...], done: Done) -> Generator[Batch, list[Rows], bool]:
    if table not in _OWNERS:
        return False
    [owners] = yield Batch(_OWNERS[table](number=key[0]))
    if len(owners) != 1:
        return False
    yield Batch(_GIVE[table](owner=owners[0][0], tenant=tenant, number=key[0]))
    done.mended.append(("(store)", None, f"a row of {table} was given back to its tenant"))
    return True


def _is_sound(row: tuple[Any, ...]) -> bool:
    try:
        record_of(row)
    except Damaged:
        return False
    return True
