"""Mending what points at records: threads, their heads, labels, namespaces, pins, tags, pending writes.

All of it is a cache of the log, or a name for a part of it. What names a record that is gone is set aside, never
pointed at another one by guess; a head goes back to the newest checkpoint that is left. Inside the transaction that
repairs a tree.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import orjson

from perdure.errors import Damaged, Undecodable
from perdure.log.branches import MINUTE_US, ThreadRow, tag_value
from perdure.log.envelopes import id_of
from perdure.log.ids import show_id
from perdure.log.labels import LABELLED_KIND, MAIN
from perdure.log.mended import Notes
from perdure.log.mending_bodies import CANNOT_READ, loads
from perdure.log.pending import writes_of
from perdure.log.quarantine import set_aside
from perdure.log.reading import NOT_SWEPT, read_state
from perdure.log.verifying import tag_statements, tags_fit
from perdure.storage.cells import TAG, THREAD_METADATA, WRITE
from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Rows, Sql

LOST = "its checkpoint is lost"
_TIME_MAX = 1 << 53
_GENERATION_JUMP = 1 << 20
_THREADS = Sql(
    """SELECT thread, tree, name, metadata, origin, generation, head, head_hash, created_at, updated_at, active
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
_TREE_OF = Sql("SELECT tree FROM record WHERE tenant = :tenant AND thread = :thread ORDER BY id DESC LIMIT 1")
_WHERE_IS = Sql("SELECT tree FROM record WHERE tenant = :tenant AND id = :id AND hash = :hash LIMIT 2")
_HAS = Sql("SELECT 1 FROM record WHERE tenant = :tenant AND tree = :tree LIMIT 1")
_AT = Sql("SELECT at FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread ORDER BY id DESC LIMIT 1")
_TAGS = Sql("SELECT key, value FROM tag WHERE tenant = :tenant AND thread = :thread")
_DROP_TAGS = Sql("DELETE FROM tag WHERE tenant = :tenant AND thread = :thread")
_ADD_TAG = Sql(
    "INSERT INTO tag (tenant, key, value, thread) VALUES (:tenant, :key, :value, :thread) ON CONFLICT DO NOTHING",
    seals={"value": TAG},
)
_SEALED = Sql("SELECT 1 FROM seal WHERE tenant = :tenant LIMIT 1")
_BY_HASH = Sql(
    f"""SELECT id FROM record r WHERE tenant = :tenant AND tree = :tree AND hash = :hash AND body IS NOT NULL
    AND {NOT_SWEPT}"""
)
_STEP_BACK = Sql("SELECT parent, body, hash FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
# The newest of a thread's own line: what has an id in another namespace is not part of it.
_NEWEST = Sql(
    f"""SELECT r.id FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.thread = :thread
    AND r.body IS NOT NULL AND {NOT_SWEPT} AND NOT EXISTS (SELECT 1 FROM label l WHERE l.tenant = r.tenant
        AND l.thread = r.thread AND l.record = r.id AND l.space <> 0)
    ORDER BY r.id DESC LIMIT 1"""
)
_SET_HEAD = Sql("UPDATE thread SET head = :head, head_hash = :hash WHERE tenant = :tenant AND thread = :thread")
_LIVE = Sql(
    f"""SELECT hash FROM record r WHERE tenant = :tenant AND tree = :tree AND id = :id AND body IS NOT NULL
    AND {NOT_SWEPT}"""
)
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
    """SELECT id, task, idx, channel, path, base, value, space FROM write
    WHERE tenant = :tenant AND thread = :thread ORDER BY space, id, task, idx""",
    opens={6: WRITE.at(7, 0, 1, 2, 3, 4, 5)},
    tolerant="all",
)

Step = Generator[Batch, list[Rows], Notes]


def mend_rows(tenant: int, after: int, limit: int) -> Generator[Batch, list[Rows], tuple[int | None, Notes]]:
    """Mend a page of rows of threads: types, times, metadata, and the tree they belong to. The last number (None: there
    are no more), and what was done."""
    rows, sealed = yield Batch(_THREADS(tenant=tenant, after=after, limit=limit), _SEALED(tenant=tenant))
    notes: Notes = []
    last: Any = None
    for row in rows:
        last = row[0]
        notes += yield from _mend_row(tenant, row)
        notes += yield from _mend_tags(tenant, row[0], bool(sealed))
    return (last if type(last) is int else None), notes


