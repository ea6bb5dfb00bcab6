"""Repairing what has lost its owner: records without a thread, bodies and packs without a record, rows of threads that
are gone. A thread whose row is lost is made again, under a name of its own, if its records are there.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import orjson

from perdure.errors import Damaged
from perdure.log.branches import MINUTE_US, threads_in_tree
from perdure.log.choosing import needed_by, nodes_of
from perdure.log.mended import Done
from perdure.log.pins import pins_in
from perdure.log.quarantine import set_aside
from perdure.log.reading import NOT_SWEPT
from perdure.log.records import R_COLUMNS, RECORD_CELLS, record_of
from perdure.storage.cells import THREAD_METADATA
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write

_PAGE = 200
_JUMP = 1 << 20
_ALIVE = f"""r.tenant = :tenant AND {NOT_SWEPT}
    AND NOT EXISTS (SELECT 1 FROM sweep s WHERE s.tenant = r.tenant AND s.tree = r.tree AND s.id = 0)"""
_OWNERLESS = Sql(
    f"""SELECT DISTINCT r.tree, r.thread FROM record r WHERE {_ALIVE} AND r.body IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.thread AND t.tree = r.tree)
    ORDER BY 1, 2"""
)
_IN_TREE = Sql(
    f"""SELECT {R_COLUMNS} FROM record r WHERE {_ALIVE} AND r.tree = :tree AND r.thread = :thread
    ORDER BY r.id DESC LIMIT :limit""",
    opens=RECORD_CELLS,
    tolerant="all",
)
_LONELY = Sql(
    f"""SELECT {R_COLUMNS} FROM record r WHERE {_ALIVE}
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.tree = r.tree) LIMIT :limit""",
    opens=RECORD_CELLS,
    tolerant="all",
)
_HAS_TREE = Sql("SELECT 1 FROM thread WHERE tenant = :tenant AND tree = :tree LIMIT 1")
_TAGS = Sql("SELECT key, value FROM tag WHERE tenant = :tenant AND thread = :thread")
_ADD_THREAD = Sql(
    """INSERT INTO thread (tenant, thread, tree, name, metadata, generation, head, head_hash, created_at, updated_at,
        active, stamp)
    VALUES (:tenant, :thread, :tree, :name, :metadata, :generation, :head, :head_hash, :at, :at, :active, {stamp})
    ON CONFLICT DO NOTHING RETURNING thread""",
    seals={"metadata": THREAD_METADATA},
)
_ORPHANS = Sql(
    """SELECT id FROM body WHERE tenant = :tenant
    EXCEPT SELECT body FROM record WHERE tenant = :tenant LIMIT :limit"""
)
_ORPHAN_PACKS = Sql(
    """SELECT pack FROM pack WHERE tenant = :tenant
    EXCEPT SELECT -body FROM record WHERE tenant = :tenant AND body < 0 LIMIT :limit"""
)
_OF_THREADS = {
    table: Sql(
        f"SELECT {', '.join(key)} FROM {table} o WHERE tenant = :tenant AND NOT EXISTS"
        " (SELECT 1 FROM thread t WHERE t.tenant = o.tenant AND t.thread = o.thread) LIMIT :limit"
    )
    for table, key in {
        "label": ("thread", "space", "id"),
        "space": ("thread", "name"),
        "write": ("thread", "space", "id", "task", "idx"),
        "pin": ("thread", "name"),
        "tag": ("key", "value", "thread"),
    }.items()
}
_DROP_SWEPT = Sql(
    sqlite="DELETE FROM sweep WHERE typeof(tree) <> 'integer' OR typeof(id) <> 'integer'", postgres="SELECT 1"
)


def repair_strays(tenant: int) -> Flow[Done]:
    """Records that no thread has: their thread is made again."""
    return (yield from write(partial(_strays, tenant), solo=True))


def _strays(tenant: int) -> Program[Done]:
    done = Done()
    _, pairs = yield Batch(_DROP_SWEPT(), _OWNERLESS(tenant=tenant))
    for tree, owner in pairs:
        if type(tree) is int and type(owner) is int and (yield from _lost_its_row(tenant, tree, owner)):
            yield from _make_thread(tenant, tree, owner, done)
    while True:
        [lonely] = yield Batch(_LONELY(tenant=tenant, limit=_PAGE))
        for row in lonely:
            yield from set_aside(tenant, "record", (row[0], row[1]), "it belongs to no thread", drop=True)
            if type(row[15]) is int and row[15] > 0:
                yield from set_aside(tenant, "body", (row[15],), "of a record that belongs to no thread", drop=False)
            number = row[1] if type(row[1]) is int and row[1] >= 0 else None
            done.lost.append(("(store)", number, "it belongs to no thread"))
        if not lonely:
            return done


def _is_sound(row: tuple[Any, ...]) -> bool:
    try:
        record_of(row)
    except Damaged:
        return False
    return True


def _lost_its_row(tenant: int, tree: int, owner: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a thread is missing that was not deleted: of a deleted one, only what others need has stayed."""
    others, rows = yield Batch(
        _HAS_TREE(tenant=tenant, tree=tree), _IN_TREE(tenant=tenant, tree=tree, thread=owner, limit=_PAGE)
    )
    if not any(_is_sound(row) for row in rows):
        return False
    if not others:
        return True
    try:
        threads = yield from threads_in_tree(tenant, tree)
        nodes = yield from nodes_of(tenant, tree)
        needed = yield from needed_by(tenant, nodes, threads)
        owners = {thread.thread for thread in threads}
        needed |= {pin.record for pin in (yield from pins_in(tenant, tree)) if pin.thread in owners}
    except Damaged:
        return False
    return any(node.thread == owner and node.body is not None and node.id not in needed for node in nodes.values())


