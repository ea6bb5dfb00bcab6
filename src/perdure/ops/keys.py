"""Changing the key of a tenant, and encrypting what was stored without one: a walk over all its secret cells.

A page at a time: the rows whose cells are not under the key in use are read and written again in one transaction. Rows
that somebody else has locked are passed over and come again in the next round, so that the walk never waits for a
writer. It may be stopped anywhere, and begun again: what is done is passed over. When a round finds nothing, and every
writer has had the time to hear of the new key, the older keys are marked as retired: then they may be thrown away.

Statements here say nothing of cells (`Sql(…)` without `seals`), so that they see them as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from perdure.errors import Damaged, UsageError
from perdure.storage.cells import MARK as SEALED
from perdure.storage.cells import TABLES, Cell, Table
from perdure.storage.program import (
    Batch,
    Driver,
    Flow,
    Program,
    Progress,
    Row,
    Sql,
    Statement,
    Transaction,
    read,
    write,
)
from perdure.threads.context import Context

if TYPE_CHECKING:
    from perdure.storage.keyring import Keys
    from perdure.storage.locks import Locks
    from perdure.storage.vault import Vault

GRACE_S = 60.0  # a writer looks at the keys every second; one whose transaction takes longer than this is stopped
_ROUNDS = 4
_ROWS_MAX = 200
_BYTES_MAX = 4 << 20
_KEYS = Sql("SELECT key, since, retired_at FROM seal WHERE tenant = :tenant ORDER BY since, key")
_RETIRE = Sql(
    """UPDATE seal SET retired_at = :now WHERE tenant = :tenant AND key <> :key AND retired_at IS NULL
    AND since < :since RETURNING key"""
)
_NEWEST = Sql("SELECT key FROM seal WHERE tenant = :tenant ORDER BY since DESC, key DESC LIMIT 1")


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key that a tenant's data is, or was, encrypted with; never the key itself."""

    id: str
    since: datetime
    retired_at: datetime | None
    current: bool
    """Whether new data is encrypted with it."""
    given: bool
    """Whether this process has it."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """What became of a rotation: how many rows were encrypted anew, and which keys may go."""

    key: str
    rows: int
    retired: tuple[str, ...]
    """Keys that nothing is encrypted with any more: remove them from the keys."""
    waiting: tuple[str, ...]
    """Older keys that may still be in use: rotate again later, after a minute at the earliest."""
    unreadable: int
    """Rows that could not be opened: run `perdure store verify`."""
    may_remain: tuple[str, ...] = ()
    """After `encrypt`: what may still hold it in the clear, each a sentence that says where."""


def encrypting(keys: object) -> Callable[[Driver], Driver]:
    """What makes a driver encrypt, with what `open(keys=…)` gave. Raises UsageError, also without the extra."""
    from perdure.storage.keyring import provider_of
    from perdure.storage.sealing import SealedDriver
    from perdure.storage.vault import Vault

    vault = Vault(provider_of(keys))
    return lambda driver: SealedDriver(driver, vault)


def _vault(ctx: Context) -> Vault:
    vault: Vault | None = getattr(ctx.driver, "vault", None)
    if vault is None:
        raise UsageError("the store was opened without keys: open(url, keys=…)")
    return vault


def list_keys(ctx: Context) -> Flow[list[KeyInfo]]:
    """The keys that the tenant's data is or was encrypted with, the oldest first."""
    _vault(ctx)
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    rows = yield from read(partial(_seals, tenant))
    given = set((yield from ask_keys(ctx.tenant_name)).by_id) if rows else set()
    newest = rows[-1][0] if rows else b""
    return [
        KeyInfo(bytes(key).hex(), _time(since), None if end is None else _time(end), key == newest, bytes(key) in given)
        for key, since, end in rows
    ]


def ask_keys(name: str, tenant: int | None = None) -> Generator[Transaction, Any, Keys]:
    """Ask the provider, whatever is known. With the tenant's number, the answer is in use from now on."""
    from perdure.storage.sealing import AskKeys

    keys: Keys = yield Transaction(AskKeys(name, tenant))
    return keys


def _seals(tenant: int) -> Program[list[Row]]:
    [rows] = yield Batch(_KEYS(tenant=tenant), last=True)
    return rows


def _time(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1e6, UTC)


