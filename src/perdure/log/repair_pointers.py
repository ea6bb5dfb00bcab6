"""Repair of what points at records: threads and their heads, labels, namespaces, pins, tags, pending writes, packs.

All of it is a cache of the log, or a name for a part of it. What names a record that is gone goes to quarantine and is
never pointed at another record; a head moves back to the newest checkpoint that is left.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import orjson

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.envelopes import id_of
from perdure.log.gc_plan import Cut, find_roots, read_tree
from perdure.log.ids import ID_MAX, show_id
from perdure.log.labels import LABELLED_KIND, MAIN
from perdure.log.pending import writes_of
from perdure.log.quarantine import set_aside
from perdure.log.reading import NOT_SWEPT, read_state
from perdure.log.thread_table import MINUTE_US, ThreadRow, tag_value, threads_in_tree
from perdure.log.verify import tag_statements, tags_fit
from perdure.storage.columns import TAG, THREAD_METADATA, WRITE
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write

Notes = list[tuple[str, int | None, str]]  # a thread's name, which record (None: the thread itself, the store), what
Step = Generator[Batch, list[Rows], Notes]

_PAGE = 200
_TIME_MAX = 1 << 53
_JUMP = 1 << 20  # of a generation: no writer continues from what it had read before
_LOST = "its checkpoint is lost"
_CANNOT_READ = (Damaged, Undecodable, NotEncrypted)
_THREADS = Sql(
    """SELECT thread, tree, name, metadata, origin, generation, head, head_hash, created_at, updated_at
    FROM thread WHERE tenant = :tenant AND thread > :after ORDER BY thread LIMIT :limit""",
    opens={3: THREAD_METADATA.at(0)},
    tolerant="all",
)
_SET_THREAD = Sql(
    """UPDATE thread SET tree = :tree, name = :name, metadata = :metadata, origin = :origin, generation = :generation,
        head = :head, head_hash = :head_hash, created_at = :created_at, updated_at = :updated_at, active = :active
    WHERE tenant = :tenant AND thread = :thread""",
    seals={"metadata": THREAD_METADATA},
)
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
    f"""SELECT r.tree, r.thread, max(r.at) FROM record r WHERE r.tenant = :tenant AND {NOT_SWEPT} AND r.body IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM sweep s WHERE s.tenant = r.tenant AND s.tree = r.tree AND s.id = 0)
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.thread AND t.tree = r.tree)
    GROUP BY r.tree, r.thread ORDER BY 1, 2"""
)
_HOMELESS = Sql(
    f"""SELECT r.tree, r.id FROM record r WHERE r.tenant = :tenant AND {NOT_SWEPT}
    AND NOT EXISTS (SELECT 1 FROM sweep s WHERE s.tenant = r.tenant AND s.tree = r.tree AND s.id = 0)
    AND NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.tree = r.tree) LIMIT :limit"""
)
_ADD_THREAD = Sql(
    """INSERT INTO thread (tenant, thread, tree, name, metadata, generation, head, head_hash, created_at, updated_at,
        active)
    VALUES (:tenant, :thread, :tree, :name, :metadata, :generation, 0, :head_hash, :at, :at, :active)
    ON CONFLICT DO NOTHING RETURNING thread""",
    seals={"metadata": THREAD_METADATA},
)
_HASH = Sql(
    f"""SELECT hash FROM record r WHERE tenant = :tenant AND tree = :tree AND id = :id AND body IS NOT NULL
    AND {NOT_SWEPT}"""
)
_BY_HASH = Sql(
    f"""SELECT id FROM record r WHERE tenant = :tenant AND tree = :tree AND hash = :hash AND body IS NOT NULL
    AND {NOT_SWEPT}"""
)
_PARENT = Sql("SELECT parent FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
# The newest of a thread's own line: what has an id in another namespace is not part of it.
_NEWEST = Sql(
    f"""SELECT r.id FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.thread = :thread
    AND r.body IS NOT NULL AND {NOT_SWEPT} AND NOT EXISTS (SELECT 1 FROM label l WHERE l.tenant = r.tenant
        AND l.thread = r.thread AND l.record = r.id AND l.space <> 0)
    ORDER BY r.id DESC LIMIT 1"""
)
_SET_HEAD = Sql("UPDATE thread SET head = :head, head_hash = :hash WHERE tenant = :tenant AND thread = :thread")
_LABELS = Sql("SELECT thread, space, id, record FROM label WHERE tenant = :tenant AND thread = :thread")
_ADD_LABEL = Sql(
    """INSERT INTO label (tenant, thread, space, id, record) VALUES (:tenant, :thread, :space, :id, :record)
    ON CONFLICT (tenant, thread, space, id) DO NOTHING RETURNING id"""
)
_UNLABELLED = Sql(
    f"""SELECT r.id, r.parent FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.thread = :thread
    AND r.kind = :kind AND r.body IS NOT NULL AND {NOT_SWEPT} AND NOT EXISTS (SELECT 1 FROM label l
        WHERE l.tenant = r.tenant AND l.thread = r.thread AND l.record = r.id) ORDER BY r.id DESC"""
)
_SPACES = Sql("SELECT name, space, head FROM space WHERE tenant = :tenant AND thread = :thread")
_SET_SPACE = Sql(
    """UPDATE space SET head = (SELECT max(l.record) FROM label l WHERE l.tenant = :tenant AND l.thread = :thread
        AND l.space = :space)
    WHERE tenant = :tenant AND thread = :thread AND name = :name"""
)
_PINS = Sql("SELECT name, record FROM pin WHERE tenant = :tenant AND thread = :thread")
_WRITES = Sql(
    """SELECT id, task, idx, key, path, base, value, space FROM write
    WHERE tenant = :tenant AND thread = :thread ORDER BY space, id, task, idx""",
    opens={6: WRITE.at(7, 0, 1, 2, 3, 4, 5)},
    tolerant="all",
)
_PLACE_PACKS = Sql(
    """UPDATE pack SET tree = m.tree, key = m.key, first = m.first, last = m.last FROM (
        SELECT body, min(tree) AS tree, max(key) AS key, min(id) AS first, max(id) AS last
        FROM record WHERE tenant = :tenant AND body < 0 GROUP BY body) AS m
    WHERE pack.tenant = :tenant AND m.body = -pack.pack
        AND (pack.tree <> m.tree OR pack.key <> m.key OR pack.first <> m.first OR pack.last <> m.last)
    RETURNING pack.pack"""
)
_ORPHANS = {
    "body": Sql(
        """SELECT id FROM body WHERE tenant = :tenant
        EXCEPT SELECT body FROM record WHERE tenant = :tenant LIMIT :limit"""
    ),
    "pack": Sql(
        """SELECT pack FROM pack WHERE tenant = :tenant
        EXCEPT SELECT -body FROM record WHERE tenant = :tenant AND body < 0 LIMIT :limit"""
    ),
    **{
        table: Sql(
            f"SELECT {key} FROM {table} o WHERE tenant = :tenant AND NOT EXISTS"
            " (SELECT 1 FROM thread t WHERE t.tenant = o.tenant AND t.thread = o.thread) LIMIT :limit"
        )
        for table, key in {
            "label": "thread, space, id",
            "space": "thread, name",
            "write": "thread, space, id, task, idx",
            "pin": "thread, name",
            "tag": "key, value, thread",
        }.items()
    },
}


def loads(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a record's state can be read, and its hash holds."""
    try:
        return (yield from read_state(tenant, tree, number)) is not None
    except _CANNOT_READ:
        return False


