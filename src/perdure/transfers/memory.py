"""Copy the memory of a tenant into any store. Each namespace is copied in one transaction, under a new number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from perdure.errors import UsageError
from perdure.log.thread_table import next_number
from perdure.memory.labels import labels_of
from perdure.memory.rows import ADD_ITEM, ADD_VECTOR, OPENS, ROW_COLUMNS, SEQUENCE_BITS
from perdure.memory.tables import ITEM_VECTOR, ITEM_WORDS
from perdure.storage.program import Batch, Program, Row, Rows, Sql, drive, read, write
from perdure.threads.context import StoreContext
from perdure.transfers.read_ahead import PATIENCE, Put, ReadAhead

_PAGE = 500
_COLUMNS = ROW_COLUMNS.split(", ")
_SPACES = Sql("SELECT space, path FROM memory_space WHERE tenant = :tenant ORDER BY space")
_SPACE = Sql("SELECT last, items, bytes, policy FROM memory_space WHERE tenant = :tenant AND path = :path")
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


def copy_memory(source: StoreContext, target: StoreContext, wanted: Callable[[str], bool] | None = None) -> int:
    """Copy the namespaces of a tenant, all or those whose path is `wanted`. Return how many versions were copied.

    A namespace that the target has already is skipped. Raises UsageError if it differs there.
    """
    here = drive(source.driver, source.tenant())
    if here is None:
        return 0
    there = drive(target.driver, target.ensure_tenant())
    return sum(
        drive(target.driver, write(partial(_copy, source, here, there, space, path), solo=True))
        for space, path in drive(source.driver, read(partial(namespaces_of, here)))
        if wanted is None or wanted(path)
    )


def namespaces_of(tenant: int) -> Program[Rows]:
    """Return the numbers and paths of all namespaces."""
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
