"""Repair of threads: rows whose columns are damaged, and threads whose row is lost though their records are there."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import orjson

from perdure.errors import Damaged
from perdure.log.gc_plan import Cut, find_roots, read_tree
from perdure.log.ids import ID_MAX
from perdure.log.thread_table import MINUTE_US, tag_value, threads_in_tree
from perdure.log.verify import tag_statements, tags_fit
from perdure.storage.columns import TAG, THREAD_METADATA
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write

Notes = list[tuple[str, int | None, str]]  # a thread's name, which record (None: the thread itself, the store), what

_PAGE = 200
_TIME_MAX = 1 << 53
_JUMP = 1 << 20  # of a generation: no writer continues from what it had read before
_THREADS = Sql(
    """SELECT thread, tree, name, metadata, origin, generation, head, head_hash, created_at, updated_at, source
    FROM thread WHERE tenant = :tenant AND thread > :after ORDER BY thread LIMIT :limit""",
    opens={3: THREAD_METADATA.at(0)},
    tolerant="all",
)
_SET_THREAD = Sql(
    """UPDATE thread SET tree = :tree, name = :name, metadata = :metadata, origin = :origin, generation = :generation,
        head = :head, head_hash = :head_hash, created_at = :created_at, updated_at = :updated_at, active = :active,
        source = :source
    WHERE tenant = :tenant AND thread = :thread""",
    seals={"metadata": THREAD_METADATA},
)
_FORGET_SOURCES = Sql("UPDATE thread SET source = NULL WHERE tenant = :tenant AND tree = :tree")
_FIX_ACTIVE = Sql(
    f"""UPDATE thread SET active = updated_at / {MINUTE_US} WHERE tenant = :tenant AND thread = :thread
    AND active <> updated_at / {MINUTE_US}"""
)
_TREE_OF_HEAD = Sql("SELECT tree FROM record WHERE tenant = :tenant AND id = :id AND hash = :hash LIMIT 2")
_DROP_TAGS = Sql("DELETE FROM tag WHERE tenant = :tenant AND thread = :thread")
_ADD_TAG = Sql(
    "INSERT INTO tag (tenant, key, value, thread) VALUES (:tenant, :key, :value, :thread) ON CONFLICT DO NOTHING",
    seals={"value": TAG},
)
_TAGS = Sql("SELECT key, value FROM tag WHERE tenant = :tenant AND thread = :thread")
# Records whose thread has no row. Of a thread that was deleted, only what others need has stayed.
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
_COLUMNS = (
    *("tree", "name", "metadata", "origin", "generation", "head", "head_hash", "created_at", "updated_at", "source"),
)


def repair_thread_rows(tenant: int) -> Flow[Notes]:
    """The rows of threads: columns that are not of their types, the tree, and the tags that a thread is found by."""
    notes: Notes = []
    after: int | None = -(1 << 63)
    while after is not None:
        after, found = yield from write(partial(_repair_page, tenant, after))
        notes += found
    return notes


def _repair_page(tenant: int, after: int) -> Program[tuple[int | None, Notes]]:
    [rows] = yield Batch(_THREADS(tenant=tenant, after=after, limit=_PAGE))
    notes: Notes = []
    for row in rows:
        notes += yield from _repair_thread(tenant, row)
    return (rows[-1][0] if rows and type(rows[-1][0]) is int else None), notes


def _repair_thread(tenant: int, row: tuple[Any, ...]) -> Generator[Batch, list[Rows], Notes]:
    number, tree, name, metadata, origin, generation, head, head_hash, created, updated, source = row
    values = _json(metadata)
    fits = {
        "tree": (type(tree) is int, number),
        "name": (type(name) is str and name, f"recovered-{number}"),
        "metadata": (type(values) is dict, "{}"),
        "origin": (origin is None or is_id(origin), None),
        "generation": (type(generation) is int and 0 <= generation < 1 << 60, _JUMP),
        "head": (head is None or is_id(head), 0),  # not there: repairing the tree finds the newest
        "head_hash": (head_hash is None or (type(head_hash) is bytes and len(head_hash) == 32), bytes(32)),
        "created_at": (_is_time(created), updated if _is_time(updated) else 1),
        "updated_at": (_is_time(updated), created if _is_time(created) else 1),
        "source": (source is None or type(source) is int, None),
    }
    fixed = {column: value for column, (sound, value) in fits.items() if not sound}
    if is_id(head) and "tree" not in fixed:
        [found] = yield Batch(_TREE_OF_HEAD(tenant=tenant, id=head, hash=head_hash))
        fixed |= {"tree": found[0][0]} if len(found) == 1 and found[0][0] != tree else {}
    notes: Notes = []
    if fixed:
        whole = {"thread": number, **dict(zip(_COLUMNS, row[1:], strict=True)), **fixed}
        yield Batch(_SET_THREAD(tenant=tenant, **whole, active=whole["updated_at"] // MINUTE_US))
        if "source" in fixed:  # who was forked from whom is not known: threads without a source are not read alone
            yield Batch(_FORGET_SOURCES(tenant=tenant, tree=whole["tree"]))
        name = whole["name"]
        notes.append((name, None, f"the thread's row was repaired: {', '.join(sorted(fixed))}"))
    else:
        yield Batch(_FIX_ACTIVE(tenant=tenant, thread=number))
    values = values if type(values) is dict else {}
    answers = yield Batch(*tag_statements(tenant, {number: values}))
    if not tags_fit(answers, len(values)):
        this = {"tenant": tenant, "thread": number}
        tags = [_ADD_TAG(**this, key=key, value=tag_value(value)) for key, value in values.items()]
        yield Batch(_DROP_TAGS(**this), *tags)
        notes.append((name, None, "what it is found by (its metadata) was rebuilt"))
    return notes


def _is_time(value: object) -> bool:
    return type(value) is int and 0 <= value < _TIME_MAX


def is_id(value: object) -> bool:
    """Whether a value can be the id of a record."""
    return type(value) is int and 0 <= value <= ID_MAX


def _json(text: Any) -> Any:
    try:
        return orjson.loads(text)
    except (ValueError, TypeError):
        return None


def find_lost_threads(tenant: int) -> Program[tuple[Notes, Notes]]:
    """Make threads again whose row is lost and whose records are there; records that belong to no thread are lost."""
    found: Notes = []
    [rows] = yield Batch(_OWNERLESS(tenant=tenant))
    for tree, owner, at in rows:
        if type(tree) is int and type(owner) is int and (yield from _is_lost(tenant, tree, owner)):
            at = at if type(at) is int and 0 <= at < _TIME_MAX else 1
            [tags] = yield Batch(_TAGS(tenant=tenant, thread=owner))
            metadata = {key: value for key, text in tags if (value := _json(text)) is not None}
            this = {
                "tenant": tenant,
                "thread": owner,
                "tree": tree,
                "name": f"recovered-{owner}",
                "head_hash": bytes(32),
            }
            this |= {"metadata": orjson.dumps(metadata).decode(), "generation": _JUMP, "at": at}
            [made] = yield Batch(_ADD_THREAD(**this, active=at // MINUTE_US))
            if made:
                what = f"the row of thread {owner} was lost, with its name; its checkpoints are here"
                found.append((f"recovered-{owner}", None, what))
    [homeless] = yield Batch(_HOMELESS(tenant=tenant))
    lost = [("(store)", record if is_id(record) else None, "it belongs to no thread") for (record,) in homeless]
    return found, lost


def _is_lost(tenant: int, tree: int, owner: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a thread is missing that was not deleted: some record of its own is needed by no other thread."""
    try:
        found = yield from read_tree(tenant, tree, (yield from threads_in_tree(tenant, tree)))
        live, _ = yield from find_roots(found, Cut())
    except Damaged:
        return False
    return not live.issuperset(found.own[owner])
