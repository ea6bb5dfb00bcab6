"""Append a record: prepare the difference on the caller's thread, then write it in one short transaction.

`prepare` is pure. `head_statement` moves the head from the expected parent and inserts the record, or changes nothing.
`start_statements` begin a new thread in the same way. `append` is the program for every other case: a branch, a lost
race, an expected head, a COMMIT whose answer was lost. Each takes an optional label: an id that the caller chose.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from typing import Any

import msgspec

from perdure.errors import Conflict, NotFound
from perdure.log.ancestors import find_ancestor, skip_length
from perdure.log.cache import Base
from perdure.log.gc_plan import has_record
from perdure.log.ids import show_id
from perdure.log.keyframes import difference_cost, keyframe_is_due
from perdure.log.labels import (
    MAIN,
    SET_LABEL,
    Label,
    Slot,
    admit,
    ensure_space,
    move_space_head,
    put_label,
    slot_of,
    slot_reads,
)
from perdure.log.reading import RECORD, read_live
from perdure.log.records import (
    INSERT_SEALS,
    NO_HASH,
    Record,
    chain_hash,
    new_record,
    record_of,
)
from perdure.log.tables import RECORD as RECORD_TABLE
from perdure.log.tables import SALT as SALT_COLUMN
from perdure.log.tables import THREAD_METADATA
from perdure.log.thread_table import (
    MINUTE_US,
    ThreadRow,
    add_tags,
    create_thread,
    find_thread,
    json_text,
    merge_metadata,
    present,
    select_numbered,
    take_numbers,
    try_thread,
)
from perdure.log.turns import IS_OURS
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, as_subprogram
from perdure.storage.table_sql import column_type
from perdure.values.compress import compress_full
from perdure.values.delta import Encoder
from perdure.values.dictionary import Dictionary
from perdure.values.diff import find, inserted_bytes, same_ranges
from perdure.values.hashing import CHUNK_BYTES, chunk_digests, content_digest

# The type of each parameter: PostgreSQL needs casts for parameters in a SELECT list.
_RECORD_PARAMS = {"tenant": "bigint"} | {
    column.name: column_type(column, "postgres") for column in RECORD_TABLE.columns if column.name != "body"
}
_NAMES = ", ".join(_RECORD_PARAMS)
_SQLITE_VALUES = ", ".join(f":{name}" for name in _RECORD_PARAMS)
_POSTGRES_VALUES = ", ".join(f":{name}::{type_}" for name, type_ in _RECORD_PARAMS.items())
_INSERT_RECORD = f"INSERT INTO record ({_NAMES}, body)"
_POSTGRES_RECORD = f"{_INSERT_RECORD} SELECT {_POSTGRES_VALUES}, b.id FROM b"
_INSERT_BODY = "INSERT INTO body (tenant, salt, diff, full_text)"
_BODY_POSTGRES = f"{_INSERT_BODY} SELECT :tenant::bigint, :salt::bytea, :diff::bytea, :full_text::bytea"
_SET_HEAD = "UPDATE thread SET head = :id, head_hash = :hash, updated_at = :at"
# A question that was attached to this id before it was saved stays. Only the row itself is read, so that on PostgreSQL
# this sees what a transaction has committed that it waited for.
_ASKED = "asked_at = CASE WHEN asked_id >= :label THEN asked_at END"
_INSERT_LABEL = "INSERT INTO label (tenant, thread, space, id, record, run)"
_LABEL_POSTGRES = ":tenant::bigint, :thread::bigint, 0, :label::bytea, r.id, :run::bytea"
# The inserts of a body, its record and its label.
_SQLITE_ROWS = (
    (_INSERT_BODY, ":tenant, :salt, :diff, :full_text", ""),
    (_INSERT_RECORD, f"{_SQLITE_VALUES}, last_insert_rowid()", ""),
    (_INSERT_LABEL, ":tenant, :thread, 0, :label, :id, :run", f" {SET_LABEL}"),
)
# VALUES where possible: for INSERT … SELECT into a table with triggers, SQLite fills a temporary table first.
_INSERTS = [f"{into} VALUES ({values}){conflict}" for into, values, conflict in _SQLITE_ROWS]
_IF_CHANGED = [f"{into} SELECT {values} WHERE changes() = 1{conflict}" for into, values, conflict in _SQLITE_ROWS]
_OF_THREAD = "WHERE tenant = :tenant AND thread = :thread"


def _to_head(*, labelled: bool, returning: bool, same_minute: bool, guard: str = "") -> Sql:
    """Return SQL that inserts a record and moves the head to it, or changes nothing.

    It applies if the head is the expected parent and the thread is in the generation of the difference. A program needs
    `returning`; a driver's `append` counts changed rows instead. `same_minute` leaves `active` out: setting it even to
    the same value would make SQLite write a page of its index at every save."""
    asked = _ASKED if labelled else "asked_at = NULL"
    move = f"{_SET_HEAD}, {asked}{'' if same_minute else ', active = :active'} {_OF_THREAD}"
    move += " AND head = :parent AND generation = :generation" + (f" AND {IS_OURS}" if labelled else "") + guard
    end = " RETURNING id" if returning else ""
    rows = 3 if labelled else 2
    # A driver rolls back an append that fails, so the check may come last there.
    steps = [move, *_IF_CHANGED[:rows]] if returning else [*_INSERTS[:rows], move]
    postgres = f"WITH t AS ({move} RETURNING thread), b AS ({_BODY_POSTGRES} FROM t RETURNING id)"
    if labelled:
        postgres = f"""{postgres}, r AS ({_POSTGRES_RECORD} RETURNING id)
            {_INSERT_LABEL} SELECT {_LABEL_POSTGRES} FROM r {SET_LABEL}"""
    else:
        postgres = f"{postgres} {_POSTGRES_RECORD}"
    steps[-1] += end
    step = "" if returning else f"append_{labelled:d}{same_minute:d}"
    return Sql(sqlite=tuple(steps), postgres=postgres + end, seals=INSERT_SEALS, step=step)


_TO_HEAD = {
    (labelled, returning, same): _to_head(labelled=labelled, returning=returning, same_minute=same)
    for labelled in (False, True)
    for returning in (False, True)
    for same in (False, True)
}
# Inserts a thread, or nothing if its name is taken or archived.
_NEW_THREAD = "tenant, thread, tree, name, metadata, generation, head, head_hash, created_at, updated_at, active"
_START_THREAD = f"""INSERT INTO thread ({_NEW_THREAD})
    SELECT {{tenant}}, {{thread}}, {{thread}}, {{name}}, {{about}}, 0, {{id}}, {{hash}}, {{at}}, {{at}}, {{active}}
    WHERE NOT EXISTS (SELECT 1 FROM archived WHERE tenant = :tenant AND kind = 'thread' AND name = {{name}})
    ON CONFLICT (tenant, name) DO NOTHING"""
_START_PARAMS = _RECORD_PARAMS | {"name": "text", "about": "text", "active": "bigint"}
_START_CASTS = {name: f":{name}::{type_}" for name, type_ in _START_PARAMS.items()}
# Inserts a thread with its first record; without the thread no other row is inserted.
_START = Sql(
    sqlite=(_START_THREAD.format(**{name: f":{name}" for name in _START_PARAMS}), *_IF_CHANGED),
    postgres=f"""WITH t AS ({_START_THREAD.format(**_START_CASTS)} RETURNING thread),
        b AS ({_BODY_POSTGRES} FROM t RETURNING id), r AS ({_POSTGRES_RECORD} RETURNING id)
        {_INSERT_LABEL} SELECT {_LABEL_POSTGRES} FROM r""",
    seals={**INSERT_SEALS, "about": THREAD_METADATA},
    step="start_thread",
)
INSERT = Sql(
    sqlite=tuple(_INSERTS[:2]),
    postgres=f"WITH b AS ({_BODY_POSTGRES} RETURNING id) {_POSTGRES_RECORD}",
    seals=INSERT_SEALS,
)
MOVE_HEAD = Sql(f"{_SET_HEAD}, {_ASKED}, active = :active {_OF_THREAD}")
_AFTER_ALL = b"\xff" * 17  # a label behind all others
# A salt is random and used once, so it identifies the draft of a record.
SALT = Sql(
    """SELECT b.salt FROM record r JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = :id""",
    opens={0: SALT_COLUMN},
    tolerant=True,
)
NOTHING = 0  # no record has this id


class Draft(msgspec.Struct, frozen=True, eq=False):
    """A state prepared for an append: the result of all work that needs no database."""

    text: bytes
    digests: tuple[bytes, ...]
    content: bytes
    salt: bytes
    base: Base | None
    diff: bytes | None
    full: bytes | None
    cost: int
    kind: str
    note: str | None
    metadata: str | None
    encoder: Encoder | None = None  # its stream continues from this record after it is written


class Place(msgspec.Struct, frozen=True, eq=False):
    """The thread and the position that a record is appended to.

    If `thread` is None, the thread is looked up by name, and created if it does not exist."""

    tenant: int
    name: str
    thread: int | None
    merge: Mapping[str, Any] | None = None  # metadata for the thread
    parent: int | None = None  # the checkpoint to follow, if the caller names one
    expect: int | None = None  # the head that the caller expects; NOTHING: no head yet
    cursor: int | None = None  # the handle's current checkpoint
    own: Container[int] = ()  # records that the same handle wrote: these are no race
    lost_head: int | None = None  # a head whose record is missing: the next save replaces it
    found_nothing: bool = False  # the handle loaded the thread when it had no checkpoint


class Appended(msgspec.Struct, frozen=True, eq=False):
    """The result of an append. If `record` is None, nothing was written, and the caller tries again.

    With `after`, the new id must be greater than that id: the parent has a greater id, or the id is taken. Otherwise
    the base has moved, and the difference must be made again."""

    record: Record | None
    thread: int
    tree: int
    generation: int
    on_head: bool
    after: int = 0


def prepare(
    text: bytes,
    base: Base | None,
    salt: bytes,
    *,
    kind: str,
    note: str | None,
    metadata: str | None,
    branching: bool = False,
    head: int = 0,
) -> Draft:
    """Compute the difference to the base, and the full text if a keyframe is due.

    `branching`: the state does not continue the base's own line. `head`: the number of leading bytes that are known to
    equal the base's."""
    if base is None:
        digests = chunk_digests(text)
        content = content_digest(salt, len(text), digests)
        whole = compress_full(text)
        return Draft(text, digests, content, salt, None, None, whole, 0, kind, note, metadata)
    splices = find(base.data, text, head)
    size = len(text)
    digests = chunk_digests(text, base.digests, same_ranges(splices, size) if size >= CHUNK_BYTES else ())
    content = content_digest(salt, size, digests)
    # A branch must not take the encoder that the base's own line continues with.
    encoder = Encoder(base.dictionary) if branching else base.take_encoder()
    diff = encoder.encode(splices)
    cost = base.record.cost + difference_cost(len(diff), inserted_bytes(splices), len(splices) // 3)
    full: bytes | None = None
    borrowed = base.key_thread != base.record.thread
    if borrowed or keyframe_is_due(cost=cost, size=size, key_size=base.key_size, branching=branching):
        full, cost = compress_full(text), 0
    return Draft(text, digests, content, salt, base, diff, full, cost, kind, note, metadata, encoder)


def seal(draft: Draft, thread: int, tree: int, record: int, at: int, parent: Record | None) -> Record:
    """Return the record's row, whose hash covers its parent's hash. `append` sets `skip`, and the database `body`."""
    step = parent.step + 1 if parent else 0
    hash_ = chain_hash(
        parent.hash if parent else NO_HASH,
        record,
        draft.kind,
        at,
        step,
        draft.note,
        draft.metadata,
        draft.content,
    )
    base = draft.base
    return new_record(
        Record,
        (
            tree,
            record,
            thread,
            parent.id if parent else None,
            base.record.id if base else None,
            0 if draft.full is None else 1,
            base.record.key if base and draft.full is None else record,
            draft.kind,
            at,
            step,
            draft.note,
            draft.metadata,
            len(draft.text),
            draft.cost,
            hash_,
            None,
            None,
        ),
    )


def stored_as_drafted(draft: Draft, record: Record) -> bool:
    """Return whether a record is still in the chain that its difference was made for.

    If the answer to its COMMIT was lost, a prune may have moved it since. Then no later save may build on the draft,
    because it no longer says how the record is stored."""
    base = draft.base
    return record.key == (record.id if base is None or draft.full is not None else base.record.key)


def base_after(draft: Draft, record: Record, generation: int) -> Base:
    """Return the base of the next save, after the draft was written."""
    text = draft.text
    base = draft.base
    if base is None or draft.full is not None:
        return Base(record, text, draft.digests, Dictionary(text), len(text), record.thread, generation)
    key = (base.dictionary, base.key_size, base.key_thread)
    return Base(record, text, draft.digests, *key, generation, draft.encoder)


def head_statement(
    draft: Draft, base: Base, tenant: int, record: Record, label: Label | None = None, *, returning: bool = False
) -> Statement:
    """Return a statement that appends if the head is the record's parent and no base moved, else changes nothing."""
    params = _head_params(draft, base, tenant, record)
    if label is not None:
        params["label"], params["run"], params["owner"] = label.id, label.run, label.turn.owner
    return _TO_HEAD[label is not None, returning, base.record.at // MINUTE_US == params["active"]](**params)


def _head_params(draft: Draft, base: Base, tenant: int, record: Record) -> dict[str, Any]:
    params = insert_params(draft, tenant, record)
    params["generation"], params["active"] = base.generation, record.at // MINUTE_US
    return params


class GuardedHead:
    """The statement that appends at the head if a condition of the caller's holds too. It returns the record's id."""

    def __init__(self, guard: str) -> None:
        self._sql = {
            same: _to_head(labelled=False, returning=True, same_minute=same, guard=f" AND {guard}")
            for same in (False, True)
        }

    def __call__(self, draft: Draft, base: Base, tenant: int, record: Record, **params: Any) -> Statement:
        """Return the statement. `params` are those of the condition."""
        params |= _head_params(draft, base, tenant, record)
        return self._sql[base.record.at // MINUTE_US == params["active"]](**params)


def append_to_head(draft: Draft, base: Base, tenant: int, record: Record, label: Label | None = None) -> Program[bool]:
    """Run `head_statement`. Return False if nothing was changed."""
    [rows] = yield Batch(head_statement(draft, base, tenant, record, label, returning=True), last=True)
    return bool(rows)


def start_statements(draft: Draft, place: Place, record: Record, label: Label) -> list[Statement]:
    """Return statements that create a thread with its first record, or change nothing if the thread's name is taken."""
    metadata = present(place.merge or {})
    params = insert_params(draft, place.tenant, record)
    params |= {"name": place.name, "about": json_text(metadata), "active": record.at // MINUTE_US}
    params |= {"label": label.id, "run": label.run}
    return [_START(**params), *add_tags(place.tenant, record.thread, metadata)]


def start_thread(
    draft: Draft, place: Place, record: int, at: int, label: Label, many: int
) -> Program[tuple[Appended | None, list[int]]]:
    """Create a thread with a labelled record, and reserve numbers for later threads, in one transaction.

    Return None for Appended if the thread's name is taken."""
    number, *numbers = yield from as_subprogram(take_numbers(many))
    sealed = seal(draft, number, number, record, at, None)
    begun = select_numbered(place.tenant, number)
    *_, rows = yield Batch(*start_statements(draft, place, sealed, label), begun, last=True)
    return Appended(sealed, number, number, 0, on_head=True) if rows else None, numbers


def append(draft: Draft, place: Place, record: int, at: int, label: Label | None = None) -> Program[Appended]:
    """Append a draft on the head or as a branch. Safe to repeat with the same record id."""
    tenant = place.tenant
    thread, is_new = yield from lock_or_create_thread(place, at)
    key = {"tenant": tenant, "tree": thread.tree, "id": record}
    slot: Slot | None = None
    if label is None:
        rows, salts = yield Batch(RECORD(**key), SALT(**key))
    else:
        space = yield from ensure_space(tenant, thread.thread, label.space)
        reads = slot_reads(tenant, thread.thread, space[0], label)
        rows, salts, *answers = yield Batch(RECORD(**key), SALT(**key), *reads)
        slot = slot_of(tenant, thread, space, answers)
    head = thread.head if slot is None else slot.head
    if rows and salts and salts[0][0] == draft.salt:  # the draft's own record
        stored = record_of(rows[0])  # an earlier COMMIT wrote it, and its answer was lost
        return appended(stored, thread, on_head=head == stored.id)
    if rows:  # another writer's record has the same id
        return appended(None, thread, on_head=False, after=record)
    parent = yield from _read_parent(place, thread, slot)
    if parent is not None and parent.id > record:  # ids must grow along a line
        return appended(None, thread, on_head=False, after=parent.id)
    if draft.base is not None:
        base = yield from read_live(tenant, thread.tree, draft.base.record.id)
        if base is None or base_has_moved(draft.base, base, thread):
            return appended(None, thread, on_head=False)
    sealed = seal(draft, thread.thread, thread.tree, record, at, parent)
    if parent is not None and (length := skip_length(sealed.step)):
        behind = yield from as_subprogram(find_ancestor(tenant, thread.tree, parent.id, sealed.step - length))
        sealed = sealed._replace(skip=behind.id if behind is not None else None)
    statements = [INSERT(**insert_params(draft, tenant, sealed))]
    if label is None or slot is None:
        follows = (parent.id if parent is not None else None) == thread.head
        on_head = is_new or follows or (place.parent is None and _head_is_lost(place, thread))
    else:
        follows, turn = yield from admit(label, slot, place.name, sealed.parent, at)
        on_head = is_new or follows
        statements += [put_label(label, slot, record), *turn]
    if on_head and (slot is None or slot.space == MAIN):
        moved = {"id": record, "hash": sealed.hash, "at": at, "active": at // MINUTE_US}
        moved["label"] = _AFTER_ALL if label is None else label.id
        statements.append(MOVE_HEAD(**moved, tenant=tenant, thread=thread.thread))
    elif on_head and slot is not None:
        statements += move_space_head(slot, record, at)
    yield Batch(*statements, last=True)
    return appended(sealed, thread, on_head=on_head)


def _read_parent(place: Place, thread: ThreadRow, slot: Slot | None) -> Program[Record | None]:
    """Return the record that the new one follows. A labelled record whose parent's id is unknown has no parent."""
    if slot is not None:
        return (yield from read_live(place.tenant, thread.tree, slot.parent)) if slot.parent is not None else None
    parent_id = _parent(place, thread)
    if parent_id is None:
        return None
    parent = yield from read_live(place.tenant, thread.tree, parent_id)
    asked = place.parent is not None
    if parent is None or (asked and not (yield from has_record(place.tenant, thread, parent))):
        raise NotFound(
            f"thread {place.name!r} has no checkpoint {show_id(parent_id)} (pruned, or of another thread): "
            "load() the thread again"
        )
    return parent


def base_has_moved(base: Base, stored: Record, thread: ThreadRow) -> bool:
    """Return whether a difference must be made again: the base has another keyframe, or its chain was encoded again.

    The generation does not matter for another thread's base: a difference to it begins a stream of its own."""
    return stored.key != base.record.key or (stored.thread == thread.thread and thread.generation != base.generation)


def appended(record: Record | None, thread: ThreadRow, *, on_head: bool, after: int = 0) -> Appended:
    return Appended(record, thread.thread, thread.tree, thread.generation, on_head, after)


def lock_or_create_thread(place: Place, at: int) -> Generator[Batch, list[Rows], tuple[ThreadRow, bool]]:
    """Lock the thread's row, or create it, and merge its metadata. Return the row, and whether it is new."""
    thread = yield from try_thread(place.tenant, place.name, place.thread, lock=True)
    if thread is None:
        thread = yield from create_thread(place.tenant, place.name, place.merge or {}, at)
        if thread is not None:
            if place.expect not in (None, NOTHING):
                raise _conflict(place, None)
            return thread, True
        # Another writer created it in between.
        thread = yield from find_thread(place.tenant, place.name, lock=True)
    if place.merge:
        yield from merge_metadata(place.tenant, thread, place.merge)
    return thread, False


def _parent(place: Place, thread: ThreadRow) -> int | None:
    """Return the id of the record that the new one follows. Raise Conflict if the head is not the expected one.

    By default it is the handle's cursor, or the head if only this handle has moved it."""
    if place.expect is not None and (thread.head or NOTHING) != place.expect:
        raise _conflict(place, thread.head)
    if place.parent is not None:
        return place.parent
    if place.expect is not None:  # the check above passed: the caller knows the head
        return place.cursor if _head_is_lost(place, thread) else thread.head
    if thread.head == place.cursor or thread.head in place.own:
        return thread.head
    # With found_nothing the result is None: the record starts a branch beside another writer's first record.
    return thread.head if place.cursor is None and not place.found_nothing else place.cursor


def _head_is_lost(place: Place, thread: ThreadRow) -> bool:
    return thread.head is not None and thread.head == place.lost_head


def _conflict(place: Place, actual: int | None) -> Conflict:
    return head_moved(place.name, place.expect, actual)


def head_moved(name: str, expect: int | None, actual: int | None) -> Conflict:
    """Return the error of a save that expected another head."""
    expected = show_id(expect) if expect else None
    actual_id = show_id(actual) if actual is not None else None
    return Conflict(
        f"the head of thread {name!r} is {actual_id or 'not there yet'}, not "
        f"{expected or 'a thread without checkpoints'} as expected: nothing was written; load() it, apply your change "
        "again and save",
        expected=expected,
        actual=actual_id,
    )


def insert_params(draft: Draft, tenant: int, record: Record) -> dict[str, Any]:
    """Return the parameters that insert a record and its body. The database assigns the body's number."""
    params: dict[str, Any] = dict(zip(Record._fields, record))  # noqa: B905
    params["tenant"], params["salt"], params["diff"], params["full_text"] = tenant, draft.salt, draft.diff, draft.full
    return params
