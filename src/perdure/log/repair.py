"""Repair the log of a copy: keep the content that a record's hash proves, and remove everything else.

Every proved record of a damaged chain gets its full text. A record that fails its hash stays as a tombstone, so that
its descendants' hashes can be checked. What belongs to a lost record is removed, never pointed at another one. Must
never happen here: content stays that no hash proves, or something is removed that no note names.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.envelopes import id_of
from perdure.log.gc_plan import Node, line_of, nodes_of
from perdure.log.ids import ID_MAX, show_id
from perdure.log.labels import LABELLED_KIND
from perdure.log.pending import writes_of
from perdure.log.reading import Loaded, read_state
from perdure.log.records import ERASED, R_COLUMNS, RECORD_ENCRYPTED, Record, record_of
from perdure.log.repair_threads import Notes, find_lost_threads, is_id, repair_thread_rows
from perdure.log.tables import FULL_TEXT, TABLES, THREAD, WRITE_VALUE
from perdure.log.thread_table import ThreadRow, threads_in_tree
from perdure.log.verify import CANNOT_READ, check_tree
from perdure.storage.domains import versioned_tables
from perdure.storage.program import (
    Batch,
    Flow,
    Program,
    Progress,
    Rows,
    Sql,
    Statement,
    check,
    fetch,
    write,
    write_repair,
)
from perdure.values.compress import compress_full

Step = Generator[Batch, list[Rows], Notes]

_PAGE = 200
_ROUNDS_MAX = 8
_LEAST = -(1 << 63)  # smaller than every number, even a damaged one
_LOST = "its checkpoint is lost"

_ROWS = Sql(
    f"""SELECT {R_COLUMNS} FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after
    ORDER BY r.id LIMIT :limit""",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)
_ALONE = "base = NULL, keyframe = 1, key = :id, cost = 0"
_THIS = "tenant = :tenant AND tree = :tree AND record.id = :id"
_STAND_ALONE = Sql(
    sqlite=(
        "UPDATE body SET diff = NULL, full_text = :full_text WHERE tenant = :tenant AND id = :body",
        f"UPDATE record SET {_ALONE} WHERE {_THIS}",
    ),
    postgres=f"""WITH b AS (UPDATE body SET diff = NULL, full_text = :full_text WHERE tenant = :tenant AND id = :body)
        UPDATE record SET {_ALONE} WHERE {_THIS}""",
    seals={"full_text": FULL_TEXT},
)
# ERASED: the history continues behind the tombstone.
_GONE = f"""body = NULL, base = NULL, keyframe = {ERASED}, key = id, note = NULL, metadata = NULL, size = 0, cost = 0,
    parent = CASE WHEN parent >= 0 AND parent < id AND parent = CAST(parent AS bigint) THEN parent END"""
_TO_TOMBSTONE = Sql(f"UPDATE record SET {_GONE} WHERE {_THIS}")
# A row with a value of a wrong type keeps only its id, its hash and its parent.
_UNREADABLE_TO_TOMBSTONE = Sql(f"UPDATE record SET {_GONE}, thread = tree, kind = '', at = 0, step = 0 WHERE {_THIS}")
# Selects the records whose chain may contain another record, newest first.
_ACROSS = Sql(
    """SELECT id FROM record r WHERE tenant = :tenant AND tree = :tree AND id > :id AND key <= :id
    AND body IS NOT NULL ORDER BY id DESC"""
)
_TREES = Sql(
    "SELECT tree FROM thread WHERE tenant = :tenant AND tree > :after GROUP BY tree ORDER BY tree LIMIT :limit"
)
_UNKNOWN = "NOT EXISTS (SELECT 1 FROM tenant t WHERE t.tenant = o.tenant)"
_HASH = Sql("SELECT hash FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_BY_HASH = Sql(
    """SELECT id FROM record r WHERE tenant = :tenant AND tree = :tree AND hash = :hash AND body IS NOT NULL"""
)
# Selects the newest record of a thread's own line. Records with a label in another namespace are not part of it.
_NEWEST = Sql(
    """SELECT r.id FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.thread = :thread
    AND r.body IS NOT NULL AND NOT EXISTS (SELECT 1 FROM label l WHERE l.tenant = r.tenant
        AND l.thread = r.thread AND l.record = r.id AND l.space <> 0)
    ORDER BY r.id DESC LIMIT 1"""
)
_SET_HEAD = Sql("UPDATE thread SET head = :head, head_hash = :hash WHERE tenant = :tenant AND thread = :thread")
_LABELS = Sql("SELECT thread, space, id, record FROM label WHERE tenant = :tenant AND thread = :thread")
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
    opens={6: WRITE_VALUE.at(7, 0, 1, 2, 3, 4, 5)},
    tolerant=True,
)
_ORPHANS = {
    "body": """id NOT IN (SELECT body FROM record r WHERE r.tenant = :tenant AND body IS NOT NULL)""",
    **{
        table.name: "NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = o.tenant AND t.thread = o.thread)"
        for table in TABLES
        if table.owner in table.key and table is not THREAD
    },
}


@dataclass
class RepairReport:
    """The result of a repair. A note is a thread's name, a record (None: the thread or the store), a description."""

    repaired: Notes = field(default_factory=list)
    lost: Notes = field(default_factory=list)

    def add(self, other: RepairReport) -> None:
        self.repaired += other.repaired
        self.lost += other.lost