def _make_thread(tenant: int, tree: int, owner: int, done: Done) -> Generator[Batch, list[Rows], None]:
    [rows] = yield Batch(_IN_TREE(tenant=tenant, tree=tree, thread=owner, limit=1))
    at = rows[0][8] if rows and type(rows[0][8]) is int and 0 <= rows[0][8] < 1 << 53 else 0
    name = f"recovered-{owner}"
    [tags] = yield Batch(_TAGS(tenant=tenant, thread=owner))
    metadata = {key: value for key, text in tags if (value := _value(text)) is not None}
    [made] = yield Batch(
        _ADD_THREAD(
            tenant=tenant,
            thread=owner,
            tree=tree,
            name=name,
            metadata=orjson.dumps(metadata).decode(),
            generation=_JUMP,
            head=0,  # not there: repairing the tree finds the newest
            head_hash=bytes(32),
            at=at,
            active=at // MINUTE_US,
        )
    )
    if made:
        done.mended.append((name, None, f"the row of thread {owner} was lost, with its name; its checkpoints are here"))


def _value(text: Any) -> Any:
    """A metadata value from what it is looked up by; None if that does not tell."""
    try:
        return orjson.loads(text)
    except (ValueError, TypeError):
        return None


def drop_orphans(tenant: int) -> Flow[Done]:
    """Bodies and packs that no record has, and rows of threads that are gone: kept in quarantine, and removed."""
    done = Done()
    sources = {"body": _ORPHANS, "pack": _ORPHAN_PACKS, **_OF_THREADS}
    for table, sql in sources.items():
        removed = 0
        while some := (yield from write(partial(_drop_some, tenant, table, sql))):
            removed += some
        if removed:
            done.mended.append(("(store)", None, f"{removed} rows of {table} that belong to nothing were set aside"))
    return done


def _drop_some(tenant: int, table: str, sql: Sql) -> Program[int]:
    [rows] = yield Batch(sql(tenant=tenant, limit=_PAGE))
    for row in rows:
        yield from set_aside(tenant, table, row, "it belongs to nothing", drop=True)
    return len(rows)
