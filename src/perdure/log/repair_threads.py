"""Repair the rows of threads, and create rows for threads that have records but no row.

A row with a value of a wrong type is deleted. Then its thread is created again from its records.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import orjson

from perdure.errors import Damaged
from perdure.log.gc_plan import Cut, find_roots, read_tree
from perdure.log.ids import ID_MAX
from perdure.log.tables import TAG_VALUE, THREAD_METADATA
from perdure.log.thread_table import (
    DROP_TAGS,
    MINUTE_US,
    SET_METADATA,
    THREAD_COLUMNS,
    THREAD_ENCRYPTED,
    ThreadRow,
    tag_value,
    thread_row,
    threads_in_tree,
)
from perdure.log.verify import tag_statements, tags_fit
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write_repair

Notes = list[tuple[str, int | None, str]]  # a thread's name, a record (None: the thread or the store), a description

_PAGE = 200
_TIME_MAX = 1 << 53
_JUMP = 1 << 20  # a generation that no writer has seen, so that none continues from data it read before
_THREADS = Sql(
    f"""SELECT {", ".join(THREAD_COLUMNS)} FROM thread
    WHERE tenant = :tenant AND thread > :after ORDER BY thread LIMIT :limit""",
    opens=THREAD_ENCRYPTED,
    tolerant=True,
)
_SET_TREE = Sql("UPDATE thread SET tree = :tree WHERE tenant = :tenant AND thread = :thread")
_DROP = Sql("DELETE FROM thread WHERE tenant = :tenant AND thread = :thread")
# Selects the tree of a head. A head without its parent there is itself in a wrong tree.
_TREE_OF_HEAD = Sql(
    """SELECT tree FROM record r WHERE tenant = :tenant AND id = :id AND hash = :hash AND (parent IS NULL
        OR EXISTS (SELECT 1 FROM record p WHERE p.tenant = :tenant AND p.tree = r.tree AND p.id = r.parent)) LIMIT 2"""
)
_ADD_TAG = Sql(
    "INSERT INTO tag (tenant, key, value, thread) VALUES (:tenant, :key, :value, :thread) ON CONFLICT DO NOTHING",
    seals={"value": TAG_VALUE},
)
_TAGS = Sql("SELECT key, value FROM tag WHERE tenant = :tenant AND thread = :thread")
# Selects threads that have records but no row. A deleted thread is among them if others need some of its records.
_OWNERLESS = Sql(
    """SELECT r.tree, r.thread, max(r.at) FROM record r WHERE r.tenant = :tenant AND r.body IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.thread AND t.tree = r.tree)
    GROUP BY r.tree, r.thread ORDER BY 1, 2"""
)
_HOMELESS = Sql(
    """DELETE FROM record AS r WHERE r.tenant = :tenant
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.tree = r.tree) RETURNING id"""
)
_ADD_THREAD = Sql(
    """INSERT INTO thread (tenant, thread, tree, name, metadata, generation, head, head_hash, created_at, updated_at,
        active)
    VALUES (:tenant, :thread, :tree, :name, :metadata, :generation, 0, :head_hash, :at, :at, :active)
    ON CONFLICT DO NOTHING RETURNING thread""",
    seals={"metadata": THREAD_METADATA},
)


def repair_thread_rows(tenant: int) -> Flow[tuple[Notes, Notes]]:
    """Repair the rows and tags of threads. Return notes on what was repaired, and on what is lost."""
    repaired, lost = Notes(), Notes()
    after: int | None = -(1 << 63)
    while after is not None:
        after, mended, dropped = yield from write_repair(partial(_repair_page, tenant, after))
        repaired += mended
        lost += dropped
    return repaired, lost


def _repair_page(tenant: int, after: int) -> Program[tuple[int | None, Notes, Notes]]:
    [rows] = yield Batch(_THREADS(tenant=tenant, after=after, limit=_PAGE))
    repaired, lost = Notes(), Notes()
    for row in rows:
        try:
            repaired += yield from _repair_thread(tenant, thread_row(row))
        except Damaged:  # `find_lost_threads` creates it again from its records
            yield Batch(_DROP(tenant=tenant, thread=row[0]))
            lost.append((row[2] if type(row[2]) is str else "(store)", None, "the thread's row is damaged"))
    return (rows[-1][0] if rows and type(rows[-1][0]) is int else None), repaired, lost


def _repair_thread(tenant: int, row: ThreadRow) -> Generator[Batch, list[Rows], Notes]:
    """Repair a thread's tree, which its head's hash proves, and its tags, which its metadata proves."""
    scope, notes = {"tenant": tenant, "thread": row.thread}, Notes()
    [trees] = yield Batch(_TREE_OF_HEAD(tenant=tenant, id=row.head, hash=row.head_hash))
    if len(trees) == 1 and trees[0][0] != row.tree:
        yield Batch(_SET_TREE(**scope, tree=trees[0][0]))
        notes.append((row.name, None, "the thread's row was repaired: tree"))
    metadata = _json(row.metadata)
    if type(metadata) is not dict:
        metadata = {}
        yield Batch(SET_METADATA(**scope, metadata="{}"))
        notes.append((row.name, None, "its metadata could not be read and was removed"))
    answers = yield Batch(*tag_statements(tenant, {row.thread: metadata}))
    if not tags_fit(answers, len(metadata)):
        yield _write_tags(tenant, row.thread, metadata)
        notes.append((row.name, None, "what it is found by (its metadata) was rebuilt"))
    return notes


def _write_tags(tenant: int, thread: int, metadata: dict[str, Any]) -> Batch:
    scope = {"tenant": tenant, "thread": thread}
    tags = [_ADD_TAG(**scope, key=key, value=tag_value(value)) for key, value in metadata.items()]
    return Batch(DROP_TAGS(**scope), *tags)


def is_id(value: object) -> bool:
    """Return whether a value can be the id of a record."""
    return type(value) is int and 0 <= value <= ID_MAX


def _json(text: Any) -> Any:
    try:
        return orjson.loads(text)
    except (ValueError, TypeError):
        return None


def find_lost_threads(tenant: int, names: Mapping[int, str]) -> Program[tuple[Notes, Notes]]:
    """Create rows for threads that have lost theirs, and delete records that belong to no tree.

    `names` has the names that are known of such threads, by number. Return notes on the threads, and on the deleted
    records."""
    notes: Notes = []
    [rows] = yield Batch(_OWNERLESS(tenant=tenant))
    for tree, owner, at in rows:
        if type(tree) is int and type(owner) is int and (yield from _is_lost(tenant, tree, owner)):
            at = at if type(at) is int and 0 <= at < _TIME_MAX else 1
            [tags] = yield Batch(_TAGS(tenant=tenant, thread=owner))
            metadata = {key: value for key, text in tags if (value := _json(text)) is not None}
            values = {"tenant": tenant, "thread": owner, "tree": tree, "head_hash": bytes(32)}
            values |= {"metadata": orjson.dumps(metadata).decode(), "generation": _JUMP, "at": at}
            # A name may be taken: then the thread gets a new one.
            for name in dict.fromkeys((names.get(owner, f"recovered-{owner}"), f"recovered-{owner}")):
                [inserted] = yield Batch(_ADD_THREAD(**values, name=name, active=at // MINUTE_US))
                if inserted:
                    lost_too = "" if name == names.get(owner) else ", with its name"
                    notes.append(
                        (name, None, f"the row of thread {owner} was lost{lost_too}; its checkpoints are here")
                    )
                    yield _write_tags(tenant, owner, metadata)  # without those that could not be read
                    break
    [homeless] = yield Batch(_HOMELESS(tenant=tenant))
    lost = [("(store)", record if is_id(record) else None, "it belongs to no thread") for (record,) in homeless]
    return notes, lost


def _is_lost(tenant: int, tree: int, owner: int) -> Generator[Batch, list[Rows], bool]:
    """Return whether a thread is missing although it was not deleted.

    Then it has a record that no other thread needs, which a deletion would have removed."""
    try:
        state = yield from read_tree(tenant, tree, (yield from threads_in_tree(tenant, tree)))
        live, _ = yield from find_roots(state, Cut())
    except Damaged:
        return False
    return not live.issuperset(state.own[owner])