def drop_unknown_tenants() -> Program[Notes]:
    """Remove the rows whose tenant does not exist. Return a note with the number of rows for each table."""
    lost: Notes = []
    for table in versioned_tables():
        [rows] = yield Batch(Sql(f"DELETE FROM {table} AS o WHERE {_UNKNOWN} RETURNING 1")())
        if rows:
            lost.append(("(store)", None, f"{len(rows)} rows of {table} that belong to no tenant"))
    return lost


def repair_log(
    tenant: int, progress: Progress | None = None, names: Mapping[int, str] = MappingProxyType({})
) -> Flow[RepairReport]:
    """Repair all threads of a tenant, and remove rows that belong to none.

    `names` has the names that are known of threads without a row, by number."""
    report = RepairReport()
    report.add(RepairReport(*(yield from repair_thread_rows(tenant))))
    # Orphans are dropped also before the trees: new bodies would continue from a damaged number.
    yield from _place_records(tenant, names, report)
    yield from _repair_trees(tenant, report, progress)
    while (yield from _place_records(tenant, names, report)):  # a lost thread of a damaged tree shows only now
        yield from _repair_trees(tenant, report, progress)
    return report


def _place_records(tenant: int, names: Mapping[int, str], report: RepairReport) -> Flow[bool]:
    """Create the threads that are lost, and remove rows that belong to none. Return whether there were such threads."""
    threads, lost = yield from write(partial(find_lost_threads, tenant, names), solo=True)
    report.add(RepairReport(threads, lost))
    report.repaired += yield from write(partial(_drop_orphans, tenant))
    return bool(threads)


def _repair_trees(tenant: int, report: RepairReport, progress: Progress | None) -> Flow[None]:
    tree, done = _LEAST, 0
    while trees := (yield from fetch(_TREES, tenant=tenant, after=tree, limit=_PAGE)):
        for at, (tree,) in enumerate(trees):
            report.add((yield from _repair_if_damaged(tenant, tree)))
            done += 1
            if progress is not None:
                progress(done, done + len(trees) - at - 1)


def _drop_orphans(tenant: int) -> Program[Notes]:
    """Remove bodies without a record, and rows of threads that do not exist."""
    notes: Notes = []
    for table, orphaned in _ORPHANS.items():
        drop = Sql(f"DELETE FROM {table} AS o WHERE tenant = :tenant AND {orphaned} RETURNING 1")
        [rows] = yield Batch(drop(tenant=tenant))
        if rows:
            notes.append(("(store)", None, f"{len(rows)} rows of {table} that belong to nothing were removed"))
    return notes


def drop_row(tenant: int, table: str, key: tuple[Any, ...]) -> Statement:
    names = versioned_tables()[table].key
    where = " AND ".join(["tenant = :tenant", *(f"{name} = :{name}" for name in names)])
    return Sql(f"DELETE FROM {table} WHERE {where}")(tenant=tenant, **dict(zip(names, key, strict=True)))


def _repair_if_damaged(tenant: int, tree: int) -> Flow[RepairReport]:
    try:
        findings = yield from check(partial(check_tree, tenant, tree))
        sound = not findings.problems
    except (Damaged, NotEncrypted):
        sound = False
    return RepairReport() if sound else (yield from write_repair(partial(repair_tree, tenant, tree)))


