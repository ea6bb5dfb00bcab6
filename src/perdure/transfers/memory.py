"""Copying the memory of a tenant into any store: a namespace arrives whole or not at all, under a number of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.errors import UsageError
from perdure.log.thread_table import next_number
from perdure.memory.labels import labels_of
from perdure.memory.rows import ADD_ITEM, ADD_VECTOR, OPENS, ROW_COLUMNS, SEQUENCE_BITS
from perdure.storage.columns import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.program import Batch, Program, Row, Rows, Sql, drive, read, write
from perdure.threads.context import StoreContext
from perdure.transfers.read_ahead import PATIENCE, Put, ReadAhead

_PAGE = 500
_COLUMNS = ROW_COLUMNS.split(", ")
_SPACES = Sql("SELECT space, path FROM memory_space WHERE tenant = :tenant ORDER BY space")
_SPACE = Sql("SELECT last, items, bytes, policy FROM memory_space WHERE tenant = :tenant AND path = :path")
# What tells a namespace from another state of it, on any store; the remainders, because sums of times are too large.
_STATE = Sql(
    """SELECT last, items, s.bytes, policy, count(*), sum(i.at % 1000003), sum(coalesce(i.ended_at, 0) % 1000003),
        sum(coalesce(i.expires, 0) % 1000003), count(v.id), max(v.model)
    FROM memory_space s LEFT JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
        LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id
    WHERE s.tenant = :tenant AND path = :path GROUP BY last, items, s.bytes, policy"""
)
_IN_SPACE = "tenant = :tenant AND space = :space"
_DROPS = (
    Sql(f"DELETE FROM memory_vector WHERE tenant = :tenant AND id IN (SELECT id FROM memory_item WHERE {_IN_SPACE})"),
    *(Sql(f"DELETE FROM {table} WHERE {_IN_SPACE}") for table in ("memory_item", "memory_space")),
)
_ADD_SPACE = Sql(
    """INSERT INTO memory_space (tenant, space, path, last, generation, items, bytes, policy)
    VALUES (:tenant, :space, :path, :last, 0, :items, :bytes, :policy)"""
)
_ITEMS = Sql(
    f"""SELECT {", ".join(f"i.{name}" for name in _COLUMNS)}, i.words,
        (SELECT v.model FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id),
        (SELECT v.vec FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id)
    FROM memory_item i
    WHERE i.tenant = :tenant AND i.space = :space AND i.id > :after ORDER BY i.id LIMIT :limit""",
    opens=OPENS | {14: ITEM_WORDS.at(0), 16: ITEM_VECTOR.at(0)},
)


def copy_memory(
    source: StoreContext,
    target: StoreContext,
    wanted: Callable[[str], bool] | None = None,
    *,
    replace: bool = False,
) -> int:
    """Copy the namespaces of a tenant, all or those whose paths are wanted; one that the target has as it is here is
    skipped. How many versions. `replace`: the target has no others afterwards; without it, one that differs is
    refused."""
    here = drive(source.driver, source.tenant())
    if here is None:
        return 0
    there = drive(target.driver, target.ensure_tenant())
    if replace:
        for number, path in drive(target.driver, read(partial(_spaces, there))):
            if not (wanted is None or wanted(path)) or _state(source, here, path) != _state(target, there, path):
                drive(target.driver, write(partial(_drop, there, number)))
    spaces: Rows = drive(source.driver, read(partial(_spaces, here)))
    return sum(
        drive(target.driver, write(partial(_copy, source, here, there, space, path), solo=True))
        for space, path in spaces
        if wanted is None or wanted(path)
    )


def _state(ctx: StoreContext, tenant: int, path: str) -> Any:
    def program() -> Program[Rows]:
        [found] = yield Batch(_STATE(tenant=tenant, path=path), last=True)
        return found

    return drive(ctx.driver, read(program))


def _drop(tenant: int, space: int) -> Program[None]:
    yield Batch(*(sql(tenant=tenant, space=space) for sql in _DROPS))


def _spaces(tenant: int) -> Program[Rows]:
    [found] = yield Batch(_SPACES(tenant=tenant), last=True)
    return found


def _copy(source: StoreContext, here: int, there: int, space: int, path: str) -> Program[int]:
    yield Batch(PATIENCE())
    [known] = yield Batch(_SPACE(tenant=there, path=path))
    count = 0
    with ReadAhead(source.driver, partial(_read, here, space, path)) as pages:
        found: Row = next(pages)
        if known:
            if tuple(known[0][:3]) == tuple(found[:3]):
                return 0
            raise UsageError(
                f"the target has memory in the namespace {'/'.join(labels_of(path))!r} already, and it differs: "
                "nothing of it was copied. Transfer into another store or tenant"
            )
        number = yield from next_number()
        last, items, size, policy = found
        yield Batch(
            _ADD_SPACE(tenant=there, space=number, path=path, last=last, items=items, bytes=size, policy=policy)
        )
        for rows in pages:
            for row in rows:
                new = number << SEQUENCE_BITS | (row[0] & ((1 << SEQUENCE_BITS) - 1))
                given = dict(zip(_COLUMNS, row[:14], strict=True)) | {"id": new}
                yield Batch(ADD_ITEM(tenant=there, space=number, words=row[14], **given))
                if row[16] is not None:
                    yield Batch(ADD_VECTOR(tenant=there, id=new, model=row[15], vec=row[16]))
            count += len(rows)
    return count


def _read(tenant: int, space: int, path: str, put: Put) -> Program[None]:
    [[row]] = yield Batch(_SPACE(tenant=tenant, path=path))
    put(row)
    after = 0
    while rows := (yield Batch(_ITEMS(tenant=tenant, space=space, after=after, limit=_PAGE)))[0]:
        put(rows)
        after = rows[-1][0]
