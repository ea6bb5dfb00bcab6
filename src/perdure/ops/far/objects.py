"""Moving cold packs and large results to an object store, bringing them back, and removing what nothing names.

An object gets a name that was never used before and never will be. Before it is put there the name is written down in
`far_loose`; the transaction that lets a row name it takes it off that list; when the row goes, a trigger puts it there
again. So whatever is at the place and named by no row is on the list, whenever somebody is killed, and nothing on the
list is named by a row. What is removed is marked first, so that a move that was slow finds its object given up.

Nobody removes what another store has put there: each has a folder of its own, and a store that was restored from a
backup begins a new one, because the store that the backup was made of may still be in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import Damaged, UsageError
from perdure.log.ids import new_id
from perdure.storage.far import Get, Put
from perdure.storage.far_cells import MARK, Wanted, far_cell, wanted_of
from perdure.storage.objects import Objects
from perdure.storage.program import Batch, Driver, Flow, Program, Progress, Rows, Sql, Transaction, read, write
from perdure.threads.context import Context
from perdure.threads.far_loose import (
    LET_GO,
    LIST_PAGE,
    PUTTING,
    REMOVING,
    collect,
    count_loose,
    home_of,
    needed,
    place_of,
)

_MIN_BYTES = 1024  # well above the length of a cell that names an object
_CELL_MAX = 512
_PAGE = 128
_PAGE_BYTES = 8 << 20
_FORGET_HOMES = Sql("DELETE FROM meta WHERE key LIKE 'objects %'")
_BEGIN = Sql("INSERT INTO far_loose (tenant, name, state, at) VALUES (:tenant, :name, 0, :at)")
_NAMED = Sql("DELETE FROM far_loose WHERE tenant = :tenant AND name = :name AND state = 0 RETURNING name")
_UNUSED = Sql("INSERT INTO far_loose (tenant, name, state, at) VALUES (:tenant, :name, 1, :at)")


class Column(NamedTuple):
    """A column whose cells may be far, and the statements on it. `key` identifies a row."""

    table: str
    key: str
    start: Any  # before all keys
    sizes: Sql
    cells: Sql
    set: Sql
    far: Sql
    bring: Sql
    total: Sql


def _column(table: str, key: str, data: str, start: Any, cold: str) -> Column:
    due = f"t.tenant = :tenant AND t.{key} > :after AND length(t.{data}) >= :min AND {cold}"
    return Column(
        table,
        key,
        start,
        Sql(f"SELECT t.{key}, length(t.{data}) FROM {table} t WHERE {due} ORDER BY t.{key} LIMIT :limit"),
        Sql(f"SELECT t.{key}, t.{data} FROM {table} t WHERE {due} AND t.{key} <= :last ORDER BY t.{key}"),
        # Only if nobody has changed it meanwhile: what is encrypted anew begins with another nonce.
        Sql(
            f"""UPDATE {table} SET {data} = :cell WHERE tenant = :tenant AND {key} = :key
            AND length({data}) = :length AND substr({data}, 1, 64) = :start RETURNING {key}"""
        ),
        Sql(
            f"""SELECT {key}, {data} FROM {table} WHERE tenant = :tenant AND {key} > :after
            AND length({data}) < {_CELL_MAX} AND substr({data}, 1, 5) = :mark ORDER BY {key} LIMIT :limit"""
        ),
        Sql(f"UPDATE {table} SET {data} = :data WHERE tenant = :tenant AND {key} = :key AND {data} = :cell"),
        Sql(f"SELECT count(*) FROM {table} WHERE length({data}) < {_CELL_MAX} AND substr({data}, 1, 5) = :mark"),
    )


COLUMNS = (
    _column("pack", "pack", "data", 0, "t.last < :cold_id"),
    _column(
        "blob",
        "hash",
        "body",
        b"",
        """NOT EXISTS (
            SELECT 1 FROM run_blob u JOIN run r ON r.tenant = u.tenant AND r.run = u.run
            WHERE u.tenant = t.tenant AND u.hash = t.hash AND (r.status = 'running' OR r.changed_at >= :cold))""",
    ),
)


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved to an object store, or back; and how many objects that nothing named were removed there."""

    objects: int = 0
    bytes: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class ObjectsInfo:
    """What this tenant has in an object store."""

    place: str
    objects: int
    bytes: int
    let_go: int  # that nothing names any more: removed when `keep_s` is over
    unfinished: int  # of moves that are under way, or were killed


