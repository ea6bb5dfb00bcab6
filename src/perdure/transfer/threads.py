"""Copying threads into any store: the records they need, their namespaces, ids, pending writes and pins.

The unit is a tree, because threads that were forked from one another share records: the chosen threads of a tree are
copied together, under new numbers. Records of other threads of the tree go along only where a chosen thread's history
or a state of it is built on them. Packed records get bodies of their own; the target packs them again when it is
compacted. Before the threads' rows are written, every record of the copy is rebuilt and checked against its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import msgspec
import orjson
from blake3 import blake3

from perdure.errors import Conflict, Damaged, UsageError
from perdure.log.append import INSERT
from perdure.log.domain import TABLES
from perdure.log.packs import PACK, Packs
from perdure.log.reading import NOT_SWEPT, read_state
from perdure.log.records import R_COLUMNS, RECORD_ENCRYPTED, Record, record_of
from perdure.log.thread_table import (
    MINUTE_US,
    ThreadRow,
    add_tags,
    find_thread,
    metadata_of,
    next_number,
    thread_or_stub,
)
from perdure.log.verify import Findings, verify_tree
from perdure.storage.columns import DIFF, FULL_TEXT, SALT
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, drive, read, write
from perdure.threads.context import Context
from perdure.transfer.catalogue import drop_cursor, read_cursor, save_cursor
from perdure.transfer.tables import TableCopy, table_copy
from perdure.values.delta import Decoder, Encoder
from perdure.values.dictionary import Dictionary

encode = msgspec.msgpack.Encoder().encode
_PAGE = 200
_WIDTH = len(Record._fields)
Advance = Callable[[int], None]  # called with how many rows were written

# All records that a thread's history, labels, pins and pending writes are built on.
_NEEDED = Sql(
    """WITH RECURSIVE needed (id) AS (
        SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread
        UNION SELECT head FROM thread WHERE tenant = :tenant AND thread = :thread
        UNION SELECT origin FROM thread WHERE tenant = :tenant AND thread = :thread
        UNION SELECT record FROM label WHERE tenant = :tenant AND thread = :thread
        UNION SELECT record FROM pin WHERE tenant = :tenant AND thread = :thread
        UNION SELECT base FROM write WHERE tenant = :tenant AND thread = :thread
        UNION SELECT CASE way.n WHEN 0 THEN r.parent WHEN 1 THEN r.base ELSE r.key END
            FROM needed JOIN record r ON r.tenant = :tenant AND r.tree = :tree AND r.id = needed.id
            CROSS JOIN (SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2) way
    )
    SELECT id FROM needed WHERE id IS NOT NULL"""
)
_RECORDS = Sql(
    f"""SELECT {R_COLUMNS}, b.salt, b.diff, b.full_text
    FROM record r LEFT JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT} ORDER BY r.id LIMIT :limit""",
    opens={**RECORD_ENCRYPTED, _WIDTH: SALT, _WIDTH + 1: DIFF, _WIDTH + 2: FULL_TEXT},
)
_PACKED = Sql("SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND body = :body ORDER BY id")
_RETENTION = Sql("SELECT retention FROM thread WHERE tenant = :tenant AND thread = :thread")
_OWNED = {table.name: table for table in TABLES}
_THREAD, _RECORD = (table_copy(_OWNED[name], name) for name in ("thread", "record"))
_TABLES = tuple(table_copy(_OWNED[name], "thread") for name in ("space", "label", "write", "pin"))
_DROP_BODIES = Sql(
    """DELETE FROM body WHERE tenant = :tenant AND id IN (
        SELECT body FROM record WHERE tenant = :tenant AND tree = :tree AND body IS NOT NULL)"""
)
_DROP_RECORDS = Sql("DELETE FROM record WHERE tenant = :tenant AND tree = :tree")


def thread_digest(tenant: int, name: str) -> Program[bytes]:
    """A hash of all that a thread holds. A copy of it has the same, because no number of the store is in it."""
    row = yield from find_thread(tenant, name)
    this = {"tenant": tenant, "thread": row.thread}
    needed, retention, *tables = yield Batch(
        _NEEDED(**this, tree=row.tree),
        _RETENTION(**this),
        *(copy.rows(tenant, row.thread) for copy in _TABLES),
    )
    known = sorted(  # databases differ in how they order text
        encode([value for name, value in zip(copy.table.columns, one, strict=True) if name not in ("thread", "tree")])
        for copy, found in zip(_TABLES, tables, strict=True)
        for one in found
    )
    return blake3(encode([row[2:5], row[6:], sorted(needed), retention, known])).digest()


class TreeTransfer:
    """The transfer of some threads of one tree."""

    def __init__(self, source: Context, target: Context, names: Sequence[str], advance: Advance) -> None:
        self._source, self._target, self._names, self._advance = source, target, sorted(names), advance
        self._from = drive(source.driver, source.tenant()) or 0
        self._to = drive(target.driver, target.ensure_tenant())
        self._unit = f"threads {blake3(orjson.dumps(self._names)).hexdigest(16)}"
        self._pack: tuple[int, dict[int, tuple[bytes, bytes]]] = (0, {})  # the pack opened last: salts and differences

    def run(self) -> int:
        """Copy them. How many records the copy has."""
        return int(drive(self._source.driver, read(self._copy)))

    # --- reading; between two batches, writing to the target

    def _copy(self) -> Program[int]:
        threads, retentions = [], []
        needed: set[int] = set()
        for name in self._names:
            row = yield from find_thread(self._from, name)
            found, retention = yield Batch(
                _NEEDED(tenant=self._from, tree=row.tree, thread=row.thread),
                _RETENTION(tenant=self._from, thread=row.thread),
            )
            needed.update(record for (record,) in found)
            threads.append(row)
            retentions.append(retention[0][0])
        state = self._write(partial(self._begin, threads))
        records = yield from self._copy_records(threads[0].tree, needed, state)
        for table in _TABLES:
            for row in threads:
                yield from self._copy_table(table, row, state)
        self._check(threads, state, records)
        self._write(partial(self._publish, threads, retentions, state))
        return records

    def _copy_records(self, tree: int, needed: set[int], state: dict[str, Any]) -> Generator[Batch, list[Rows], int]:
        after, count = -1, 0
        while rows := (yield Batch(_RECORDS(tenant=self._from, tree=tree, after=after, limit=_PAGE)))[0]:
            statements = []
            for row in rows:
                record = record_of(row[:_WIDTH])
                after = record.id
                if record.id in needed:
                    body = row[_WIDTH:]
                    if record.body is not None and record.body < 0:
                        body = (*(yield from self._packed(tree, record)), None)
                    statements.append(self._record(record, body, state))
                    count += record.body is not None
            self._save(statements)
        return count

    def _packed(self, tree: int, record: Record) -> Generator[Batch, list[Rows], tuple[bytes, bytes]]:
        """The salt and the difference of a record in a pack, as they are stored outside of one."""
        pack = -(record.body or 0)
        if self._pack[0] != pack:
            keyframe = yield from read_state(self._from, tree, record.key)
            rows, members = yield Batch(
                PACK(tenant=self._from, pack=pack), _PACKED(tenant=self._from, tree=tree, body=-pack)
            )
            if keyframe is None or not rows:
                raise Damaged("a pack of differences, or its keyframe, is missing: run `perdure store verify`")
            packs, opened = Packs(rows), {}
            dictionary = Dictionary(keyframe.data)
            encoder, decoder = Encoder(dictionary), Decoder(dictionary)
            for index, (member,) in enumerate(members):
                [splices] = decoder.decode([packs.diff(pack, index, keyframe.data)])
                opened[member] = packs.salt(pack, index), encoder.encode_splices(splices)
            self._pack = pack, opened
        return self._pack[1][record.id]

    def _copy_table(self, copy: TableCopy, row: ThreadRow, state: dict[str, Any]) -> Generator[Batch, list[Rows], None]:
        thread, offset = state["threads"][str(row.thread)], 0
        while rows := (yield Batch(copy.rows(self._from, row.thread, _PAGE, offset)))[0]:
            offset += len(rows)
            self._save(copy.inserts(self._to, rows, thread=thread, tree=state["tree"]))

    # --- the target

    def _write(self, op: Any) -> Any:
        return drive(self._target.driver, write(op, solo=True))

    def _save(self, statements: list[Statement]) -> None:
        def batch() -> Program[None]:
            yield Batch(*statements, last=True)

        self._write(batch)
        self._advance(len(statements))

    def _begin(self, threads: Sequence[ThreadRow]) -> Program[dict[str, Any]]:
        """The numbers that the copy gets. What an earlier call has copied is dropped."""
        yield from self._clear()
        for name in self._names:
            if (yield from thread_or_stub(self._to, name)) is not None:
                raise UsageError(f"there is another thread {name!r} in the target already: nothing was copied")
        numbers = {}
        for row in threads:
            numbers[str(row.thread)] = yield from next_number()
        own = numbers.get(str(threads[0].tree))
        tree = own if own is not None else (yield from next_number())
        state = {"tree": tree, "threads": numbers}
        yield Batch(save_cursor(self._to, self._unit, state))
        return state

    def _record(self, record: Record, body: Sequence[Any], state: dict[str, Any]) -> Statement:
        owner = state["threads"].get(str(record.thread)) or min(state["threads"].values())
        columns = record._replace(tree=state["tree"], thread=owner)
        params = columns._asdict() | {"tenant": self._to}
        del params["body"]
        if record.body is None:
            return _RECORD.insert(**params, body=None)
        salt, diff, full = body
        return INSERT(**params, salt=salt, diff=diff, full_text=full)

    def _check(self, threads: Sequence[ThreadRow], state: dict[str, Any], records: int) -> None:
        """Rebuild every record of the copy and compare it with its hash. Raises Damaged."""
        found: Findings = drive(self._target.driver, verify_tree(self._to, state["tree"]))
        if found.problems:
            raise Damaged(
                f"the copy of thread {threads[0].name!r} does not add up, so it was not made visible: "
                f"{found.problems[0][2]}. Run `perdure store verify` on the source"
            )
        if found.records != records:
            raise Conflict(f"another process writes to the copy of thread {threads[0].name!r}: transfer it again")

    def _publish(
        self, threads: Sequence[ThreadRow], retentions: Sequence[str | None], state: dict[str, Any]
    ) -> Program[None]:
        """The threads' rows: from now on they can be found."""
        for row, retention in zip(threads, retentions, strict=True):
            thread = state["threads"][str(row.thread)]
            params = row._asdict() | {"thread": thread, "tree": state["tree"], "generation": 0}
            yield Batch(
                _THREAD.insert(tenant=self._to, **params, active=row.updated_at // MINUTE_US, retention=retention),
                *add_tags(self._to, thread, metadata_of(row)),
            )
        yield Batch(drop_cursor(self._to, self._unit))

    def _clear(self) -> Program[None]:
        """Drop what an earlier call has copied."""
        state = yield from read_cursor(self._to, self._unit)
        if state is None:
            return
        tree = {"tenant": self._to, "tree": state["tree"]}
        yield Batch(_DROP_BODIES(**tree))
        yield Batch(_DROP_RECORDS(**tree), drop_cursor(self._to, self._unit))
        for thread in state["threads"].values():
            yield Batch(*(copy.drop(tenant=self._to, number=thread) for copy in _TABLES))