def _mend_row(tenant: int, row: tuple[Any, ...]) -> Step:
    number, tree, name, metadata, origin, generation, head, head_hash, created, updated, active = row
    fixed: dict[str, Any] = {}
    if type(name) is not str or not name:
        fixed["name"] = f"recovered-{number}"
    if not _is_metadata(metadata):
        fixed["metadata"] = "{}"
    if origin is not None and (type(origin) is not int or origin < 0):
        fixed["origin"] = None
    if type(generation) is not int or not 0 <= generation < 1 << 60:
        fixed["generation"] = _GENERATION_JUMP
    if head is not None and (type(head) is not int or head < 0):
        fixed["head"] = 0  # a head that is not there: the next step looks for the newest
    if head_hash is not None and (type(head_hash) is not bytes or len(head_hash) != 32):
        fixed["head_hash"] = bytes(32)
    where = yield from _tree_of(tenant, row)
    if where != tree:
        fixed["tree"] = where
    if not all(type(at) is int and 0 <= at < _TIME_MAX for at in (created, updated)) or type(active) is not int:
        [times] = yield Batch(_AT(tenant=tenant, tree=where, thread=number))
        at = times[0][0] if times and type(times[0][0]) is int and 0 <= times[0][0] < _TIME_MAX else 0
        good = [given for given in (created, updated) if type(given) is int and 0 <= given < _TIME_MAX]
        fixed |= {"created_at": min([at or 1, *good]), "updated_at": max([at or 1, *good])}
    updated_at = fixed.get("updated_at", updated)
    if active != updated_at // MINUTE_US:
        fixed["active"] = updated_at // MINUTE_US
    if not fixed:
        return []
    names = owned_tables()["thread"].columns[:11]
    values = dict(zip(names, row, strict=True)) | fixed
    shown = str(values["name"])
    if fixed.keys() != {"active"}:
        yield from set_aside(tenant, "thread", (number,), f"mended: {', '.join(fixed)}", drop=False)
    yield Batch(_SET_THREAD(tenant=tenant, **values))
    return [(shown, None, f"the thread's row was mended: {', '.join(sorted(fixed))}")]


def _is_metadata(text: object) -> bool:
    try:
        return type(text) is str and type(orjson.loads(text)) is dict
    except ValueError:
        return False


def _tree_of(tenant: int, row: tuple[Any, ...]) -> Generator[Batch, list[Rows], int]:
    number, tree, head, head_hash = row[0], row[1], row[6], row[7]
    known = [(1,)]
    if type(tree) is int:
        [known] = yield Batch(_HAS(tenant=tenant, tree=tree))
        if known or head is None:
            return tree
    if type(head) is int and type(head_hash) is bytes:
        [found] = yield Batch(_WHERE_IS(tenant=tenant, id=head, hash=head_hash))
        if len(found) == 1:
            return int(found[0][0])
    [found] = yield Batch(_TREE_OF(tenant=tenant, thread=number))
    if found and type(found[0][0]) is int:
        return int(found[0][0])
    return tree if type(tree) is int else number


def _mend_tags(tenant: int, number: int, sealed: bool) -> Step:
    rows, found = yield Batch(_THREADS(tenant=tenant, after=number - 1, limit=1), _TAGS(tenant=tenant, thread=number))
    if not rows or rows[0][0] != number:
        return []
    metadata = orjson.loads(rows[0][3])
    wanted = {key: tag_value(value) for key, value in metadata.items()}
    if sealed:  # a value cannot be compared here: the database does
        answers = yield Batch(*tag_statements(tenant, {number: metadata}))
        fits = tags_fit(answers, len(metadata))
    else:
        fits = len(found) == len(wanted) and dict(found) == wanted
    if fits:
        return []
    tags = [_ADD_TAG(tenant=tenant, key=key, value=value, thread=number) for key, value in wanted.items()]
    yield Batch(_DROP_TAGS(tenant=tenant, thread=number), *tags)
    return [(rows[0][2], None, "what it is found by (its metadata) was rebuilt")]


# --- inside the repair of a tree


