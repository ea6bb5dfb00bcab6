"""Labels: ids that a caller chooses for its records, in namespaces of a thread.

When an id is put again, its label moves to the new record, and the old record does not change. Namespace "" is the
thread's own line; other namespaces are separate lines in the same tree. The newest record of a namespace has the
greatest id, or follows the newest one (a clock may step back).
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
LABELLED_KIND = "adapter"  # a record that lives only while a label points at it, with its id in an envelope

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
    """A caller's label for a new record: its namespace, id and parent's id, and the run that made it."""

    space: str
    id: bytes
    parent: bytes | None
    run: bytes | None
    exclusive: bool = False  # raise Conflict if its parent is not the newest, unless that parent is in `free`
    free: Container[bytes] = ()
    forks: bool = False  # it may follow another record than the newest
    turn: Turn = Turn()  # a thread that has an owner refuses a second writer, as with `exclusive`
    reused: int | None = None  # the record whose text was partly reused: it must be the parent


class ParentChanged(Exception):
    """The parent's id points at another record than the one that was partly reused. Nothing was written."""


class LabelRow(NamedTuple):
    thread: int
    space: int
    id: bytes
    record: int


class Slot(NamedTuple):
    """The namespace that a labelled record goes to, its newest record (`head`), and the records behind its ids."""

    tenant: int
    thread: int
    space: int
    head: int | None
    replaced: int | None  # the record that the id points at now
    greatest: LabelRow | None
    parent: int | None  # the record that the parent's id points at
    owner: str | None  # of the thread

    @property
    def key(self) -> dict[str, int]:
        return {"tenant": self.tenant, "thread": self.thread, "space": self.space}


def slot_reads(tenant: int, thread: int, space: int, label: Label) -> list[Statement]:
    line = {"tenant": tenant, "thread": thread, "space": space}
    return [
        _LABEL(**line, id=label.id),
        _GREATEST(**line),
        _LABEL(**line, id=label.parent or b""),
        OWNER(tenant=tenant, thread=thread),
    ]