# --- threads


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


def _repair_thread(tenant: int, row: tuple[Any, ...]) -> Step:
    number, tree, name, metadata, origin, generation, head, head_hash, created, updated = row
    fixed: dict[str, Any] = {}
    if type(name) is not str or not name:
        fixed["name"] = f"recovered-{number}"
    values = _json(metadata)
    if type(values) is not dict:
        fixed["metadata"], values = "{}", {}
    if not (origin is None or _is_id(origin)):
        fixed["origin"] = None
    if type(generation) is not int or not 0 <= generation < 1 << 60:
        fixed["generation"] = _JUMP
    if not (head is None or _is_id(head)):
        fixed["head"] = 0  # not there: repairing the tree finds the newest
    if head_hash is not None and (type(head_hash) is not bytes or len(head_hash) != 32):
        fixed["head_hash"] = bytes(32)
    if type(tree) is int and _is_id(head):
        [found] = yield Batch(_TREE_OF_HEAD(tenant=tenant, id=head, hash=head_hash))
        if len(found) == 1 and found[0][0] != tree:
            fixed["tree"] = found[0][0]
    elif type(tree) is not int:
        fixed["tree"] = number
    times = [at for at in (created, updated) if type(at) is int and 0 <= at < _TIME_MAX]
    if len(times) < 2:
        fixed |= {"created_at": min(times, default=1), "updated_at": max(times, default=1)}
    notes: Notes = []
    if fixed:
        names = ("thread", "tree", "name", "metadata", "origin", "generation", "head", "head_hash", "created_at")
        whole = dict(zip((*names, "updated_at"), row, strict=True)) | fixed
        yield from set_aside(tenant, "thread", (number,), f"repaired: {', '.join(fixed)}", drop=False)
        yield Batch(_SET_THREAD(tenant=tenant, **whole, active=whole["updated_at"] // MINUTE_US))
        name = whole["name"]
        notes.append((name, None, f"the thread's row was repaired: {', '.join(sorted(fixed))}"))
    else:
        yield Batch(_FIX_ACTIVE(tenant=tenant, thread=number))
    answers = yield Batch(*tag_statements(tenant, {number: values}))
    if not tags_fit(answers, len(values)):
        tags = [
            _ADD_TAG(tenant=tenant, key=key, value=tag_value(value), thread=number) for key, value in values.items()
        ]
        yield Batch(_DROP_TAGS(tenant=tenant, thread=number), *tags)
        notes.append((name, None, "what it is found by (its metadata) was rebuilt"))
    return notes


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= ID_MAX


def _json(text: Any) -> Any:
    try:
        return orjson.loads(text)
    except (ValueError, TypeError):
        return None


def find_lost_threads(tenant: int) -> Program[tuple[Notes, Notes]]:
    """Make threads again whose row is lost and whose records are there; records that belong to no thread are lost."""
    found: Notes = []
    lost: Notes = []
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
    while homeless := (yield Batch(_HOMELESS(tenant=tenant, limit=_PAGE)))[0]:
        for key in homeless:
            yield from set_aside(tenant, "record", key, "it belongs to no thread", drop=True)
            lost.append(("(store)", key[1] if _is_id(key[1]) else None, "it belongs to no thread"))
    return found, lost


def _is_lost(tenant: int, tree: int, owner: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a thread is missing that was not deleted: some record of its own is needed by no other thread."""
    try:
        found = yield from read_tree(tenant, tree, (yield from threads_in_tree(tenant, tree)))
        live, _ = yield from find_roots(found, Cut())
    except Damaged:
        return False
    return not live.issuperset(found.own[owner])


# --- inside the repair of a tree


def repair_heads(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Give every thread whose head is gone, or is not the one that was saved last, the newest that is left."""
    notes: Notes = []
    for thread in threads:
        if thread.head is None and thread.head_hash is None:
            continue  # it waits for its first record
        [rows] = yield Batch(_HASH(tenant=tenant, tree=tree, id=thread.head))
        if rows and rows[0][0] == thread.head_hash:
            continue
        head, what = yield from _new_head(tenant, tree, thread, bool(rows))
        [found] = yield Batch(_HASH(tenant=tenant, tree=tree, id=-1 if head is None else head))
        yield from set_aside(tenant, "thread", (thread.thread,), "its head was damaged or is lost", drop=False)
        yield Batch(_SET_HEAD(tenant=tenant, thread=thread.thread, head=head, hash=found[0][0] if found else None))
        notes.append((thread.name, head, what))
    return notes


def _new_head(
    tenant: int, tree: int, thread: ThreadRow, there: bool
) -> Generator[Batch, list[Rows], tuple[int | None, str]]:
    [named] = yield Batch(_BY_HASH(tenant=tenant, tree=tree, hash=thread.head_hash))
    if named:
        return named[0][0], "the head points again at the checkpoint that was saved last"
    if there:
        return thread.head, "the hash of the head was written again"
    was = show_id(thread.head) if thread.head else "unknown"
    at = thread.head
    while at is not None:  # along the parents of what was the head
        if at != thread.head and (yield from loads(tenant, tree, at)):
            return at, f"the newest checkpoint that is left is its head now; it was {was}"
        [rows] = yield Batch(_PARENT(tenant=tenant, tree=tree, id=at))
        at = rows[0][0] if rows and type(rows[0][0]) is int and rows[0][0] < at else None
    newest, origin = yield Batch(
        _NEWEST(tenant=tenant, tree=tree, thread=thread.thread),
        _HASH(tenant=tenant, tree=tree, id=thread.origin if thread.origin is not None else -1),
    )
    found = newest[0][0] if newest else thread.origin if origin else None
    if found is None:
        return None, f"nothing is left of it; its head was {was}"
    return found, f"the newest checkpoint that is left is its head now; it was {was}"


def repair_labels(tenant: int, tree: int, threads: list[ThreadRow], *, relabel: bool) -> Step:
    """Set aside labels and pins that point at nothing or at another's checkpoint, and set the heads of namespaces.
    `relabel`: rows may be lost, so that checkpoints without their label get it again, from their own text."""
    notes: Notes = []
    for thread in threads:
        this = {"tenant": tenant, "thread": thread.thread}
        labels, pins = yield Batch(_LABELS(**this), _PINS(**this))
        good: dict[int, int] = {}  # the namespace of each labelled record
        again = relabel
        for row in labels:
            reason = yield from _wrong_label(tenant, tree, row)
            if reason:
                again = again or reason != _LOST
                yield from set_aside(tenant, "label", row[:3], reason, drop=True)
                notes.append((thread.name, row[3] if _is_id(row[3]) else None, f"an id was set aside: {reason}"))
            else:
                good[row[3]] = row[1]
        if again:
            notes += yield from _label_again(tenant, tree, thread, good)
        [spaces] = yield Batch(_SPACES(**this))
        for name, space, head in spaces:
            if (
                head is not None
                and not (yield Batch(_HASH(tenant=tenant, tree=tree, id=head if _is_id(head) else -1)))[0]
            ):
                yield Batch(_SET_SPACE(**this, space=space, name=name))
                notes.append((thread.name, None, f"namespace {name!r} continues from the newest that is left"))
        for name, record in pins:
            if not (yield Batch(_HASH(tenant=tenant, tree=tree, id=record)))[0]:
                yield from set_aside(tenant, "pin", (thread.thread, name), _LOST, drop=True)
                notes.append((thread.name, record, f"pin {name!r} was set aside: its checkpoint is lost"))
    return notes


def _wrong_label(tenant: int, tree: int, row: tuple[Any, ...]) -> Generator[Batch, list[Rows], str]:
    if tuple(map(type, row)) != (int, int, bytes, int) or not _is_id(row[3]):
        return "its row is damaged"
    try:
        loaded = yield from read_state(tenant, tree, row[3])
        if loaded is None:
            return _LOST
        mine = loaded.record.kind != LABELLED_KIND or id_of(loaded.data) == row[2]
        return "" if mine else "it is another checkpoint's"
    except _CANNOT_READ as problem:
        return str(problem)


def _label_again(tenant: int, tree: int, thread: ThreadRow, spaces: dict[int, int]) -> Step:
    """A checkpoint that was put again has a newer record under the same id: that one keeps it."""
    notes: Notes = []
    this = {"tenant": tenant, "thread": thread.thread}
    rows, found = yield Batch(_UNLABELLED(**this, tree=tree, kind=LABELLED_KIND), _SPACES(**this))
    for record, parent in rows:
        space = spaces.get(parent, None if found else MAIN)
        if space is None:
            continue  # in which namespace it was is not known
        try:
            loaded = yield from read_state(tenant, tree, record)
            id_ = id_of(loaded.data) if loaded is not None else None
        except _CANNOT_READ:
            continue
        if id_ is not None and (yield Batch(_ADD_LABEL(**this, space=space, id=id_, record=record)))[0]:
            spaces[record] = space
            notes.append((thread.name, record, "its id points at it again"))
    return notes


def repair_writes(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Set aside pending writes that cannot be read."""
    notes: Notes = []
    for thread in threads:
        [rows] = yield Batch(_WRITES(tenant=tenant, thread=thread.thread))
        texts: dict[int, bytes] = {}
        for *row, space in rows:
            base = row[5]
            if type(base) is int and base not in texts:
                texts.clear()  # one at a time: a text may be long
                loaded = (yield from read_state(tenant, tree, base)) if (yield from loads(tenant, tree, base)) else None
                if loaded is not None:
                    texts[base] = loaded.data
            try:
                writes_of([tuple(row)], texts)
            except (Damaged, Undecodable) as problem:
                key = (thread.thread, space, row[0], row[1], row[2])
                yield from set_aside(tenant, "write", key, str(problem), drop=True)
                notes.append((thread.name, None, f"a pending write was set aside: {problem}"))
    return notes


# --- what belongs to nothing


def place_packs(tenant: int) -> Program[Notes]:
    """The records of a pack tell where it belongs."""
    [rows] = yield Batch(_PLACE_PACKS(tenant=tenant))
    return [("(store)", None, f"{len(rows)} packs are where their checkpoints look for them again")] if rows else []


def drop_orphans(tenant: int) -> Flow[Notes]:
    """Bodies and packs that no record has, and rows of threads that are gone, go to quarantine."""
    notes: Notes = []
    for table in _ORPHANS:
        removed = 0
        while some := (yield from write(partial(_drop_some, tenant, table))):
            removed += some
        if removed:
            notes.append(("(store)", None, f"{removed} rows of {table} that belong to nothing were set aside"))
    return notes


def _drop_some(tenant: int, table: str) -> Program[int]:
    [rows] = yield Batch(_ORPHANS[table](tenant=tenant, limit=_PAGE))
    for row in rows:
        yield from set_aside(tenant, table, row, "it belongs to nothing", drop=True)
    return len(rows)