def repair_tree(tenant: int, tree: int) -> Program[RepairReport]:
    """Repair one tree, in rounds until a check finds no damaged record. Raise Damaged if that does not happen."""
    threads = yield from threads_in_tree(tenant, tree, lock=True)
    names = {thread.thread: thread.name for thread in threads}
    report = RepairReport()
    yield from _drop_unreadable_rows(tenant, tree, names, report)
    # `check_tree` fails if a label cannot be read.
    report.repaired += yield from _repair_labels(tenant, tree, threads)
    for _ in range(_ROUNDS_MAX):
        findings = yield from check_tree(tenant, tree)
        about = {record: (name, problem) for name, record, problem in reversed(findings.problems) if record is not None}
        if not about:
            break
        wrong = {record: about[record] for record in findings.damaged}
        if wrong:
            yield from _prove_or_tombstone(tenant, tree, wrong, report)
        report.repaired += yield from _repair_heads(tenant, tree, threads)
        threads = yield from threads_in_tree(tenant, tree)
        report.repaired += yield from _repair_writes(tenant, tree, threads)
        report.repaired += yield from _repair_labels(tenant, tree, threads)
    else:
        raise Damaged(
            f"the tree of thread {next(iter(names.values()), tree)!r} could not be repaired; please report it"
        )
    lost = {record for _, record, _ in report.lost if record is not None}
    report.repaired = list(dict.fromkeys(one for one in report.repaired if one[1] not in lost or "head" in one[2]))
    return report


def _load(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], Loaded | None]:
    """Return a record's state, or None if it does not match its hash."""
    try:
        return (yield from read_state(tenant, tree, record))
    except CANNOT_READ:
        return None


# --- rows