def rotate(
    ctx: Context,
    progress: Progress | None = None,
    *,
    plain: bool = False,
    full: bool = False,
    grace_s: float = GRACE_S,
) -> Flow[Rotated]:
    """Encrypt everything of the tenant with the newest key. `plain`: also what is not encrypted at all; nothing of that
    stays in the store's own files. PostgreSQL's are rewritten only if `full`."""
    vault = _vault(ctx)
    tenant = yield from ctx.ensure_tenant()
    yield from ask_keys(ctx.tenant_name, tenant)
    locks: Locks = yield from write(partial(_begin, vault, tenant, plain))
    since = locks.rows[locks.current]
    walk = _Walk(locks, tenant, plain)
    total = (yield from read(partial(_count, walk))) if progress is not None else 0
    began = ctx.clock_us()
    for _ in range(_ROUNDS):
        began = ctx.clock_us()
        walk.found = 0
        for table in TABLES:
            yield from _walk_table(walk, table, progress, total)
        if walk.found == walk.unreadable:
            break
        walk.unreadable = 0
    retired: list[str] = []
    if walk.found == 0 and began - since >= grace_s * 1e6:
        retired = yield from write(partial(_retire, tenant, locks.current, since, ctx.clock_us()))
    # Also if there was nothing to do: an earlier call may have been killed just before this.
    told = (yield from _clean(ctx, tenant, full)) if plain else ()
    left = [bytes(key).hex() for key, _, end in (yield from read(partial(_seals, tenant))) if end is None]
    current = locks.current.hex()
    waiting = tuple(key for key in left if key != current)
    return Rotated(current, walk.done, tuple(retired), waiting, walk.unreadable, told)


def _clean(ctx: Context, tenant: int, full: bool) -> Flow[tuple[str, ...]]:
    """What was plain must not stay in pages and rows that nothing uses. What may still hold it."""
    from perdure.log.erasing import scrub
    from perdure.threads.keeping import remains

    told = yield from scrub(ctx.driver.dialect, full, [table.name for table in TABLES])
    return (*told, *(yield from remains(ctx, tenant, full)))


class _Walk:
    """What is known while walking."""

    def __init__(self, locks: Locks, tenant: int, plain: bool) -> None:
        self.locks, self.tenant, self.plain = locks, tenant, plain
        self.done = 0  # rows that were encrypted anew
        self.found = 0  # in this round: those that needed to be
        self.unreadable = 0


def _begin(vault: Vault, tenant: int, plain: bool) -> Program[Locks]:
    from perdure.storage.sealing import load

    return (yield from load(vault, tenant, write=True, again=True, plain=plain))


def _retire(tenant: int, key: bytes, since: int, now: int) -> Program[list[str]]:
    [rows] = yield Batch(_RETIRE(tenant=tenant, key=key, since=since, now=now), last=True)
    return [bytes(row[0]).hex() for row in rows]


def _walk_table(walk: _Walk, table: Table, progress: Progress | None, total: int) -> Flow[None]:
    after: Row | None = None
    while True:
        page: list[Row] = yield from read(partial(_page, walk, table, after))
        if not page:
            return
        last, wanted = _cut(page)
        done, found, unreadable = yield from write(partial(_renew, walk, table, after, last))
        walk.done += done
        walk.found += max(found, wanted)  # what was locked, and passed over, still needs its key
        walk.unreadable += unreadable
        after = last
        if progress is not None:
            progress(walk.done, max(total, walk.done))


def _cut(page: list[Row]) -> tuple[Row, int]:
    """The last row of a page that still fits, and how many do: large cells are done a few at a time."""
    size = count = 0
    for row in page:
        size += row[-1] or 0
        last, count = row[:-1], count + 1
        if size > _BYTES_MAX:
            break
    return last, count


def _page(walk: _Walk, table: Table, after: Row | None) -> Program[list[Row]]:
    """Which rows need it: their keys, and how large they are."""
    sql = _texts(table, walk.plain, after is not None)[0]
    [rows] = yield Batch(sql(**_params(walk, table, after), limit=_ROWS_MAX), last=True)
    return rows


def _count(walk: _Walk) -> Program[int]:
    counts = yield Batch(*(_counting(table, walk.plain)(**_params(walk, table, None)) for table in TABLES), last=True)
    return sum(int(rows[0][0]) for rows in counts)