class _Cell(NamedTuple):
    """A cell that is moved."""

    key: Any
    name: str
    data: bytes


def with_objects(objects: object, url: str) -> Callable[[Driver], Driver]:
    """What gives a driver an object store, from what `open(objects=…)` got. Raises UsageError."""
    from perdure.storage.far import FarDriver
    from perdure.storage.objects import open_place

    chosen = objects if isinstance(objects, Objects) else Objects(objects)  # type: ignore[arg-type]
    if chosen.min_bytes < _MIN_BYTES:
        raise UsageError(f"min_bytes={chosen.min_bytes}: at least {_MIN_BYTES}, what is smaller is not worth an object")
    if min(chosen.cold_s, chosen.keep_s) < 0 or not chosen.timeout_s > 0:
        raise UsageError("Objects(): cold_s and keep_s are seconds from 0 on, timeout_s above 0")
    if isinstance(chosen.place, str) and chosen.place.startswith("memory:") and url != ":memory:":
        raise UsageError("objects='memory://' is lost with the process: only for a store that is in memory itself")
    place = open_place(chosen)
    return lambda driver: FarDriver(driver, chosen, place)


# --- out


def move_out(ctx: Context, cold_s: float | None, progress: Progress | None) -> Flow[Moved]:
    """Move what is cold, and remove what nothing names any more."""
    needed(ctx)
    tenant = yield from ctx.tenant()
    return Moved() if tenant is None else (yield from move_out_of(ctx, tenant, cold_s, progress))


def move_out_of(
    ctx: Context, tenant: int, cold_s: float | None = None, progress: Progress | None = None
) -> Flow[Moved]:
    """The same for a tenant."""
    objects = needed(ctx)
    cold_us = ctx.clock_us() - int((objects.cold_s if cold_s is None else cold_s) * 1e6)
    moved = yield from move_cold(ctx, tenant, cold_us, progress)
    removed = yield from collect(ctx, tenant)
    return Moved(moved.objects, moved.bytes, removed)


def move_cold(ctx: Context, tenant: int, cold_us: int, progress: Progress | None = None) -> Flow[Moved]:
    """Move the packs and large results that nobody has used since then. `progress`: (done, of how many) is told with
    the same number twice: nobody knows how many there are."""
    objects = needed(ctx)
    home, _ = yield from write(partial(home_of, tenant, ctx.entropy(8).hex(), make=True))
    done = size = 0
    for column in COLUMNS:
        after = column.start
        while True:
            due = {"tenant": tenant, "min": objects.min_bytes, "cold": cold_us, "cold_id": new_id(cold_us, 0, 0)}
            cells, last = yield from read(partial(_page, column, due, after))
            if last is None:
                break
            after = last
            named = [_Cell(key, home + ctx.entropy(16).hex(), bytes(data)) for key, data in cells]
            moved = yield from _move(ctx, tenant, column, named)
            done += moved.objects
            size += moved.bytes
            if progress is not None:
                progress(done, done)
    return Moved(done, size)


def _move(ctx: Context, tenant: int, column: Column, cells: list[_Cell]) -> Flow[Moved]:
    """The name is written down, the object is there, the row names it: in this order."""
    yield from write(partial(_write_down, tenant, [cell.name for cell in cells], ctx.clock_us()))
    yield Transaction(Put({cell.name: cell.data for cell in cells}))
    return (yield from write(partial(_switch, tenant, column, cells, ctx.clock_us())))


def _page(column: Column, due: Mapping[str, Any], after: Any) -> Program[tuple[Rows, Any]]:
    """Some cells that are to be moved, as they are stored; and the last one's key, None: there are no more."""
    [sizes] = yield Batch(column.sizes(**due, after=after, limit=_PAGE))
    if not sizes:
        return [], None
    last, held = sizes[0][0], 0
    for key, size in sizes:
        held += size
        if held > _PAGE_BYTES and key != last:
            break
        last = key
    [cells] = yield Batch(column.cells(**due, after=after, last=last))
    return cells, last


def _write_down(tenant: int, names: list[str], at: int) -> Program[None]:
    yield Batch(*(_BEGIN(tenant=tenant, name=name, at=at) for name in names), last=True)