def _drop_unreadable_rows(
    tenant: int, tree: int, names: dict[int, str], report: RepairReport
) -> Generator[Batch, list[Rows], None]:
    """Make tombstones of rows with a value of a wrong type. Delete a row that has lost its id or hash.

    Before that, give the records whose chain contains such a row their full texts.
    """
    after: Any = _LEAST
    while True:
        [rows] = yield Batch(_ROWS(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        for row in rows:
            after = row[1]
            try:
                record_of(row)
            except Damaged:
                record = Record._make(row)
                [across] = yield Batch(_ACROSS(tenant=tenant, tree=tree, id=record.id))
                for (number,) in across:
                    yield from _stand_alone(tenant, tree, number)
                known = is_id(record.id) and type(record.hash) is bytes
                drop = _UNREADABLE_TO_TOMBSTONE(tenant=tenant, tree=tree, id=record.id)
                yield Batch(drop if known else drop_row(tenant, "record", row[:2]))
                name = names.get(record.thread, "(store)") if type(record.thread) is int else "(store)"
                report.lost.append((name, record.id if is_id(record.id) else None, "its row is damaged"))
        if len(rows) < _PAGE:
            return


# --- states


def _prove_or_tombstone(
    tenant: int, tree: int, wrong: dict[int, tuple[str, str]], report: RepairReport
) -> Generator[Batch, list[Rows], None]:
    nodes = yield from nodes_of(tenant, tree)
    lost: list[int] = []
    for number in sorted(wrong):
        if number not in nodes or nodes[number].body is None:
            continue
        name, problem = wrong[number]
        if (yield from _load(tenant, tree, number)) is not None:
            report.repaired.append((name, number, f"it was rebuilt, and stands by its full text: {problem}"))
            continue
        lost.append(number)
        report.lost.append((name, number, problem))
        parent = nodes[number].parent
        if parent is not None and 0 <= parent <= ID_MAX and parent not in nodes:
            report.lost.append((name, parent, "its row is gone"))
    for number in _to_rebuild(nodes, wrong.keys(), set(lost)):
        yield from _stand_alone(tenant, tree, number)
    for number in lost:
        yield Batch(_TO_TOMBSTONE(tenant=tenant, tree=tree, id=number))


def _to_rebuild(nodes: dict[int, Node], wrong: Container[int], lost: set[int]) -> list[int]:
    """Return the records that need a full text: the wrong ones, and all in a chain with a lost or rewritten record.

    They are sorted newest first, so that a record's chain is not rewritten before the record is read."""
    chains = {nodes[number].key for number in lost}
    chains |= {node.key for node in nodes.values() if node.base in lost or (not node.keyframe and node.id in wrong)}

    def leans(node: Node) -> bool:
        base = nodes.get(node.base) if node.base is not None else None
        missing = node.base is not None and (base is None or base.body is None)
        return node.id in wrong or node.key in chains or missing or (base is not None and base.key in chains)

    live = (node for node in nodes.values() if node.body is not None and node.id not in lost)
    return sorted((node.id for node in live if leans(node)), reverse=True)


def _stand_alone(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], None]:
    """Make a record a keyframe, so that it needs no other."""
    loaded = yield from _load(tenant, tree, number)
    if loaded is None or loaded.record.body is None:
        return  # the next round reports it as lost
    full, body = compress_full(loaded.data), loaded.record.body
    yield Batch(_STAND_ALONE(tenant=tenant, tree=tree, id=number, full_text=full, body=body))


# --- pointers to records


def _repair_heads(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Repair each head that is missing or is not the record that was saved last.

    Use the record with the head's hash if there is one, else the newest remaining record."""
    notes: Notes = []
    nodes = yield from nodes_of(tenant, tree)
    for thread in threads:
        if thread.head is None and thread.head_hash is None:
            continue  # it has no record yet
        there = thread.head in nodes and nodes[thread.head].body is not None
        hashes, named, newest = yield Batch(
            _HASH(tenant=tenant, tree=tree, id=thread.head),
            _BY_HASH(tenant=tenant, tree=tree, hash=thread.head_hash),
            _NEWEST(tenant=tenant, tree=tree, thread=thread.thread),
        )
        if there and hashes[0][0] == thread.head_hash:
            continue
        line = [*line_of(nodes, thread.head), *(row[0] for row in newest), *line_of(nodes, thread.origin)]
        head, outcome = (line[0] if line else None), "the newest checkpoint that is left is its head now"
        if named:
            head, outcome = named[0][0], "the head points again at the checkpoint that was saved last"
        elif there:
            head, outcome = thread.head, "the hash of the head was written again"
        elif head is None:
            outcome = "nothing is left of it"
        was = show_id(thread.head) if thread.head else "unknown"
        [head_rows] = yield Batch(_HASH(tenant=tenant, tree=tree, id=-1 if head is None else head))
        yield Batch(
            _SET_HEAD(tenant=tenant, thread=thread.thread, head=head, hash=head_rows[0][0] if head_rows else None)
        )
        notes.append((thread.name, head, f"{outcome}; its head was {was}"))
    return notes


def _repair_labels(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Remove labels and pins of missing or wrong checkpoints, and repair the heads of namespaces."""
    notes: Notes = []
    nodes = yield from nodes_of(tenant, tree)
    live = {node.id for node in nodes.values() if node.body is not None}
    for thread in threads:
        key = {"tenant": tenant, "thread": thread.thread}
        labels, pins = yield Batch(_LABELS(**key), _PINS(**key))
        for row in labels:
            reason = yield from _wrong_label(tenant, tree, row)
            if reason:
                yield Batch(drop_row(tenant, "label", row[:3]))
                notes.append((thread.name, row[3] if is_id(row[3]) else None, f"an id was removed: {reason}"))
        [spaces] = yield Batch(_SPACES(**key))
        for name, space, head in spaces:
            if head is not None and head not in live:
                yield Batch(_SET_SPACE(**key, space=space, name=name))
                notes.append((thread.name, None, f"namespace {name!r} continues from the newest that is left"))
        for name, record in pins:
            if record not in live:
                yield Batch(drop_row(tenant, "pin", (thread.thread, name)))
                notes.append((thread.name, record, f"pin {name!r} was removed: its checkpoint is lost"))
    return notes


def _wrong_label(tenant: int, tree: int, row: tuple[Any, ...]) -> Generator[Batch, list[Rows], str]:
    if tuple(map(type, row)) != (int, int, bytes, int) or not is_id(row[3]):
        return "its row is damaged"
    try:
        loaded = yield from read_state(tenant, tree, row[3])
        if loaded is None:
            return _LOST
        mine = loaded.record.kind != LABELLED_KIND or id_of(loaded.data) == row[2]
        return "" if mine else "it is another checkpoint's"
    except CANNOT_READ as problem:
        return str(problem)


def _repair_writes(tenant: int, tree: int, threads: list[ThreadRow]) -> Step:
    """Remove pending writes that cannot be read."""
    notes: Notes = []
    for thread in threads:
        [rows] = yield Batch(_WRITES(tenant=tenant, thread=thread.thread))
        texts: dict[int, bytes] = {}
        for *row, space in rows:
            base = row[5]
            if type(base) is int and base not in texts:
                texts.clear()  # one at a time: a text may be long
                loaded = yield from _load(tenant, tree, base)
                texts |= {base: loaded.data} if loaded is not None else {}
            try:
                writes_of([tuple(row)], texts)
            except (Damaged, Undecodable) as problem:
                yield Batch(drop_row(tenant, "write", (thread.thread, space, *row[:3])))
                notes.append((thread.name, None, f"a pending write was removed: {problem}"))
    return notes
