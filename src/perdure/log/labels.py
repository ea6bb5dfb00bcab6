"""Labels: ids that a caller gives its records, in namespaces of a thread.

Other frameworks name their checkpoints themselves, may save an id again, and keep several lines in a thread. A label
points at a record and is re-pointed when its id is put again; the record stays what it is. Namespace "" is the
thread's own line, and its newest record the thread's head. Other namespaces are lines of their own in the same tree,
so that their differences can be made against the thread's states.

The newest of a namespace is the one with the greatest id, or what follows the newest (a clock may step back).
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable
from typing import Any, NamedTuple

from perdure.errors import Conflict, Damaged
from perdure.log.ids import ID_MAX
from perdure.log.thread_table import MINUTE_US, ThreadRow
from perdure.log.turns import OWNER, Turn, take_turn
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, one_row

MAIN = 0  # the number of namespace ""
LABELLED_KIND = "adapter"  # the kind of record that lives by its label, and carries its id in an envelope

_KEY = "tenant = :tenant AND thread = :thread AND space = :space"
_SPACE = Sql("SELECT space, head FROM space WHERE tenant = :tenant AND thread = :thread AND name = :name")
_SPACES = Sql("SELECT thread, space, name, head FROM space WHERE tenant = :tenant AND thread = :thread")
_ADD_SPACE = Sql(
    """INSERT INTO space (tenant, thread, name, space)
    SELECT :tenant, :thread, :name, coalesce(max(space), 0) + 1 FROM space WHERE tenant = :tenant AND thread = :thread
    ON CONFLICT (tenant, thread, name) DO NOTHING""",
    postgres="""INSERT INTO space (tenant, thread, name, space)
    SELECT :tenant::bigint, :thread::bigint, :name::text, coalesce(max(space), 0) + 1 FROM space
        WHERE tenant = :tenant AND thread = :thread
    ON CONFLICT (tenant, thread, name) DO NOTHING""",
)
_SET_SPACE_HEAD = Sql("UPDATE space SET head = :head WHERE tenant = :tenant AND thread = :thread AND space = :space")
_TOUCH = Sql("UPDATE thread SET updated_at = :at, active = :active WHERE tenant = :tenant AND thread = :thread")
_LABEL = Sql(f"SELECT record FROM label WHERE {_KEY} AND id = :id")
_GREATEST = Sql(f"SELECT id, record FROM label WHERE {_KEY} ORDER BY id DESC LIMIT 1")
_IS_LABELLED = Sql(f"SELECT 1 FROM label WHERE {_KEY} AND record = :record LIMIT 1")
_ORPHANS = Sql(
    """SELECT l.id FROM label l
    JOIN record r ON r.tenant = l.tenant AND r.tree = :tree AND r.id = l.record AND r.parent IS NOT NULL
    LEFT JOIN record p ON p.tenant = r.tenant AND p.tree = r.tree AND p.id = r.parent
    WHERE l.tenant = :tenant AND l.thread = :thread AND l.space = :space AND l.id BETWEEN :low AND :high
        AND p.body IS NULL"""
)
SET_LABEL = "ON CONFLICT (tenant, thread, space, id) DO UPDATE SET record = excluded.record, run = excluded.run"
PUT_LABEL = Sql(
    f"""INSERT INTO label (tenant, thread, space, id, record, run)
    VALUES (:tenant, :thread, :space, :label, :id, :run) {SET_LABEL}"""
)


class Label(NamedTuple):
    """How the caller names a record: its namespace, id and parent's id, and the run that made it."""

    space: str
    id: bytes
    parent: bytes | None
    run: bytes | None
    exclusive: bool = False  # refuse it if its parent is not the newest, unless that parent is among `free`
    free: Container[bytes] = ()
    forks: bool = False  # it is meant to follow something else than the newest
    turn: Turn = Turn()  # a thread that has an owner refuses a second writer, as if it were exclusive
    reused: int | None = None  # the record whose text was taken over in part: it must be the parent


class ParentChanged(Exception):
    """The parent's id means another record than the one that was taken over in part: nothing was written."""


class LabelRow(NamedTuple):
    """A row of the label table."""

    thread: int
    space: int
    id: bytes
    record: int


class Slot(NamedTuple):
    """Where a labelled record goes: its namespace, whose newest record is `head`, and what its ids stand for now."""

    tenant: int
    thread: int
    space: int
    head: int | None
    replaced: int | None  # what the id stands for
    greatest: LabelRow | None
    parent: int | None  # what the parent's id stands for
    owner: str | None  # of the thread

    @property
    def key(self) -> dict[str, int]:
        return {"tenant": self.tenant, "thread": self.thread, "space": self.space}