def _switch(tenant: int, column: Column, cells: list[_Cell], at: int) -> Program[Moved]:
    """Let the rows name their objects, but for rows that have changed and objects that were given up."""
    if not cells:
        return Moved()
    taken = yield Batch(*(_NAMED(tenant=tenant, name=cell.name) for cell in cells))
    cells = [cell for cell, rows in zip(cells, taken, strict=True) if rows]
    if not cells:
        return Moved()
    changed = yield Batch(
        *(
            column.set(
                tenant=tenant,
                key=cell.key,
                cell=far_cell(cell.name, cell.data),
                length=len(cell.data),
                start=cell.data[:64],
            )
            for cell in cells
        )
    )
    unused = [cell for cell, rows in zip(cells, changed, strict=True) if not rows]
    if unused:
        yield Batch(*(_UNUSED(tenant=tenant, name=cell.name, at=at) for cell in unused))
    size = sum(len(cell.data) for cell, rows in zip(cells, changed, strict=True) if rows)
    return Moved(len(cells) - len(unused), size)


# --- back


def bring_back(ctx: Context, progress: Progress | None) -> Flow[Moved]:
    """Bring everything of the tenant back into the database. The objects go as those of deleted rows do."""
    needed(ctx)
    tenant = yield from ctx.tenant()
    done = size = 0
    if tenant is None:
        return Moved()
    for column in COLUMNS:
        after = column.start
        while cells := (yield from read(partial(far_page, tenant, column, after, _PAGE))):
            some = _cut(cells)
            after = some[-1][0]
            wanted = {cell: wanted_of(cell) for _, cell in some}
            fetched = yield Transaction(Get(wanted.values()))
            rows = []
            for key, cell in some:
                data = fetched[wanted[cell].name]
                if isinstance(data, Exception):
                    raise data
                rows.append((key, cell, data))
                size += len(data)
            yield from write(partial(_bring, tenant, column, rows))
            done += len(rows)
            if progress is not None:
                progress(done, done)
    return Moved(done, size)


def _cut(cells: Rows) -> Rows:
    held = 0
    some: Rows = []
    for row in cells:
        held += wanted_of(row[1]).size
        if some and held > _PAGE_BYTES:
            break
        some.append(row)
    return some


def far_page(tenant: int, column: Column, after: Any, limit: int) -> Program[Rows]:
    """Some cells that name objects, each with its row's key."""
    [rows] = yield Batch(column.far(tenant=tenant, after=after, mark=MARK, limit=limit), last=True)
    return rows


def _bring(tenant: int, column: Column, rows: Rows) -> Program[None]:
    yield Batch(*(column.bring(tenant=tenant, key=key, cell=cell, data=data) for key, cell, data in rows), last=True)


# --- looking


def info(ctx: Context) -> Flow[ObjectsInfo]:
    """What there is."""
    needed(ctx)
    tenant = yield from ctx.tenant()
    if tenant is None:
        return ObjectsInfo(place_of(ctx), 0, 0, 0, 0)
    count = size = 0
    for column in COLUMNS:
        after = column.start
        while cells := (yield from read(partial(far_page, tenant, column, after, LIST_PAGE))):
            after = cells[-1][0]
            count += len(cells)
            size += sum(wanted.size for wanted in readable(cells)[0])
    loose = yield from read(partial(count_loose, tenant))
    let_go = loose.get(LET_GO, 0) + loose.get(REMOVING, 0)
    return ObjectsInfo(place_of(ctx), count, size, let_go, loose.get(PUTTING, 0))


def count_far() -> Program[int]:
    """How many objects belong to the store, whatever tenant's."""
    found = yield Batch(*(column.total(tenant=None, mark=MARK) for column in COLUMNS), last=True)
    return sum(int(rows[0][0]) for rows in found)


def begin_folder() -> Program[None]:
    """In a copy that becomes a store of its own: what the store that it is a copy of has put there is not its own."""
    yield Batch(_FORGET_HOMES(tenant=None), last=True)


def readable(cells: Rows) -> tuple[list[Wanted], int]:
    """The objects that cells name, and how many cells do not say."""
    found, damaged = [], 0
    for _, cell in cells:
        try:
            found.append(wanted_of(cell))
        except Damaged:
            damaged += 1
    return found, damaged
