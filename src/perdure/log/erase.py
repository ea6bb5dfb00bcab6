"""Erasing: a thread or one checkpoint goes with every byte that the database can be made to give up. It beats pins.

One transaction decides, as in `gc.py`, and notes that the files are still to be scrubbed; then the records go in
batches, then the files are scrubbed, then the note goes. If a process is killed in between, the next finds the note
and finishes. An erased checkpoint leaves its row without body, note and metadata, so that its children's hashes can be
checked: the salt went with the body, so that no guess can be confirmed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from perdure.errors import Damaged, NotFound, StoreError, UsageError
from perdure.log.gc import drop_all, lock_tree, rearrange, remove_threads, set_head, sweep
from perdure.log.gc_plan import Node, Reach, line_of, make_plan, needed_for_deltas, nodes_of, reached_by
from perdure.log.ids import show_id
from perdure.log.labels import LabelRow, bases_by_thread, bases_of_writes, drop_writes, labels_in
from perdure.log.pins import drop_pins_on, pins_in
from perdure.log.reading import RECORD
from perdure.log.records import ERASED, Record, record_of
from perdure.log.thread_table import ThreadRow, metadata_of
from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Dialect, Flow, Program, Progress, Rows, Sql, maintain, read, write

_TRIES = 10
_BATCH = 500
# The planner's samples of all columns, in the clear. They are taken anew by each VACUUM here; the old ones go last.
_SAMPLES = "pg_statistic"
# Removed rows are overwritten in the file at once. Until the file is scrubbed; PostgreSQL has no such thing.
_SECURE = Sql(sqlite="PRAGMA secure_delete = ON", postgres="SELECT 1")
_MARK = Sql("INSERT INTO meta (key, value) VALUES (:key, :at) ON CONFLICT (key) DO UPDATE SET value = :at")
_MARKED = Sql("SELECT value FROM meta WHERE key = :key")
# Not if something else was erased meanwhile.
_UNMARK = Sql("DELETE FROM meta WHERE key = :key AND value = :at")
_NOTE = Sql(
    """INSERT INTO erased (tenant, thread, record, records, head_hash, at)
    VALUES (:tenant, :thread, :record, :records, :hash, :at) ON CONFLICT (tenant, thread, record) DO NOTHING"""
)
_TOMBS = Sql(
    """SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread AND body IS NULL
    AND (note IS NOT NULL OR metadata IS NOT NULL)"""
)
_EMPTY = Sql(
    """UPDATE record SET note = NULL, metadata = NULL, keyframe = :keyframe
    WHERE tenant = :tenant AND tree = :tree AND id = :id""",
)
# Something that both have pending, by the same task, on the same checkpoint.
_SAME_WRITES = Sql(
    """SELECT EXISTS (SELECT 1 FROM write w JOIN write o ON o.tenant = w.tenant AND o.thread = :other
        AND o.space = w.space AND o.id = w.id AND o.task = w.task AND o.idx = w.idx
        WHERE w.tenant = :tenant AND w.thread = :thread)"""
)
_SPACE_HEADS = Sql(
    """UPDATE space SET head = (SELECT max(l.record) FROM label l
        WHERE l.tenant = space.tenant AND l.thread = space.thread AND l.space = space.space)
    WHERE tenant = :tenant AND head = :record AND thread IN (
        SELECT thread FROM thread WHERE tenant = :tenant AND tree = :tree)"""
)
_FOREIGN = Sql(
    sqlite="SELECT '' WHERE 0",
    # From version 17 on others than the owner may be let VACUUM, as operators are; older ones do not know the word.
    postgres="""SELECT c.relname::text FROM pg_class c WHERE c.relkind = 'r'
    AND (c.relnamespace = current_schema()::regnamespace OR (c.oid = 'pg_catalog.pg_statistic'::regclass
        AND NOT pg_has_role((SELECT datdba FROM pg_database WHERE datname = current_database()), 'USAGE')))
    AND NOT pg_has_role(c.relowner, 'USAGE')
    AND NOT CASE WHEN current_setting('server_version_num')::int >= 170000
        THEN has_table_privilege(c.oid, 'MAINTAIN') ELSE false END""",
)
_OLD_SAMPLES = Sql(
    sqlite="SELECT '' WHERE 0",
    postgres="""SELECT 1 FROM pg_stats s JOIN pg_class c ON c.relname = s.tablename
    AND c.relnamespace = current_schema()::regnamespace
    WHERE s.schemaname = current_schema() AND c.reltuples = 0 LIMIT 1""",
)


class Wiped(NamedTuple):
    """What is decided to go."""

    tree: int
    threads: list[ThreadRow]  # that go
    records: int
    stay: list[str]  # what threads that stay may hold, as sentences


def mark(tenant: int, at: int) -> Generator[Batch, list[Rows], None]:
    """Inside the transaction that decides: what it removes is to be scrubbed."""
    yield Batch(_SECURE(tenant=tenant), _MARK(tenant=tenant, key=_key(tenant), at=str(at)))


def _key(tenant: int) -> str:
    return f"scrub {tenant}"


def marked(tenant: int) -> Program[str | None]:
    """When something was erased whose scrubbing is not finished."""
    [rows] = yield Batch(_MARKED(tenant=tenant, key=_key(tenant)), last=True)
    return rows[0][0] if rows else None


def note(tenant: int, number: int, record: int, records: int, hash_: bytes | None, at: int) -> Program[None]:
    """Write down that something was erased: no name, no content."""
    yield Batch(_NOTE(tenant=tenant, thread=number, record=record, records=records, hash=hash_, at=at))


# --- a thread


def wipe_thread(tenant: int, name: str, number: int | None, forks: bool, at: int) -> Program[Wiped]:
    """Decide that a thread goes, with its forks if that is said. Raises UsageError that lists them."""
    row, others = yield from lock_tree(tenant, name, number)
    nodes = yield from nodes_of(tenant, row.tree)
    own = own_records(nodes, [row, *others])
    shared = yield from _forks(tenant, nodes, row, others, own)
    if shared and not forks:
        some = ", ".join(repr(fork.name) for fork in shared[:20]) + (", …" if len(shared) > 20 else "")
        raise UsageError(
            f"thread {name!r} was not erased: its forks hold its history ({some}). Erase them with it: forks=True "
            "(`perdure thread erase --forks`), or erase or delete them first"
        )
    doomed = [row, *shared]
    numbers = {one.thread for one in doomed}
    stay = [other for other in others if other.thread not in numbers]
    told = yield from _told(tenant, doomed, stay)
    yield from mark(tenant, at)
    pins = {pin.record for pin in (yield from pins_in(tenant, row.tree))}
    for one in doomed:
        records = sum(nodes[record].body is not None for record in own[one.thread])
        yield from note(tenant, one.thread, 0, records, one.head_hash, at)
        for record in pins & own[one.thread]:  # a pin of a thread that stays would hold it
            yield from drop_pins_on(tenant, row.tree, record)
    removed = yield from remove_threads(tenant, row.tree, doomed, stay)
    for one in doomed if stay else ():
        [tombs] = yield Batch(_TOMBS(tenant=tenant, tree=row.tree, thread=one.thread))
        for (tomb,) in tombs:
            yield from _empty(tenant, row.tree, tomb)
    return Wiped(row.tree, doomed, removed, told)


def own_records(nodes: Mapping[int, Node], rows: list[ThreadRow]) -> dict[int, set[int]]:
    """The records that each thread has saved itself. What it had when it was forked may be kept for it alone (a prune
    of its source leaves that to it), and is still what others share with it."""
    own: dict[int, set[int]] = {row.thread: set() for row in rows}
    for node in nodes.values():
        if node.thread in own:
            own[node.thread].add(node.id)
    for row in rows:
        if (mine := own[row.thread]) and row.origin is not None:
            # Ids grow along a line: before the first of them there is nothing to find.
            mine.difference_update(line_of(nodes, row.origin, since=min(mine)))
    return own


def _forks(
    tenant: int, nodes: dict[int, Node], row: ThreadRow, others: list[ThreadRow], own: dict[int, set[int]]
) -> Generator[Batch, list[Rows], list[ThreadRow]]:
    """The threads that hold states of this one: all of its tree if it is where that began; else those that can reach
    a record of its own, by a line, an id or a pending write, and those that can reach one of theirs."""
    if row.thread == row.tree:
        return others
    numbers = [other.thread for other in others]
    labels = yield from labels_in(tenant, numbers)
    bases = yield from bases_by_thread(tenant, numbers)
    doomed = sharing(nodes, row, others, labels, bases, own)
    return [other for other in others if other.thread in doomed]


def sharing(
    nodes: Mapping[int, Node],
    row: ThreadRow,
    others: list[ThreadRow],
    labels: list[LabelRow],
    bases: Mapping[int, set[int]],
    own: Mapping[int, set[int]],
) -> set[int]:
    """A thread and those that can reach a record of its own, or one of theirs, and so on. Pure."""
    reach = Reach(nodes, others, labels)
    waiting: defaultdict[int, set[int]] = defaultdict(set)  # the threads that have something pending on a record
    for thread, records in bases.items():
        for record in records:
            waiting[record].add(thread)
    doomed, todo = {row.thread}, [row.thread]
    while todo:
        records = own[todo.pop()]
        found = reach.threads(records).union(*(waiting[record] for record in records & waiting.keys())) - doomed
        doomed |= found
        todo += found
    return doomed


def _told(tenant: int, doomed: list[ThreadRow], stay: list[ThreadRow]) -> Generator[Batch, list[Rows], list[str]]:
    """What the threads that stay may still hold, as sentences. One that was made later may be a copy of one that goes,
    made where both share their history: then what was pending, and the metadata, were copied."""
    told: list[str] = []
    pairs = [(one.thread, other.thread) for other in stay for one in doomed if one.thread < other.thread]
    same: set[int] = set()
    for start in range(0, len(pairs), _BATCH):
        part = pairs[start : start + _BATCH]
        answers = yield Batch(*(_SAME_WRITES(tenant=tenant, thread=one, other=other) for one, other in part))
        same |= {other for (_, other), [[found]] in zip(part, answers, strict=True) if found}
    for other in stay:
        copied = ["pending writes"] if other.thread in same else []
        older = [one for one in doomed if one.thread < other.thread]
        copied += ["metadata"] if any(_same_metadata(one, other) for one in older) else []
        also = f", and may have copied {' and '.join(copied)} of it: if so, erase it too" if copied else ""
        told.append(f"thread {other.name!r}, which shares the history before the fork{also}")
    return told


def _same_metadata(one: ThreadRow, other: ThreadRow) -> bool:
    try:
        first, second = metadata_of(one), metadata_of(other)
    except Damaged:
        return True
    return any(key in second and second[key] == value for key, value in first.items())


# --- one checkpoint


def wipe_record(tenant: int, name: str, number: int, record: int, at: int) -> Program[Wiped]:
    """Decide that a checkpoint goes, for all threads that share it. Its children get full texts of their own."""
    row, others = yield from lock_tree(tenant, name, number)
    nodes = yield from nodes_of(tenant, row.tree)
    node = nodes.get(record)
    threads = [row, *others]
    labels = yield from labels_in(tenant, [thread.thread for thread in threads])
    if node is None or (node.thread != row.thread and record not in reached_by(nodes, row, labels)):
        raise NotFound(f"thread {name!r} has no checkpoint {show_id(record)}: nothing was erased")
    yield from mark(tenant, at)
    live = {other.id for other in nodes.values() if other.body is not None} - {record}
    yield from _check_unneeded(tenant, row, threads, nodes, live, labels, record)
    # As if it were a tombstone already: what was erased before it is still behind it.
    plan = make_plan({**nodes, record: node._replace(body=None, keyframe=ERASED)}, live)
    plan.entomb += [record] if node.body is not None and record not in plan.remove else []
    found = yield from _read(tenant, row.tree, record)
    yield from rearrange(tenant, row.tree, nodes, plan)
    if record not in plan.remove:  # there, nothing follows it that would need its hash
        yield from _empty(tenant, row.tree, record)
    yield from _drop_what_led_there(tenant, nodes, node, threads, labels)
    yield from drop_all([label for label in labels if label.record == record], tenant)
    yield from drop_pins_on(tenant, row.tree, record)
    before = next((other for other in line_of(nodes, record) if other != record), None)
    for thread in threads:
        if thread.head == record:
            yield from set_head(tenant, thread, before)
    yield Batch(_SPACE_HEADS(tenant=tenant, tree=row.tree, record=record))
    yield from note(tenant, row.thread, record, 1, found.hash, at)
    return Wiped(row.tree, [], int(node.body is not None), [])


def _drop_what_led_there(
    tenant: int, nodes: dict[int, Node], node: Node, threads: list[ThreadRow], labels: list[LabelRow]
) -> Generator[Batch, list[Rows], None]:
    """What a graph's step wrote is pending on the checkpoint before the one that it made: it says the same, and who
    goes on from there would make the checkpoint again. Unless another checkpoint was made there too, or a thread was
    forked before this one was made: then it is theirs."""
    if node.parent is None or any(
        o.parent == node.parent and o.id != node.id for o in nodes.values() if o.body is not None
    ):
        return
    before = [label for label in labels if label.record == node.parent]
    asked = {label.thread for label in before}
    having = Reach(nodes, [row for row in threads if row.thread in asked], labels).threads([node.id])
    before = [label for label in before if label.thread in having]
    for start in range(0, len(before), _BATCH):
        yield Batch(*drop_writes(tenant, before[start : start + _BATCH]))


def _check_unneeded(
    tenant: int,
    row: ThreadRow,
    threads: list[ThreadRow],
    nodes: dict[int, Node],
    live: set[int],
    labels: list[LabelRow],
    record: int,
) -> Generator[Batch, list[Rows], None]:
    """What is rebuilt from a checkpoint is lost without it: then it is all or nothing."""
    numbers = [thread.thread for thread in threads]
    labelled = {label.record for label in labels}
    needed = yield from needed_for_deltas(tenant, row.tree, nodes, live, labelled)
    if record in needed or record in (yield from bases_of_writes(tenant, numbers)):
        raise UsageError(
            f"checkpoint {show_id(record)} of thread {row.name!r} was not erased: later checkpoints are rebuilt from "
            "it, or from what is attached to it. Erase those first, the newest first, or the whole thread"
        )


def _read(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], Record]:
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=record))
    return record_of(rows[0])


def _empty(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    """Take the note and the metadata from a tombstone, and say that the history continues behind it."""
    yield Batch(_EMPTY(tenant=tenant, tree=tree, id=record, keyframe=ERASED))


# --- the bytes


def finish(tenant: int, dialect: Dialect, *, full: bool = False, progress: Progress | None = None) -> Flow[list[str]]:
    """Remove what is listed, scrub the files, take back the note that this is to be done. What was in the way."""
    at = yield from read(partial(marked, tenant))
    yield from sweep(tenant, progress)
    problems = yield from scrub(dialect, full)
    if not problems and at is not None:
        yield from write(partial(_unmark, tenant, at))
    return problems


def _unmark(tenant: int, at: str) -> Program[None]:
    yield Batch(_UNMARK(tenant=tenant, key=_key(tenant), at=at), last=True)


def scrub(dialect: Dialect, full: bool, tables: Sequence[str] | None = None) -> Flow[list[str]]:
    """Let what was removed, or written over, be gone from the store's own files. What was in the way, as sentences."""
    if dialect == "sqlite":
        problem = yield from maintain("scrub")
        for _ in range(_TRIES):
            if not problem:
                break
            problem = yield from maintain("scrub_log")
        return [problem] if problem else []
    tables = [*(owned_tables() if tables is None else tables), _SAMPLES]
    foreign = yield from read(_foreign)
    problems = []
    if hindered := foreign.intersection(tables) - {_SAMPLES}:
        problems.append(
            f"this role may not vacuum {', '.join(sorted(hindered))}: let the owner run VACUUM{' (FULL)' * full} there"
        )
    for table in tables:
        if table not in foreign:
            try:
                yield from maintain("scrub_full" if full else "scrub", table)
            except StoreError as error:
                problems.append(f"table {table} could not be vacuumed ({error})")
    return problems


def samples_stay() -> Flow[bool]:
    """Whether there may be samples of the planner's that a scrub could not remove: this role may not, or a table is
    empty now, and PostgreSQL keeps the last ones that it took."""
    return _SAMPLES in (yield from read(_foreign)) or (yield from read(_sampled))


def _sampled() -> Program[bool]:
    [rows] = yield Batch(_OLD_SAMPLES(), last=True)
    return bool(rows)


def _foreign() -> Program[set[str]]:
    """Tables that this role may not vacuum."""
    [rows] = yield Batch(_FOREIGN(), last=True)
    return {name for (name,) in rows}