def _renew(walk: _Walk, table: Table, after: Row | None, last: Row) -> Program[tuple[int, int, int]]:
    """One page: read as stored, encrypt anew, write. How many rows were written, found, and could not be opened."""
    _, select, update = _texts(table, walk.plain, after is not None)
    bounds = {f"to_{column}": value for column, value in zip(table.key, last, strict=True)}
    rows, [(newest,)] = yield Batch(select(**_params(walk, table, after), **bounds), _NEWEST(tenant=walk.tenant))
    if newest != walk.locks.current:
        raise UsageError("another key has come into use since this rotation began: rotate again")
    statements: list[Statement] = []
    unreadable = 0
    width, known = len(table.key), len(table.key) + len(table.beside)
    for row in rows:
        key = dict(zip(table.key, row[:width], strict=True))
        try:
            cells = _renewed(
                walk, table, {**key, **dict(zip(table.beside_names(), row[width:known], strict=True))}, row[known:]
            )
        except Damaged:
            unreadable += 1
            continue
        statements.append(update(tenant=walk.tenant, **key, **cells))
    if statements:
        yield Batch(*statements, last=True)
    return len(statements), len(rows), unreadable


def _renewed(walk: _Walk, table: Table, key: Mapping[str, Any], values: Row) -> dict[str, Any]:
    from perdure.storage.locks import UnknownKey

    cells: dict[str, Any] = {}
    for column, cell, value in zip(table.columns(), table.cells, values, strict=True):
        by = tuple([key[name] for name in cell.by if isinstance(name, str)])
        try:
            cells[f"new_{column}"] = walk.locks.renewed(cell, value, by, plain=walk.plain)
        except UnknownKey as unknown:
            raise walk.locks.unknown(unknown.key, cell) from None
    return cells


def _params(walk: _Walk, table: Table, after: Row | None) -> dict[str, Any]:
    params: dict[str, Any] = {"tenant": walk.tenant}
    for column, start in walk.locks.prefixes(table).items():
        if start is not None:
            params[f"start_{column}"] = start
    if after is not None:
        params.update({f"after_{column}": value for column, value in zip(table.key, after, strict=True)})
    return params


def _needs(table: Table, plain: bool) -> str:
    """The condition for a row that is not all under the key in use."""
    from perdure.storage.locks import INDEX_TEXT_MARK, TEXT_MARK

    widths = {"blob": len(SEALED) + 8, "text": len(TEXT_MARK) + 16}
    parts: list[str] = []
    for column, cell in zip(table.columns(), table.cells, strict=True):
        if cell.sort in widths:
            parts.append(f"substr({column}, 1, {widths[cell.sort]}) <> :start_{column}")
        elif cell.sort == "index" and plain and table.name == "tag":
            parts.append(f"substr({column}, 1, {len(INDEX_TEXT_MARK)}) <> '{INDEX_TEXT_MARK}'")
    needs = f"({' OR '.join(parts)})" if parts else "1 = 0"
    return f"{needs} AND {table.where}" if table.where else needs


@cache
def _texts(table: Table, plain: bool, after: bool) -> tuple[Sql, Sql, Sql]:
    """What finds a page of rows, what reads it, and what writes one of its rows."""
    key, columns = ", ".join(table.key), table.columns()
    where = f"tenant = :tenant AND {_needs(table, plain)}"
    if after:
        where += f" AND ({key}) > ({', '.join(f':after_{column}' for column in table.key)})"
    size = " + ".join(f"coalesce(length({column}), 0)" for column, cell in _sized(table)) or "0"
    find = Sql(f"SELECT {key}, {size} FROM {table.name} WHERE {where} ORDER BY {key} LIMIT :limit")
    select = Sql(
        f"SELECT {', '.join((*table.key, *table.beside, *columns))} FROM {table.name} WHERE {where}"
        f" AND ({key}) <= ({', '.join(f':to_{column}' for column in table.key)}) ORDER BY {key} {{skip_locked}}",
    )
    update = Sql(
        f"UPDATE {table.name} SET {', '.join(f'{column} = :new_{column}' for column in columns)}"
        f" WHERE tenant = :tenant AND {' AND '.join(f'{column} = :{column}' for column in table.key)}"
    )
    return find, select, update


def _sized(table: Table) -> list[tuple[str, Cell]]:
    pairs = zip(table.columns(), table.cells, strict=True)
    return [(column, cell) for column, cell in pairs if cell.sort in ("blob", "text")]


@cache
def _counting(table: Table, plain: bool) -> Sql:
    return Sql(f"SELECT count(*) FROM {table.name} WHERE tenant = :tenant AND {_needs(table, plain)}")
