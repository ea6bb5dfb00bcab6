"""Copy the memory of a tenant into any store. Each namespace is copied in one transaction, under a new number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.errors import UsageError
from perdure.log.thread_table import next_number
from perdure.memory.labels import labels_of
from perdure.memory.rows import ADD_ITEM, ADD_VECTOR, OPENS, ROW_COLUMNS, SEQUENCE_BITS
from perdure.memory.tables import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.program import Batch, Program, Row, Sql, drive, fetch, write
from perdure.threads.context import StoreContext
from perdure.transfers.read_ahead import PATIENCE, Put, ReadAhead

_PAGE = 500
_COLUMNS = ROW_COLUMNS.split(", ")
NAMESPACES = Sql("SELECT space, path FROM memory_space WHERE tenant = :tenant ORDER BY space")
_SPACE = Sql(
    "SELECT last, items, bytes, policy, space, merged FROM memory_space WHERE tenant = :tenant AND path = :path"
)
_ADD_SPACE = Sql(
    """INSERT INTO memory_space (tenant, space, path, last, generation, items, bytes, policy, merged)
    VALUES (:tenant, :space, :path, :last, 0, :items, :bytes, :policy, :merged)"""
)
_ITEM = Sql(f"SELECT {ROW_COLUMNS} FROM memory_item WHERE tenant = :tenant AND id = :id", opens=OPENS)
_ITEMS = Sql(
    f"""SELECT {", ".join(f"i.{name}" for name in _COLUMNS)}, i.words,
        (SELECT v.model FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id),
        (SELECT v.vec FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id)
    FROM memory_item i
    WHERE i.tenant = :tenant AND i.space = :space AND i.id > :after ORDER BY i.id LIMIT :limit""",
    opens=OPENS | {14: ITEM_WORDS.at(0), 16: ITEM_VECTOR.at(0)},
)


def copy_memory(source: StoreContext, target: StoreContext, chosen: Callable[[str], bool] | None = None) -> int:
    """Copy the namespaces of a tenant, all or those whose path is `chosen`. Return how many versions were copied.

    A namespace that the target has already is skipped. Raises UsageError if it differs there.
    """
    here = drive(source.driver, source.tenant())
    if here is None:
        return 0
    there = drive(target.driver, target.ensure_tenant())
    return sum(
        drive(target.driver, write(partial(_copy, source, here, there, space, path), solo=True))
        for space, path in drive(source.driver, fetch(NAMESPACES, tenant=here))
        if chosen is None or chosen(path)
    )


def _copy(source: StoreContext, here: int, there: int, space: int, path: str) -> Program[int]:
    yield Batch(PATIENCE())
    [known] = yield Batch(_SPACE(tenant=there, path=path))
    count = 0
    with ReadAhead(source.driver, partial(_read, here, space, path)) as pages:
        last, items, size, policy, _, merged = next(pages)
        if known:
            if known[0][:3] != (last, items, size):
                raise _differs(path)
            number = known[0][4]
        else:
            number = yield from next_number()
            columns = {"last": last, "items": items, "bytes": size, "policy": policy, "merged": merged}
            yield Batch(_ADD_SPACE(tenant=there, space=number, path=path, **columns))
        for rows in pages:
            versions = [_renumbered(row, number) for row in rows]
            if known:
                yield from _check_same(there, path, versions)
                continue
            for row, version in zip(rows, versions, strict=True):
                yield Batch(ADD_ITEM(tenant=there, space=number, words=row[14], **version))
                if row[16] is not None:
                    yield Batch(ADD_VECTOR(tenant=there, id=version["id"], model=row[15], vec=row[16]))
            count += len(rows)
    return count


def _renumbered(row: Row, space: int) -> dict[str, Any]:
    """Return the columns of a version as they are in another namespace."""
    id = space << SEQUENCE_BITS | (row[0] & ((1 << SEQUENCE_BITS) - 1))
    return dict(zip(_COLUMNS, (id, *row[1:14]), strict=True))


def _check_same(tenant: int, path: str, versions: list[dict[str, Any]]) -> Program[None]:
    """Raise UsageError unless the target has these versions. Reads may have moved the time when one expires."""
    answers = yield Batch(*(_ITEM(tenant=tenant, id=version["id"]) for version in versions))
    for version, rows in zip(versions, answers, strict=True):
        if not rows or dict(zip(_COLUMNS, rows[0], strict=True)) | {"expires": version["expires"]} != version:
            raise _differs(path)


def _differs(path: str) -> UsageError:
    return UsageError(
        f"the target has memory in the namespace {'/'.join(labels_of(path))!r} already, and it differs: "
        "nothing of it was copied. Transfer into another store or tenant"
    )


def _read(tenant: int, space: int, path: str, put: Put) -> Program[None]:
    [[row]] = yield Batch(_SPACE(tenant=tenant, path=path))
    put(row)
    after = 0
    while rows := (yield Batch(_ITEMS(tenant=tenant, space=space, after=after, limit=_PAGE)))[0]:
        put(rows)
        after = rows[-1][0]
