"""Erasing: a thread or one checkpoint goes with every byte that the database can be made to give up. It beats pins.

One transaction removes the records, as in `gc.py`, and notes that the files are still to be scrubbed; then they are
scrubbed, then the note goes. If a process is killed in between, the next finds the note
and finishes. An erased checkpoint leaves its row without body, note and metadata, so that its children's hashes can be
checked: the salt went with the body, so that no guess can be confirmed.
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
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Batch, Dialect, Flow, Program, Rows, Sql, maintain, read, write
from perdure.storage.versions import forget, installed

_TRIES = 10
_BATCH = 500
# The planner's samples of all columns, in the clear. They are taken anew by each VACUUM here; the old ones go last.
_SAMPLES = "pg_statistic"
# Removed rows are overwritten in the file at once. Until the file is scrubbed; PostgreSQL has no such thing.
SECURE = Sql(sqlite="PRAGMA secure_delete = ON", postgres="SELECT 1")
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
_DROP_PINS = Sql("DELETE FROM pin WHERE tenant = :tenant AND tree = :tree AND record = :record")
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


class Wiped(NamedTuple):
    """What is decided to go."""

    tree: int
    threads: list[ThreadRow]  # that go
    records: int
    stay: list[str]  # what threads that stay may hold, as sentences


def mark(tenant: int, at: int) -> Generator[Batch, list[Rows], None]:
    """Inside the transaction that decides: what it removes is to be scrubbed."""
    yield Batch(SECURE(tenant=tenant), _MARK(tenant=tenant, key=_key(tenant), at=str(at)))


def _key(tenant: int) -> str:
    return f"scrub {tenant}"


def marked(tenant: int) -> Program[str | None]:
    """When something was erased whose scrubbing is not finished."""
    [rows] = yield Batch(_MARKED(tenant=tenant, key=_key(tenant)), last=True)
    return rows[0][0] if rows else None


def note(tenant: int, number: int, record: int, records: int, hash_: bytes | None, at: int) -> Program[None]:
    """Write down that something was erased: no name, no content."""
    yield Batch(_NOTE(tenant=tenant, thread=number, record=record, records=records, hash=hash_, at=at))


def note_past(tenant: int, table: Literal["thread", "run"], where: str, at: int, **params: str) -> Program[bool]:
    """Inside a transaction that decides: threads or runs that only snapshots hold go too. Whether there are any."""
    if not (yield from installed()):
        return False
    live = f"SELECT {table} FROM {table} WHERE tenant = :tenant"
    held = f"SELECT DISTINCT {table} FROM {table}_past WHERE tenant = :tenant AND {where} AND {table} NOT IN ({live})"
    [found] = yield Batch(Sql(held)(tenant=tenant, **params))
    for (number,) in found:
        yield from note(tenant, number, 0, 0, None, at)
    if found:
        yield from mark(tenant, at)
    return bool(found)


# --- a thread


def wipe_thread(tenant: int, name: str, number: int | None, forks: bool, at: int) -> Program[Wiped]:
    """Decide that a thread goes, with the forks that have a state of it if that is said. Raises UsageError that lists
    them."""
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
    told = [
        f"thread {one.name!r}, which shares the history before the fork. If it is a copy, it also has the metadata and "
        "what was pending: then erase it too"
        for one in stay
    ]
    yield from mark(tenant, at)
    for one in doomed:
        yield from note_past(tenant, "thread", "name = :name", at, name=one.name)
        yield from note(tenant, one.thread, 0, len(tree.own[one.thread]), one.head_hash, at)
        for record in {pin.record for pin in tree.pins}.intersection(tree.own[one.thread]):
            yield from _drop_pins(tree, record)  # a pin of a thread that stays would hold it
    removed = (yield from collect(tree, Cut(threads=numbers))).removed
    for one in doomed if stay else ():
        [tombs] = yield Batch(_TOMBS(tenant=tenant, tree=row.tree, thread=one.thread))
        for (tomb,) in tombs:
            yield from _empty(tenant, row.tree, tomb)
    return Wiped(row.tree, doomed, removed, told)


def _drop_pins(tree: Tree, record: int) -> Generator[Batch, list[Rows], None]:
    yield Batch(_DROP_PINS(tenant=tree.tenant, tree=tree.tree, record=record))
    tree.pins = [pin for pin in tree.pins if pin.record != record]


# --- one checkpoint


def wipe_record(tenant: int, name: str, number: int, record: int, at: int) -> Program[int]:
    """Decide that a checkpoint goes, for all threads that share it; how many records went. Its children get full texts
    of their own."""
    row, threads = yield from lock_tree(tenant, name, number)
    tree = yield from read_tree(tenant, row.tree, threads)
    node = tree.nodes.get(record)
    if node is None or (node.thread != row.thread and row.thread not in holders(tree, [record])):
        raise NotFound(f"thread {name!r} has no checkpoint {show_id(record)}: nothing was erased")
    yield from mark(tenant, at)
    found = yield from record_in(tenant, row.tree, record)
    yield from _drop_what_led_there(tree, node)
    yield from _drop_pins(tree, record)
    removed = (yield from collect(tree, Cut(erase=record))).removed
    yield from _empty(tenant, row.tree, record)
    yield from note(tenant, row.thread, record, 1, found.hash, at)
    yield from _forget_tree(tenant, row.tree, record)
    return removed


def _drop_what_led_there(tree: Tree, node: Node) -> Generator[Batch, list[Rows], None]:
    """What a graph's step wrote is pending on the checkpoint before the one that it made: it says the same, and
    continuing from there would make the checkpoint again. Unless another checkpoint was made there too, or a thread was
    forked before this one was made: then it is theirs."""
    others = (other for other in tree.nodes.values() if other.parent == node.parent and other.id != node.id)
    if node.parent is None or any(other.body is not None for other in others):
        return
    having = holders(tree, [node.id])
    before = [label for thread in having for label in tree.labels.get(thread, ()) if label.record == node.parent]
    for start in range(0, len(before), _BATCH):
        yield Batch(*drop_writes(tree.tenant, before[start : start + _BATCH]))


def _empty(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    """Take the note and the metadata from a tombstone, and say that the history continues behind it."""
    yield Batch(_EMPTY(tenant=tenant, tree=tree, id=record, keyframe=ERASED))


# --- the bytes


def finish(tenant: int, dialect: Dialect, *, full: bool = False) -> Flow[list[str]]:
    """Scrub the files and delete the note that this is to be done. Returns what prevented it."""
    at = yield from read(partial(marked, tenant))
    yield from write(partial(_forget_owners, tenant))
    problems = yield from scrub(dialect, full)
    if not problems and at is not None:
        yield from write(partial(_unmark, tenant, at))
    return problems


# What snapshots keep. A body is reached by the record that it belongs to.
OWNERS = "(SELECT thread FROM erased WHERE tenant = :tenant AND record = 0)"
# SQLite gives the number of a removed body to another one: it is theirs only while both were there.
_BODIES = """(tenant, id, died) IN (
    SELECT b.tenant, b.id, b.died FROM record_past r
    JOIN body_past b ON b.tenant = r.tenant AND b.id = r.body AND b.stamp < r.died AND r.stamp < b.died
    WHERE r.tenant = :tenant AND r.{})"""


def _forget_owners(tenant: int) -> Program[None]:
    """Remove threads and runs that were erased from snapshots too."""
    removals = [("body", _BODIES.format(f"thread IN {OWNERS}"))]
    removals += [
        (name, f"tenant = :tenant AND {table.owner} IN {OWNERS}")
        for name, table in versioned_tables().items()
        if table.owner
    ]
    yield from forget(*removals, tenant=tenant)


def _forget_tree(tenant: int, tree: int, record: int) -> Program[None]:
    """Snapshots no longer show the threads of a tree: differences that they keep tell of the erased checkpoint. Nor
    those of trees that had it before a restore brought it back into this one."""
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


def _unmark(tenant: int, at: str) -> Program[None]:
    yield Batch(_UNMARK(tenant=tenant, key=_key(tenant), at=at), last=True)


def scrub(dialect: Dialect, full: bool) -> Flow[list[str]]:
    """Let what was removed, or written over, be gone from the store's own files. What was in the way, as sentences."""
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
    tables.append(_SAMPLES)
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


def _foreign() -> Program[set[str]]:
    """Tables that this role may not vacuum."""
    [rows] = yield Batch(_FOREIGN(), last=True)
    return {name for (name,) in rows}