def mend_heads(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Give every thread whose head is gone, or is not the one that was saved last, the newest that is left."""
    notes: Notes = []
    for thread in threads:
        if thread.head is None and thread.head_hash is None:
            continue  # it waits for its first record
        [rows] = yield Batch(_LIVE(tenant=tenant, tree=tree, id=thread.head))
        if rows and rows[0][0] == thread.head_hash:
            continue
        head, what = yield from _new_head(tenant, tree, thread, bool(rows))
        hash_ = None
        if head is not None:
            [found] = yield Batch(_LIVE(tenant=tenant, tree=tree, id=head))
            hash_ = found[0][0]
        yield from set_aside(tenant, "thread", (thread.thread,), "its head was damaged or is lost", drop=False)
        yield Batch(_SET_HEAD(tenant=tenant, thread=thread.thread, head=head, hash=hash_))
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
    was = show_id(thread.head) if thread.head is not None and thread.head > 0 else "unknown"
    at = thread.head
    while at is not None:  # along the parents of what was the head
        [rows] = yield Batch(_STEP_BACK(tenant=tenant, tree=tree, id=at))
        if not rows:
            break
        parent, body, _ = rows[0]
        if body is not None and at != thread.head and (yield from loads(tenant, tree, at)):
            return at, f"the newest checkpoint that is left is its head now; it was {was}"
        at = parent if type(parent) is int and parent < at else None
    [rows] = yield Batch(_NEWEST(tenant=tenant, tree=tree, thread=thread.thread))
    found = rows[0][0] if rows else None
    if found is None and thread.origin is not None:
        [rows] = yield Batch(_LIVE(tenant=tenant, tree=tree, id=thread.origin))
        found = thread.origin if rows else None
    if found is None:
        return None, f"nothing is left of it; its head was {was}"
    return found, f"the newest checkpoint that is left is its head now; it was {was}"


def mend_labels(tenant: int, tree: int, threads: list[ThreadRow], rows_lost: bool) -> Step:
    """Set aside ids that point at nothing or at another's checkpoint, and set the heads of namespaces. If rows were
    lost or damaged, checkpoints that have none get theirs again: otherwise one without an id was meant to have none."""
    notes: Notes = []
    for thread in threads:
        [rows] = yield Batch(_LABELS(tenant=tenant, thread=thread.thread))
        good: dict[int, int] = {}  # the namespace of each labelled record
        again = rows_lost
        for row in rows:
            reason = yield from _wrong_label(tenant, tree, row)
            if reason:
                again = again or reason != LOST
                yield from set_aside(tenant, "label", row[:3], reason, drop=True)
                notes.append((thread.name, row[3] if type(row[3]) is int else None, f"an id was set aside: {reason}"))
            else:
                good[row[3]] = row[1]
        if again:
            notes += yield from _label_again(tenant, tree, thread, good)
        notes += yield from _mend_spaces(tenant, tree, thread)
        [pins] = yield Batch(_PINS(tenant=tenant, thread=thread.thread))
        for name, record in pins:
            [found] = yield Batch(_LIVE(tenant=tenant, tree=tree, id=record))
            if not found:
                yield from set_aside(tenant, "pin", (thread.thread, name), LOST, drop=True)
                notes.append((thread.name, record, f"pin {name!r} was set aside: its checkpoint is lost"))
    return notes


def _wrong_label(tenant: int, tree: int, row: tuple[Any, ...]) -> Generator[Batch, list[Rows], str]:
    if tuple(map(type, row)) != (int, int, bytes, int) or row[3] < 0:
        return "its row is damaged"
    try:
        loaded = yield from read_state(tenant, tree, row[3])
        if loaded is None:
            return LOST
        if loaded.record.kind != LABELLED_KIND:
            return ""
        return "" if id_of(loaded.data) == row[2] else "it is another checkpoint's"
    except CANNOT_READ as problem:
        return str(problem)


def _label_again(tenant: int, tree: int, thread: ThreadRow, spaces: dict[int, int]) -> Step:
    """Checkpoints that were found by an id which nothing has now: also the id's row may have been what was damaged.
    One that was put again since has a newer record under the same id, and is left alone."""
    notes: Notes = []
    this = {"tenant": tenant, "tree": tree, "thread": thread.thread}
    rows, found = yield Batch(_UNLABELLED(**this, kind=LABELLED_KIND), _SPACES(tenant=tenant, thread=thread.thread))
    only_main = not found
    for record, parent in rows:
        space = spaces.get(parent, MAIN if only_main else None)
        if space is None:
            continue  # in which namespace it was is not known
        try:
            loaded = yield from read_state(tenant, tree, record)
            id_ = id_of(loaded.data) if loaded is not None else None
        except CANNOT_READ:
            id_ = None
        if id_ is None:
            continue
        [added] = yield Batch(_ADD_LABEL(tenant=tenant, thread=thread.thread, space=space, id=id_, record=record))
        if added:
            spaces[record] = space
            notes.append((thread.name, record, "its id points at it again"))
    return notes


def _mend_spaces(tenant: int, tree: int, thread: ThreadRow) -> Step:
    notes: Notes = []
    [rows] = yield Batch(_SPACES(tenant=tenant, thread=thread.thread))
    for name, space, head in rows:
        if head is None:
            continue
        [found] = yield Batch(_LIVE(tenant=tenant, tree=tree, id=head if type(head) is int else -1))
        if not found:
            yield Batch(_SET_SPACE(tenant=tenant, thread=thread.thread, space=space, name=name))
            notes.append((thread.name, None, f"namespace {name!r} goes on from the newest that is left"))
    return notes


def mend_writes(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Set aside pending writes that cannot be read."""
    notes: Notes = []
    for thread in threads:
        [rows] = yield Batch(_WRITES(tenant=tenant, thread=thread.thread))
        texts: dict[int, bytes] = {}
        for *row, space in rows:
            base = row[5]
            if type(base) is int and base not in texts:
                texts.clear()  # one at a time: a text may be long
                try:
                    loaded = yield from read_state(tenant, tree, base)
                except CANNOT_READ:
                    loaded = None
                if loaded is not None:
                    texts[base] = loaded.data
            try:
                writes_of([tuple(row)], texts)
            except (Damaged, Undecodable) as problem:
                key = (thread.thread, space, row[0], row[1], row[2])
                yield from set_aside(tenant, "write", key, str(problem), drop=True)
                notes.append((thread.name, None, f"a pending write was set aside: {problem}"))
    return notes