def slot_of(tenant: int, thread: ThreadRow, place: tuple[int, int | None], answers: list[Rows]) -> Slot:
    """Build the slot of a new record. `place`: the result of `ensure_space`. The thread's row must be locked."""
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
    """Return whether a labelled record becomes the newest of its namespace, and statements that take the thread's turn.

    Raise Conflict for a second writer, ParentChanged, or Held if another process has the turn."""
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
    """Return the statements that make a record the newest of a namespace other than ""."""
    return [
        _SET_SPACE_HEAD(**slot.key, head=record),
        _TOUCH(tenant=slot.tenant, thread=slot.thread, at=at, active=at // MINUTE_US),
    ]


def second_writer(name: str, space: str) -> Conflict:
    """Return the error for a run that another run has overtaken."""
    where = f" (namespace {space!r})" if space else ""
    return Conflict(
        f"another run has written to thread {name!r}{where} since this one began: nothing was written; "
        "start the run again from the newest checkpoint, or fork the thread"
    )


def _is_labelled(line: dict[str, int], record: int | None) -> Generator[Batch, list[Rows], bool]:
    """Return whether a record has a label in a namespace. A head may have none, if the state was changed otherwise."""
    [rows] = yield Batch(_IS_LABELLED(**line, record=record))
    return bool(rows)


def is_newest(tenant: int, thread: int, head: int | None, name: str, id_: bytes) -> Generator[Batch, list[Rows], bool]:
    """Return whether a checkpoint is the newest of its namespace. `head`: the thread's, whose row must be locked."""
    space = yield from find_space(tenant, thread, name)
    if space is None:
        return False
    if space[0] != MAIN:
        head = space[1]
    line = {"tenant": tenant, "thread": thread, "space": space[0]}
    labelled, greatest = yield Batch(_LABEL(**line, id=id_), _GREATEST(**line))
    if not labelled:
        return False
    record = labelled[0][0]
    return record == head or (greatest[0][1] == record and not (yield from _is_labelled(line, head)))


def ensure_space(tenant: int, thread: int, name: str) -> Generator[Batch, list[Rows], tuple[int, int | None]]:
    """Return the number and the newest record of a namespace; add it if it is new. The thread's row must be locked.

    For "" the newest record is None, because it is the thread's head."""
    if name == "":
        return MAIN, None
    [rows] = yield Batch(_SPACE(tenant=tenant, thread=thread, name=name))
    if not rows:
        _, rows = yield Batch(
            _ADD_SPACE(tenant=tenant, thread=thread, name=name), _SPACE(tenant=tenant, thread=thread, name=name)
        )
    return rows[0]


def find_space(tenant: int, thread: int, name: str) -> Generator[Batch, list[Rows], tuple[int, int | None] | None]:
    """Return the number and the newest record of a namespace, or None if it does not exist."""
    if name == "":
        return MAIN, None
    [rows] = yield Batch(_SPACE(tenant=tenant, thread=thread, name=name))
    return one_row(rows)


def spaces_of(tenant: int, thread: int) -> Generator[Batch, list[Rows], dict[int, SpaceRow]]:
    """Return a thread's namespaces by number, without ""."""
    [rows] = yield Batch(_SPACES(tenant=tenant, thread=thread))
    return {row[1]: SpaceRow._make(row) for row in rows}


def find_label(tenant: int, thread: int, space: int, id_: bytes) -> Generator[Batch, list[Rows], LabelRow | None]:
    [rows] = yield Batch(_LABEL(tenant=tenant, thread=thread, space=space, id=id_))
    return LabelRow(thread, space, id_, rows[0][0]) if rows else None


def find_named(tenant: int, thread: int, namespace: str, id_: bytes) -> Program[LabelRow | None]:
    """Return a label by its namespace's name and its id, or None."""
    space = yield from find_space(tenant, thread, namespace)
    return None if space is None else (yield from find_label(tenant, thread, space[0], id_))


def greatest_label(tenant: int, thread: int, space: int) -> Generator[Batch, list[Rows], LabelRow | None]:
    [rows] = yield Batch(_GREATEST(tenant=tenant, thread=thread, space=space))
    return LabelRow(thread, space, *rows[0]) if rows else None


def select_orphans(tenant: int, tree: int, thread: int, space: int, low: bytes, high: bytes) -> Statement:
    """Return the statement that selects the ids between two ids whose records have lost their parent."""
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
    """Return labels by id, greatest first, of a namespace, a thread or the tenant. `after`: the last of a page."""
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


_OF_RECORD = Sql(
    """SELECT thread, space, id, record FROM label WHERE tenant = :tenant AND thread = :thread AND (record = :record
    OR record IN (SELECT s.head FROM space s WHERE s.tenant = :tenant AND s.thread = :thread))"""
)


def labels_of_record(tenant: int, thread: int, record: int) -> Program[list[LabelRow]]:
    """Return the labels of a record, and those of the heads of a thread's namespaces."""
    [rows] = yield Batch(_OF_RECORD(tenant=tenant, thread=thread, record=record))
    return [_label_row(row) for row in rows]


# The statements below are pairs: for all threads of a tree, and for one thread. `thread is not None` is the index.
_OF_TREE = """WHERE o.tenant = :tenant
    AND o.thread IN (SELECT thread FROM thread WHERE tenant = :tenant AND tree = :tree)"""
_OF_THREAD = "WHERE o.tenant = :tenant AND o.thread = :thread"
_OF_RUN = Sql("SELECT thread, space, id, record FROM label WHERE tenant = :tenant AND run = :run")
_ALL_LABELS = [Sql(f"SELECT o.thread, o.space, o.id, o.record FROM label o {of}") for of in (_OF_TREE, _OF_THREAD)]
_ALL_SPACES = [Sql(f"SELECT o.thread, o.space, o.name, o.head FROM space o {of}") for of in (_OF_TREE, _OF_THREAD)]
# Records that a write was compressed against, if the write's id now points at another record, or at none yet.
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
    answers = yield Batch(*(_OF_RUN(tenant=tenant, run=run) for run in runs))
    return [_label_row(row) for rows in answers for row in rows]


def labels_in_tree(
    tenant: int, tree: int, thread: int | None = None
) -> Generator[Batch, list[Rows], dict[int, list[LabelRow]]]:
    """Return all labels of a tree's threads, or of one thread, by thread."""
    [rows] = yield Batch(_ALL_LABELS[thread is not None](tenant=tenant, tree=tree, thread=thread))
    by_thread: dict[int, list[LabelRow]] = {}
    for row in rows:
        label = _label_row(row)
        by_thread.setdefault(label.thread, []).append(label)
    return by_thread


class SpaceRow(NamedTuple):
    """A namespace of a thread, other than ""."""

    thread: int
    space: int
    name: str
    head: int | None

    @property
    def is_of_one_call(self) -> bool:
        """Whether it belongs to a single call ("node:task"). The next call does not continue it."""
        return ":" in self.name


def spaces_in_tree(
    tenant: int, tree: int, thread: int | None = None
) -> Generator[Batch, list[Rows], dict[int, list[SpaceRow]]]:
    """Return the namespaces of a tree's threads, or of one thread, by thread."""
    [rows] = yield Batch(_ALL_SPACES[thread is not None](tenant=tenant, tree=tree, thread=thread))
    by_thread: dict[int, list[SpaceRow]] = {}
    for row in rows:
        by_thread.setdefault(row[0], []).append(SpaceRow._make(row))
    return by_thread


def bases_in_tree(
    tenant: int, tree: int, thread: int | None = None
) -> Generator[Batch, list[Rows], dict[int, set[int]]]:
    """Return, by thread, the records that pending writes were compressed against and whose id was put again since."""
    [rows] = yield Batch(_ODD_BASES[thread is not None](tenant=tenant, tree=tree, thread=thread))
    by_thread: dict[int, set[int]] = {}
    for thread, base in rows:
        by_thread.setdefault(thread, set()).add(base)
    return by_thread


def drop_labels(tenant: int, labels: Iterable[LabelRow]) -> list[Statement]:
    """Return the statements that remove labels and their pending writes."""
    statements: list[Statement] = []
    for thread, space, id_, _ in labels:
        key = {"tenant": tenant, "thread": thread, "space": space, "id": id_}
        statements += [_DROP_LABEL(**key), _DROP_WRITES(**key)]
    return statements


def reset_space_head(tenant: int, space: SpaceRow) -> Statement:
    """Return the statement that moves a namespace's head to its newest remaining record."""
    return _NEWEST_OF_SPACE(tenant=tenant, thread=space.thread, space=space.space)


def drop_writes(tenant: int, labels: Iterable[LabelRow]) -> list[Statement]:
    """Return the statements that remove the pending writes of labels."""
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
    """Return the statements that copy a source's labels up to a record, and their pending writes, to a fork."""
    return [copy(tenant=tenant, source=source, target=target, upto=upto) for copy in _COPY]