def slot_reads(tenant: int, thread: int, space: int, label: Label) -> list[Statement]:
    """The reads that `slot_of` needs."""
    this = {"tenant": tenant, "thread": thread, "space": space}
    return [
        _LABEL(**this, id=label.id),
        _GREATEST(**this),
        _LABEL(**this, id=label.parent or b""),
        OWNER(tenant=tenant, thread=thread),
    ]


def slot_of(tenant: int, thread: ThreadRow, place: tuple[int, int | None], answers: list[Rows]) -> Slot:
    """What the ids of a new record stand for. `place`: of `ensure_space`; the thread's row is locked."""
    (space, space_head), (replaced, greatest, parents, [(owner,)]) = place, answers
    return Slot(
        tenant,
        thread.thread,
        space,
        thread.head if space == MAIN else space_head,
        replaced[0][0] if replaced else None,
        LabelRow(thread.thread, space, *greatest[0]) if greatest else None,
        parents[0][0] if parents else None,
        owner,
    )


def admit(label: Label, slot: Slot, name: str, parent: int | None, at: int) -> Program[tuple[bool, list[Statement]]]:
    """Whether a labelled record becomes the newest of its namespace, and the statements that take the thread's turn.
    Raises ParentChanged, Held, and Conflict for a second writer."""
    if label.reused is not None and parent != label.reused:
        raise ParentChanged
    follows = slot.head is None or slot.replaced == slot.head or (parent is not None and parent == slot.head)
    turn: list[Statement] = []
    if slot.owner is not None:
        turn = yield from take_turn(label.turn, slot.tenant, slot.thread, slot.owner, at)
    guarded = label.exclusive or slot.owner is not None
    if guarded and not (follows or label.forks or (label.parent or b"") in label.free):
        is_greatest = parent is not None and slot.greatest is not None and slot.greatest.record == parent
        if label.exclusive or not is_greatest or (yield from _is_labelled(slot.key, slot.head)):
            raise second_writer(name, label.space)
    return follows or slot.greatest is None or slot.greatest.id < label.id, turn


def put_label(label: Label, slot: Slot, record: int) -> Statement:
    return PUT_LABEL(**slot.key, label=label.id, id=record, run=label.run)


