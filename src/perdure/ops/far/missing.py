"""Which objects are not where the store has put them, and whose they are: for `verify`, `doctor` and `repair`.

Asks the object store how large each object is, and fetches none. Nothing is changed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from perdure.errors import Damaged
from perdure.log.ids import show_id
from perdure.ops.far.objects import COLUMNS, Column, far_page
from perdure.storage.far import Missing
from perdure.storage.far_cells import Wanted, wanted_of
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, Transaction, read
from perdure.threads.context import Context
from perdure.threads.far_loose import LIST_PAGE, objects_of, place_of

_RUNS_MAX = 3
_TENANTS = Sql("SELECT tenant, name FROM tenant ORDER BY tenant")
_OF_PACK = Sql(
    """SELECT min(r.id), max(r.id), count(*), min(t.name) FROM pack p
    JOIN record r ON r.tenant = p.tenant AND r.tree = p.tree AND r.id BETWEEN p.first AND p.last AND r.body = -p.pack
    LEFT JOIN thread t ON t.tenant = r.tenant AND t.thread = r.thread
    WHERE p.tenant = :tenant AND p.pack = :key"""
)
_OF_BLOB = Sql(
    """SELECT r.id FROM run_blob b JOIN run r ON r.tenant = b.tenant AND r.run = b.run
    WHERE b.tenant = :tenant AND b.hash = :key ORDER BY r.run LIMIT :limit"""
)


class Lost(NamedTuple):
    """An object that is missing: whose it is, and what is lost with it, as a sentence."""

    thread: str | None
    run: str | None
    what: str


class Looked(NamedTuple):
    """What was found of a tenant's objects: how many there should be, and which are not there."""

    objects: int
    lost: list[Lost]


def look_for(ctx: Context, tenant: int, limit: int | None = None) -> Flow[Looked]:
    """Look for every object of a tenant; `limit`: for so many at most."""
    found = Looked(0, [])
    if objects_of(ctx) is None:
        return found
    for column in COLUMNS:
        after = column.start
        while True:
            page = LIST_PAGE if limit is None else min(LIST_PAGE, limit - found.objects)
            cells = (yield from read(partial(far_page, tenant, column, after, page))) if page > 0 else []
            if not cells:
                break
            after = cells[-1][0]
            found = Looked(found.objects + len(cells), found.lost + (yield from _lost(ctx, tenant, column, cells)))
    return found


def has_any(tenant: int) -> Flow[bool]:
    """Whether a tenant has objects at all."""
    for column in COLUMNS:
        if (yield from read(partial(far_page, tenant, column, column.start, 1))):
            return True
    return False


def is_any_there(tenant: int) -> Flow[tuple[int, bool]]:
    """How many objects of a tenant were looked for until one was found, and whether one was."""
    looked = 0
    for column in COLUMNS:
        after = column.start
        while cells := (yield from read(partial(far_page, tenant, column, after, LIST_PAGE))):
            after = cells[-1][0]
            wanted = [one for _, cell in cells if isinstance(one := _wanted(cell), Wanted)]
            looked += len(wanted)
            lost: list[Wanted] = yield Transaction(Missing(wanted))
            if len(lost) < len(wanted):
                return looked, True
    return looked, False


def _lost(ctx: Context, tenant: int, column: Column, cells: Rows) -> Flow[list[Lost]]:
    keys = {one: key for key, cell in cells if isinstance(one := _wanted(cell), Wanted)}
    lost = [
        Lost(None, None, f"a {column.table} does not say where its object is")
        for _, cell in cells
        if _wanted(cell) is None
    ]
    missing: list[Wanted] = yield Transaction(Missing(keys))
    for one in missing:
        whose = yield from read(partial(_whose, tenant, column, keys[one]))
        says = f"object {one.name} of {one.size} bytes is not at {place_of(ctx)}, or not whole"
        lost.append(whose._replace(what=f"{says}: {whose.what}"))
    return lost


def _wanted(cell: bytes) -> Wanted | None:
    try:
        return wanted_of(cell)
    except Damaged:
        return None


def _whose(tenant: int, column: Column, key: Any) -> Program[Lost]:
    if column.table == "blob":
        [rows] = yield Batch(_OF_BLOB(tenant=tenant, key=key, limit=_RUNS_MAX + 1), last=True)
        runs = [run for (run,) in rows]
        named = ", ".join(map(repr, runs[:_RUNS_MAX])) + (", …" if len(runs) > _RUNS_MAX else "")
        of = f"of {'run' if len(runs) == 1 else 'runs'} {named}" if runs else "that no run needs"
        return Lost(None, runs[0] if runs else None, f"it holds the large result {bytes(key).hex()} {of}")
    [rows] = yield Batch(_OF_PACK(tenant=tenant, key=key), last=True)
    first, last, count, name = rows[0]
    if not count:
        return Lost(None, None, "it holds what no checkpoint needs")
    span = f"checkpoints {show_id(first)} to {show_id(last)}" if count > 1 else f"checkpoint {show_id(first)}"
    thread = f"thread {name!r}" if name is not None else "a deleted thread that a fork still needs"
    return Lost(name, None, f"it holds {span} ({count}) of {thread}")


def tenants() -> Program[list[tuple[int, str]]]:
    """The tenants of a store: numbers and names."""
    [rows] = yield Batch(_TENANTS(tenant=None), last=True)
    return [(number, name) for number, name in rows if type(number) is int and type(name) is str]
