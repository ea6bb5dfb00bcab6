"""Copy threads of one tree into any store, under new numbers, in one transaction of the target.

Record ids and hashes stay. A record of another thread of the tree is copied only if the history or a state of a chosen
thread needs it. Before the transaction ends, every record of the copy is rebuilt and checked against its hash.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from perdure.errors import Damaged, UsageError
from perdure.log.append import INSERT
from perdure.log.records import R_COLUMNS, RECORD_ENCRYPTED, RECORDS_OF_THREAD, Record, record_of
from perdure.log.tables import DIFF, EXTERNAL_USE, FULL_TEXT, RECORD, SALT, TABLES, THREAD
from perdure.log.thread_table import (
    MINUTE_US,
    ThreadRow,
    add_tags,
    find_thread,
    metadata_of,
    next_number,
    try_thread,
)
from perdure.log.verify import check_tree
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, drive
from perdure.threads.context import StoreContext
from perdure.threads.externals import HAS_VALUES
from perdure.transfers.read_ahead import PAGE_ROWS, PATIENCE, Put, ReadAhead, next_page_rows
from perdure.transfers.run_rows import Advance, RunPart, add_runs, encode, read_tasks
from perdure.transfers.tables import TableCopy, insert_into, table_copy

_WIDTH = len(Record._fields)


class _Numbers(NamedTuple):
    """The numbers of the copy in the target. `threads` maps the old numbers of threads to the new ones."""

    tenant: int
    tree: int
    threads: dict[int, int]

    @property
    def heir(self) -> int:
        """The oldest thread. It gets the records of threads that are not copied."""
        return self.threads[min(self.threads)]

    def source(self, row: ThreadRow) -> int | None:
        """Return the source of a fork: its own, or the copied thread before it if that one is not copied, or None."""
        before = [number for number in self.threads if number < row.thread]
        if row.source in self.threads:
            return self.threads[row.source]
        return self.threads[max(before)] if before else None


# All records that a thread's history, labels, pins and pending writes need.
_NEEDED = Sql(f"WITH RECURSIVE {RECORDS_OF_THREAD} SELECT id FROM needed WHERE id IS NOT NULL")
_OF_BODY = "(SELECT b.{} FROM body b WHERE b.tenant = r.tenant AND b.id = r.body)"
_RECORDS = Sql(
    f"""SELECT {R_COLUMNS}, {_OF_BODY.format("salt")}, {_OF_BODY.format("diff")}, {_OF_BODY.format("full_text")}
    FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id IN {{numbers:ids}} ORDER BY r.id""",
    opens={**RECORD_ENCRYPTED, _WIDTH: SALT, _WIDTH + 1: DIFF, _WIDTH + 2: FULL_TEXT},
)
_RETENTION = Sql("SELECT retention, asked_at, asked_id FROM thread WHERE tenant = :tenant AND thread = :thread")
_ADD_THREAD, _ADD_TOMBSTONE = insert_into(THREAD), insert_into(RECORD)
_USES = Sql("SELECT hash, first, last FROM external_use WHERE tenant = :tenant AND tree = :tree")
_ADD_USE = insert_into(EXTERNAL_USE)
_TABLES = tuple(table_copy(table) for table in TABLES if table.moves)


def thread_digest(tenant: int, name: str) -> Program[bytes]:
    """Return a hash of all that a thread holds. It covers no number of the store, so a copy has the same hash."""
    row = yield from find_thread(tenant, name)
    key = {"tenant": tenant, "thread": row.thread}
    needed, retention, *tables = yield Batch(
        _NEEDED(**key, tree=row.tree),
        _RETENTION(**key),
        *(copy.rows(tenant, row.thread) for copy in _TABLES),
    )
    known = sorted(  # in Python, because databases order text differently
        encode([value for name, value in zip(copy.table.names, one, strict=True) if name not in ("thread", "tree")])
        for copy, answer in zip(_TABLES, tables, strict=True)
        for one in answer
    )
    return blake3(encode([row[2:5], row[6:10], sorted(needed), retention, known])).digest()


def copy_digest(tenant: int, name: str) -> Program[bytes]:
    """Return a hash of all that `copy_threads` copies: a thread and what its tasks have recorded."""
    row = yield from find_thread(tenant, name)
    tasks = yield from read_tasks(tenant, row.thread)
    known = sorted(encode(part.known()) for part in tasks)
    return blake3((yield from thread_digest(tenant, name)) + encode(known)).digest()


def copy_threads(source: StoreContext, to: int, names: Sequence[str], advance: Advance) -> Program[int]:
    """Copy threads of one tree with what their tasks have recorded, inside a write transaction of the target.

    Return how many records the copy has. Raises UsageError for a name that the target has, and Archived for one that
    is archived there.
    """
    yield Batch(PATIENCE())
    tenant = drive(source.driver, source.tenant()) or 0
    for name in names:
        if (yield from try_thread(to, name)) is not None:
            raise UsageError(f"there is another thread {name!r} in the target already: nothing was copied")
    tasks: list[RunPart] = []
    with ReadAhead(source.driver, partial(_read_with_tasks, tenant, sorted(names), tasks)) as pages:
        records, numbers = yield from add_threads(to, pages, advance)
    yield from add_runs(to, tasks, {part.row.run: {"root": numbers[part.row.root]} for part in tasks}, advance)
    return records


def add_threads(to: int, pages: Iterator[Any], advance: Advance) -> Program[tuple[int, dict[int, int]]]:
    """Write the pages of `read_threads`. Return the number of records, and the threads' new numbers by their old ones.

    Raises Damaged if the copy fails its checks.
    """
    threads: list[tuple[ThreadRow, tuple[str | None, int | None, bytes | None]]] = next(pages)
    numbers = yield from _new_numbers(to, [row for row, _ in threads])
    for page in pages:
        if statements := page(numbers):
            yield Batch(*statements)
            advance(len(statements))
    for row, (retention, asked_at, asked_id) in threads:
        if not isinstance(row.metadata, str | None):
            raise Damaged(
                f"the metadata of thread {row.name!r} cannot be read in the source: run `perdure store repair`"
            )
        thread = numbers.threads[row.thread]
        params = row._asdict() | {"thread": thread, "tree": numbers.tree, "generation": 0}
        params["source"] = numbers.source(row)
        asked = {"retention": retention, "asked_at": asked_at, "asked_id": asked_id}
        yield Batch(
            _ADD_THREAD(tenant=to, **params, active=row.updated_at // MINUTE_US, **asked),
            *add_tags(to, thread, metadata_of(row)),
        )
    findings = yield from check_tree(to, numbers.tree)
    if findings.problems:
        raise Damaged(
            f"the copy of thread {threads[0][0].name!r} does not add up, so that it was dropped: "
            f"{findings.problems[0][2]}. Run `perdure store verify` on the source"
        )
    return findings.records, numbers.threads


def _new_numbers(to: int, threads: Sequence[ThreadRow]) -> Generator[Batch, list[Rows], _Numbers]:
    numbers = {}
    for row in threads:
        numbers[row.thread] = yield from next_number()
    tree = numbers.get(threads[0].tree) or (yield from next_number())
    return _Numbers(to, tree, numbers)


# --- reading the source


def _read_with_tasks(tenant: int, names: Sequence[str], tasks: list[RunPart], put: Put) -> Program[None]:
    yield from read_threads(tenant, names, put)
    for name in names:
        row = yield from find_thread(tenant, name)
        tasks += yield from read_tasks(tenant, row.thread)


def read_threads(tenant: int, names: Sequence[str], put: Put) -> Program[None]:
    """Put the rows of threads of one tree, then functions that make the statements of each page."""
    threads: list[tuple[ThreadRow, tuple[str | None, int | None, bytes | None]]] = []
    needed: set[int] = set()
    for name in names:
        row = yield from find_thread(tenant, name)
        key = {"tenant": tenant, "thread": row.thread}
        records, retention = yield Batch(_NEEDED(**key, tree=row.tree), _RETENTION(**key))
        needed.update(record for (record,) in records)
        threads.append((row, retention[0]))
    put(threads)
    yield from _read_records(tenant, threads[0][0].tree, needed, put)
    [uses] = yield Batch(_USES(tenant=tenant, tree=threads[0][0].tree))
    put(partial(_uses, uses))
    for table in _TABLES:
        for row, _ in threads:
            offset, limit = 0, PAGE_ROWS // 10
            while rows := (yield Batch(table.rows(tenant, row.thread, limit, offset)))[0]:
                offset, limit = offset + len(rows), next_page_rows(limit, rows)
                put(partial(_in_table, table, row.thread, rows))


def _read_records(tenant: int, tree: int, needed: set[int], put: Put) -> Generator[Batch, list[Rows], None]:
    ids, start, limit = sorted(needed), 0, PAGE_ROWS // 10
    while start < len(ids):
        page_ids = orjson.dumps(ids[start : start + limit]).decode()
        [rows] = yield Batch(_RECORDS(tenant=tenant, tree=tree, ids=page_ids))
        start, limit = start + limit, next_page_rows(limit, rows)
        put(partial(_records, [(record_of(row[:_WIDTH]), row[_WIDTH:]) for row in rows]))


# --- pages of the target


def _records(page: Sequence[tuple[Record, Sequence[Any]]], numbers: _Numbers) -> list[Statement]:
    return [_record(record, body, numbers) for record, body in page]


def _record(record: Record, body: Sequence[Any], numbers: _Numbers) -> Statement:
    owner = numbers.threads.get(record.thread, numbers.heir)
    params = record._asdict() | {"tenant": numbers.tenant, "tree": numbers.tree, "thread": owner}
    del params["body"]
    if record.body is None:
        return _ADD_TOMBSTONE(**params, body=None)
    salt, diff, full = body
    return INSERT(**params, salt=salt, diff=diff, full_text=full)


def _uses(uses: Rows, numbers: _Numbers) -> list[Statement]:
    return [
        _ADD_USE(tenant=numbers.tenant, tree=numbers.tree, hash=key, first=first, last=last)
        for key, first, last in uses
    ]


def values_of(tenant: int, names: Sequence[str]) -> Program[list[bytes]]:
    """Return the hashes of the large values that threads of one tree, and what their tasks recorded, may refer to."""
    if not (yield Batch(HAS_VALUES(tenant=tenant)))[0]:
        return []
    keys: set[bytes] = set()
    for name in names:
        row = yield from find_thread(tenant, name)
        [uses] = yield Batch(_USES(tenant=tenant, tree=row.tree))
        tasks = yield from read_tasks(tenant, row.thread)
        keys |= {bytes(key) for key, _, _ in uses} | {key for task in tasks for _, key in task.values}
    return sorted(keys)


def _in_table(table: TableCopy, thread: int, rows: Rows, numbers: _Numbers) -> list[Statement]:
    return table.inserts(numbers.tenant, rows, thread=numbers.threads[thread], tree=numbers.tree)
