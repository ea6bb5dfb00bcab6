"""Erase a thread or one checkpoint, with every copy of its bytes that the database can remove. Pins do not prevent it.

One transaction removes the records and inserts a mark that the files must be scrubbed. After a kill, the next process
sees the mark and finishes. An erased checkpoint leaves a row, so that its children's hashes can be checked. Its salt is
deleted with the body, so the hash cannot confirm a guess of the content.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Literal, NamedTuple

from perdure.errors import NotFound, StoreError, UsageError
from perdure.log.gc import collect, lock_tree, record_in
from perdure.log.gc_plan import Cut, Node, Tree, holders, read_tree
from perdure.log.ids import show_id
from perdure.log.labels import drop_writes
from perdure.log.records import ERASED
from perdure.log.thread_table import ThreadRow
from perdure.storage.domains import all_tables, versioned_tables
from perdure.storage.program import Batch, Dialect, Flow, Program, Rows, Sql, change, fetch, maintain, read, write
from perdure.storage.versions import forget, installed

_TRIES = 10
_BATCH = 500
# The planner's samples of all columns, as plain text. Each VACUUM here takes new ones, so this table is scrubbed last.
_SAMPLES = "pg_statistic"
# SQLite then overwrites removed rows in the file at once, until the file is scrubbed. PostgreSQL cannot do that.
SECURE = Sql(sqlite="PRAGMA secure_delete = ON", postgres="SELECT 1")
_MARK = Sql("INSERT INTO meta (key, value) VALUES (:key, :at) ON CONFLICT (key) DO UPDATE SET value = :at")
_MARKED = Sql("SELECT value FROM meta WHERE key = :key")
# Keeps the mark if something else was erased meanwhile.
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
_DROP_PINS = Sql("DELETE FROM pin WHERE tenant = :tenant AND tree = :tree AND record = :record")
_FOREIGN = Sql(
    sqlite="SELECT '' WHERE 0",
    # From version 17 on, MAINTAIN allows roles other than the owner to VACUUM; older versions reject the word.
    postgres="""SELECT c.relname::text FROM pg_class c WHERE c.relkind = 'r'
    AND (c.relnamespace = current_schema()::regnamespace OR (c.oid = 'pg_catalog.pg_statistic'::regclass
        AND NOT pg_has_role((SELECT datdba FROM pg_database WHERE datname = current_database()), 'USAGE')))
    AND NOT pg_has_role(c.relowner, 'USAGE')
    AND NOT CASE WHEN current_setting('server_version_num')::int >= 170000
        THEN has_table_privilege(c.oid, 'MAINTAIN') ELSE false END""",
)


class Wiped(NamedTuple):
    """The result of the transaction that erases a thread."""

    tree: int
    threads: list[ThreadRow]  # the erased threads
    records: int
    stay: list[str]  # sentences about threads that stay and may hold the same data


def mark(tenant: int, at: int) -> Generator[Batch, list[Rows], None]:
    """Insert the mark that files must be scrubbed. Call it inside the transaction that removes the rows."""
    yield Batch(SECURE(tenant=tenant), _MARK(tenant=tenant, key=_key(tenant), at=str(at)))


def _key(tenant: int) -> str:
    return f"scrub {tenant}"


def marked(tenant: int) -> Program[str | None]:
    """Return the time of an erasure that still has to be scrubbed, or None."""
    [rows] = yield Batch(_MARKED(tenant=tenant, key=_key(tenant)), last=True)
    return rows[0][0] if rows else None


def note(tenant: int, number: int, record: int, records: int, hash_: bytes | None, at: int) -> Program[None]:
    """Record that something was erased, without its name or content."""
    yield Batch(_NOTE(tenant=tenant, thread=number, record=record, records=records, hash=hash_, at=at))


def note_past(tenant: int, table: Literal["thread", "run"], where: str, at: int, **params: str) -> Program[bool]:
    """Record the erasure of threads or runs that exist only in snapshots. Return whether there are any.

    Call it inside the transaction that removes the rows."""
    if not (yield from installed()):
        return False
    live = f"SELECT {table} FROM {table} WHERE tenant = :tenant"
    held = f"SELECT DISTINCT {table} FROM {table}_past WHERE tenant = :tenant AND {where} AND {table} NOT IN ({live})"
    [held_rows] = yield Batch(Sql(held)(tenant=tenant, **params))
    for (number,) in held_rows:
        yield from note(tenant, number, 0, 0, None, at)
    if held_rows:
        yield from mark(tenant, at)
    return bool(held_rows)


# --- a thread


def wipe_thread(tenant: int, name: str, number: int | None, forks: bool, at: int) -> Program[Wiped]:
    """Remove a thread, and with `forks` also its forks that hold one of its states.

    Without `forks`, raise UsageError if there are such forks; the message lists them."""
    row, threads = yield from lock_tree(tenant, name, number)
    tree = yield from read_tree(tenant, row.tree, threads)
    numbers = holders(tree, tree.own[row.thread]) | {row.thread}
    doomed = [one for one in threads if one.thread in numbers]
    stay = [one for one in threads if one.thread not in numbers]
    if len(doomed) > 1 and not forks:
        shared = [repr(one.name) for one in doomed if one is not row]
        some = ", ".join(shared[:20]) + (", …" if len(shared) > 20 else "")
        raise UsageError(
            f"thread {name!r} was not erased: its forks hold its history ({some}). Erase them with it: forks=True "
            "(`perdure thread erase --forks`), or erase or delete them first"
        )
    remaining = [
        f"thread {one.name!r}, which shares the history before the fork. If it is a copy, it also has the metadata and "
        "what was pending: then erase it too"
        for one in stay
    ]
    yield from mark(tenant, at)
    for one in doomed:
        yield from note_past(tenant, "thread", "name = :name", at, name=one.name)
        yield from note(tenant, one.thread, 0, len(tree.own[one.thread]), one.head_hash, at)
        for record in {pin.record for pin in tree.pins}.intersection(tree.own[one.thread]):
            yield from _drop_pins(tree, record)  # a pin of a thread that stays would keep the record
    removed = (yield from collect(tree, Cut(threads=numbers))).removed
    for one in doomed if stay else ():
        [tombs] = yield Batch(_TOMBS(tenant=tenant, tree=row.tree, thread=one.thread))
        for (tomb,) in tombs:
            yield from _empty(tenant, row.tree, tomb)
    return Wiped(row.tree, doomed, removed, remaining)


def _drop_pins(tree: Tree, record: int) -> Generator[Batch, list[Rows], None]:
    yield Batch(_DROP_PINS(tenant=tree.tenant, tree=tree.tree, record=record))
    tree.pins = [pin for pin in tree.pins if pin.record != record]


# --- one checkpoint


def wipe_record(tenant: int, name: str, number: int, record: int, at: int) -> Program[int]:
    """Remove a checkpoint from all threads that share it. Return how many records were removed.

    Its children get their own full texts."""
    row, threads = yield from lock_tree(tenant, name, number)
    tree = yield from read_tree(tenant, row.tree, threads)
    node = tree.nodes.get(record)
    if node is None or (node.thread != row.thread and row.thread not in holders(tree, [record])):
        raise NotFound(f"thread {name!r} has no checkpoint {show_id(record)}: nothing was erased")
    yield from mark(tenant, at)
    erased = yield from record_in(tenant, row.tree, record)
    yield from _drop_what_led_there(tree, node)
    yield from _drop_pins(tree, record)
    removed = (yield from collect(tree, Cut(erase=record))).removed
    yield from _empty(tenant, row.tree, record)
    yield from note(tenant, row.thread, record, 1, erased.hash, at)
    yield from _forget_tree(tenant, row.tree, record)
    return removed


def _drop_what_led_there(tree: Tree, node: Node) -> Generator[Batch, list[Rows], None]:
    """Delete the pending writes that produced a checkpoint.

    They are attached to its parent and hold the same data: continuing from there would make the checkpoint again. They
    stay if the parent has another child, and in threads that were forked before the checkpoint was made."""
    others = (other for other in tree.nodes.values() if other.parent == node.parent and other.id != node.id)
    if node.parent is None or any(other.body is not None for other in others):
        return
    having = holders(tree, [node.id])
    before = [label for thread in having for label in tree.labels.get(thread, ()) if label.record == node.parent]
    for start in range(0, len(before), _BATCH):
        yield Batch(*drop_writes(tree.tenant, before[start : start + _BATCH]))


def _empty(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    """Delete the note and the metadata of a tombstone, and mark it as ERASED: the history continues behind it."""
    yield Batch(_EMPTY(tenant=tenant, tree=tree, id=record, keyframe=ERASED))


# --- the bytes


def finish(tenant: int, dialect: Dialect, *, full: bool = False) -> Flow[list[str]]:
    """Scrub the files, then delete the mark. Return the problems that prevented it, as sentences."""
    at = yield from read(partial(marked, tenant))
    yield from write(partial(_forget_owners, tenant))
    problems = yield from scrub(dialect, full)
    if not problems and at is not None:
        yield from change(_UNMARK(tenant=tenant, key=_key(tenant), at=at))
    return problems


# Conditions on the past tables of snapshots. A body is found through its record.
OWNERS = "(SELECT thread FROM erased WHERE tenant = :tenant AND record = 0)"
# SQLite reuses the number of a removed body, so the lifetimes of record and body must overlap.
_BODIES = """(tenant, id, died) IN (
    SELECT b.tenant, b.id, b.died FROM record_past r
    JOIN body_past b ON b.tenant = r.tenant AND b.id = r.body AND b.stamp < r.died AND r.stamp < b.died
    WHERE r.tenant = :tenant AND r.{})"""


def _forget_owners(tenant: int) -> Program[None]:
    """Remove erased threads and runs from snapshots."""
    removals = [("body", _BODIES.format(f"thread IN {OWNERS}"))]
    removals += [
        (name, f"tenant = :tenant AND {table.owner} IN {OWNERS}")
        for name, table in versioned_tables().items()
        if table.owner
    ]
    yield from forget(*removals, tenant=tenant)


def _forget_tree(tenant: int, tree: int, record: int) -> Program[None]:
    """Remove the threads of a tree from all snapshots, because stored differences reveal the erased checkpoint.

    Also remove trees that held the checkpoint before a restore brought it back into this one."""
    trees = "(SELECT CAST(:tree AS bigint) UNION SELECT tree FROM record_past WHERE tenant = :tenant AND id = :record)"
    threads = " UNION ".join(
        f"SELECT thread FROM {table} WHERE tenant = :tenant AND tree IN {trees}" for table in ("thread", "thread_past")
    )
    yield from forget(
        ("body", _BODIES.format(f"tree IN {trees}")),
        *((name, f"tenant = :tenant AND thread IN ({threads})") for name in ("tag", "space", "label", "write", "pin")),
        *((name, f"tenant = :tenant AND tree IN {trees}") for name in ("thread", "record")),
        tenant=tenant,
        tree=tree,
        record=record,
    )


def scrub(dialect: Dialect, full: bool) -> Flow[list[str]]:
    """Remove deleted and overwritten rows from the store's own files. Return the problems, as sentences."""
    if dialect == "sqlite":
        problem = yield from maintain("scrub")
        for _ in range(_TRIES):
            if not problem:
                break
            problem = yield from maintain("scrub_log")
        return [problem] if problem else []
    tables = [*versioned_tables()]
    if (yield from read(installed)):
        tables += [f"{table}_past" for table in tables]
    tables += [name for name, table in all_tables().items() if table.volatile]
    tables.append(_SAMPLES)
    foreign = {name for (name,) in (yield from fetch(_FOREIGN))}  # tables that this role may not vacuum
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