def move_space_head(slot: Slot, record: int, at: int) -> list[Statement]:
    """Statements that make a record the newest of a namespace other than ""."""
    return [
        _SET_SPACE_HEAD(**slot.key, head=record),
        _TOUCH(tenant=slot.tenant, thread=slot.thread, at=at, active=at // MINUTE_US),
    ]


def second_writer(name: str, space: str) -> Conflict:
    """The error for a writer that another one has overtaken."""
    where = f" (namespace {space!r})" if space else ""
    return Conflict(
        f"another run has written to thread {name!r}{where} since this one began: nothing was written; "
        "start the run again from the newest checkpoint, or fork the thread"
    )


def _is_labelled(this: dict[str, int], record: int | None) -> Generator[Batch, list[Rows], bool]:
    """Whether a record is a checkpoint of a namespace. A head need not be: the state may be changed in other ways."""
    [rows] = yield Batch(_IS_LABELLED(**this, record=record))
    return bool(rows)


def is_newest(tenant: int, thread: int, head: int | None, name: str, id_: bytes) -> Generator[Batch, list[Rows], bool]:
    """Whether a namespace was not written to since this checkpoint. `head` is the thread's; its row is locked."""
    space = yield from find_space(tenant, thread, name)
    if space is None:
        return False
    if space[0] != MAIN:
        head = space[1]
    this = {"tenant": tenant, "thread": thread, "space": space[0]}
    found, greatest = yield Batch(_LABEL(**this, id=id_), _GREATEST(**this))
    if not found:
        return False
    record = found[0][0]
    return record == head or (greatest[0][1] == record and not (yield from _is_labelled(this, head)))


def ensure_space(tenant: int, thread: int, name: str) -> Generator[Batch, list[Rows], tuple[int, int | None]]:
    """The number and the newest record of a namespace; made if it is new. For a thread whose row is locked."""
    if name == "":
        return MAIN, None
    [rows] = yield Batch(_SPACE(tenant=tenant, thread=thread, name=name))
    if not rows:
        _, rows = yield Batch(
            _ADD_SPACE(tenant=tenant, thread=thread, name=name), _SPACE(tenant=tenant, thread=thread, name=name)
        )
    return rows[0]


def find_space(tenant: int, thread: int, name: str) -> Generator[Batch, list[Rows], tuple[int, int | None] | None]:
    """The number and the newest record of a namespace, or None if nothing was ever written there."""
    if name == "":
        return MAIN, None
    [rows] = yield Batch(_SPACE(tenant=tenant, thread=thread, name=name))
    return one_row(rows)


def spaces_of(tenant: int, thread: int) -> Generator[Batch, list[Rows], dict[int, SpaceRow]]:
    """A thread's namespaces by their numbers, "" left out."""
    [rows] = yield Batch(_SPACES(tenant=tenant, thread=thread))
    return {row[1]: SpaceRow._make(row) for row in rows}


def find_label(tenant: int, thread: int, space: int, id_: bytes) -> Generator[Batch, list[Rows], LabelRow | None]:
    [rows] = yield Batch(_LABEL(tenant=tenant, thread=thread, space=space, id=id_))
    return LabelRow(thread, space, id_, rows[0][0]) if rows else None


def find_named(tenant: int, thread: int, namespace: str, id_: bytes) -> Program[LabelRow | None]:
    """A label by the name of its namespace."""
    space = yield from find_space(tenant, thread, namespace)
    return None if space is None else (yield from find_label(tenant, thread, space[0], id_))


def greatest_label(tenant: int, thread: int, space: int) -> Generator[Batch, list[Rows], LabelRow | None]:
    [rows] = yield Batch(_GREATEST(tenant=tenant, thread=thread, space=space))
    return LabelRow(thread, space, *rows[0]) if rows else None


def select_orphans(tenant: int, tree: int, thread: int, space: int, low: bytes, high: bytes) -> Statement:
    """Selects the ids, from one to another, of records whose parent was removed."""
    return _ORPHANS(tenant=tenant, tree=tree, thread=thread, space=space, low=low, high=high)


_PAGE = """SELECT thread, space, id, record FROM label WHERE tenant = :tenant {where}
    ORDER BY id DESC, thread DESC, space DESC LIMIT :limit"""


def _label_row(row: tuple[Any, ...]) -> LabelRow:
    if tuple(map(type, row)) != (int, int, bytes, int) or not 0 <= row[3] <= ID_MAX:
        raise Damaged("the row of a label is damaged; run `perdure store verify`")
    return LabelRow._make(row)


def list_labels(
    tenant: int,
    *,
    thread: int | None = None,
    space: int | None = None,
    id_: bytes | None = None,
    before: bytes | None = None,
    after: LabelRow | None = None,
    limit: int = 2**62,
) -> Program[list[LabelRow]]:
    """Labels by id, the greatest first: of a namespace, a thread, or all. `after`: the page before ended there."""
    where: list[str] = []
    params: dict[str, Any] = {"tenant": tenant, "limit": limit}
    for column, value in (("thread", thread), ("space", space), ("id", id_)):
        if value is not None:
            where.append(f"AND {column} = :{column}")
            params[column] = value
    if before is not None:
        where.append("AND id < :before")
        params["before"] = before
    if after is not None:
        where.append("AND (id, thread, space) < (:last_id, :last_thread, :last_space)")
        params |= {"last_id": after.id, "last_thread": after.thread, "last_space": after.space}
    [rows] = yield Batch(Sql(_PAGE.format(where=" ".join(where)))(**params))
    return [_label_row(row) for row in rows]


# The statements below come in pairs, of all threads of a tree and of one thread: chosen by `thread is not None`.
_OF_TREE = """WHERE o.tenant = :tenant
    AND o.thread IN (SELECT thread FROM thread WHERE tenant = :tenant AND tree = :tree)"""
_OF_THREAD = "WHERE o.tenant = :tenant AND o.thread = :thread"
_OF_RUN = Sql("SELECT thread, space, id, record FROM label WHERE tenant = :tenant AND run = :run")
_ALL_LABELS = [Sql(f"SELECT o.thread, o.space, o.id, o.record FROM label o {of}") for of in (_OF_TREE, _OF_THREAD)]
_ALL_SPACES = [Sql(f"SELECT o.thread, o.space, o.name, o.head FROM space o {of}") for of in (_OF_TREE, _OF_THREAD)]
# Records that a write was compressed against although its id means another one by now, or none yet.
_ODD_BASES = [
    Sql(
        f"""SELECT DISTINCT o.thread, o.base FROM write o
        LEFT JOIN label l ON l.tenant = o.tenant AND l.thread = o.thread AND l.space = o.space AND l.id = o.id
        {of} AND o.base IS NOT NULL AND (l.record IS NULL OR o.base <> l.record)"""
    )
    for of in (_OF_TREE, _OF_THREAD)
]
_NEWEST_OF_SPACE = Sql(
    f"""UPDATE space SET head = (SELECT max(l.record) FROM label l
        WHERE l.tenant = space.tenant AND l.thread = space.thread AND l.space = space.space) WHERE {_KEY}"""
)
_DROP_LABEL = Sql(f"DELETE FROM label WHERE {_KEY} AND id = :id")
_DROP_WRITES = Sql(f"DELETE FROM write WHERE {_KEY} AND id = :id")


def labels_of_runs(tenant: int, runs: Iterable[bytes]) -> Program[list[LabelRow]]:
    """The labels that runs have made, in all threads."""
    found = yield Batch(*(_OF_RUN(tenant=tenant, run=run) for run in runs))
    return [_label_row(row) for rows in found for row in rows]


def labels_in_tree(
    tenant: int, tree: int, thread: int | None = None
) -> Generator[Batch, list[Rows], dict[int, list[LabelRow]]]:
    """Return all labels of a tree's threads, or of one thread, by thread."""
    [rows] = yield Batch(_ALL_LABELS[thread is not None](tenant=tenant, tree=tree, thread=thread))
    found: dict[int, list[LabelRow]] = {}
    for row in rows:
        label = _label_row(row)
        found.setdefault(label.thread, []).append(label)
    return found


class SpaceRow(NamedTuple):
    """A namespace of a thread, other than ""."""

    thread: int
    space: int
    name: str
    head: int | None

    @property
    def is_of_one_call(self) -> bool:
        """Whether it belongs to a single call of its caller ("node:task"), and is not continued by the next."""
        return ":" in self.name


def spaces_in_tree(
    tenant: int, tree: int, thread: int | None = None
) -> Generator[Batch, list[Rows], dict[int, list[SpaceRow]]]:
    """Return the namespaces of a tree's threads, or of one thread, by thread."""
    [rows] = yield Batch(_ALL_SPACES[thread is not None](tenant=tenant, tree=tree, thread=thread))
    found: dict[int, list[SpaceRow]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(SpaceRow._make(row))
    return found


def bases_in_tree(
    tenant: int, tree: int, thread: int | None = None
) -> Generator[Batch, list[Rows], dict[int, set[int]]]:
    """By thread: records that some write needs, beside the one it is pending on, because its id was put again since."""
    [rows] = yield Batch(_ODD_BASES[thread is not None](tenant=tenant, tree=tree, thread=thread))
    found: dict[int, set[int]] = {}
    for thread, base in rows:
        found.setdefault(thread, set()).add(base)
    return found


def drop_labels(tenant: int, labels: Iterable[LabelRow]) -> list[Statement]:
    """Statements that remove labels and what is pending on them."""
    statements: list[Statement] = []
    for thread, space, id_, _ in labels:
        key = {"tenant": tenant, "thread": thread, "space": space, "id": id_}
        statements += [_DROP_LABEL(**key), _DROP_WRITES(**key)]
    return statements


def reset_space_head(tenant: int, space: SpaceRow) -> Statement:
    """Make the newest record that is left the newest of a namespace."""
    return _NEWEST_OF_SPACE(tenant=tenant, thread=space.thread, space=space.space)


def drop_writes(tenant: int, labels: Iterable[LabelRow]) -> list[Statement]:
    """Statements that remove what is pending on labels."""
    return [_DROP_WRITES(tenant=tenant, thread=thread, space=space, id=id_) for thread, space, id_, _ in labels]


_COPIED = {
    "space": ("name, space, head", "name, space, CASE WHEN head <= :upto THEN head END", ""),
    "label": ("space, id, record, run", "space, id, record, run", "AND record <= :upto"),
    "write": (
        "space, id, task, idx, key, path, base, value",
        "space, id, task, idx, key, path, base, value",
        """AND EXISTS (SELECT 1 FROM label l WHERE l.tenant = w.tenant AND l.thread = w.thread AND l.space = w.space
            AND l.id = w.id AND l.record <= :upto)""",
    ),
}
_COPY = [
    Sql(
        f"""INSERT INTO {table} (tenant, thread, {columns})
        SELECT tenant, CAST(:target AS bigint), {values} FROM {table} w
        WHERE tenant = :tenant AND thread = :source {where}"""
    )
    for table, (columns, values, where) in _COPIED.items()
]


def copy_labels(tenant: int, source: int, target: int, upto: int) -> list[Statement]:
    """Statements that give a fork the labels of its source, up to a record, and what is pending on them."""
    return [copy(tenant=tenant, source=source, target=target, upto=upto) for copy in _COPY]
