"""Read everything that is stored of one run, and write it to another store under a new number."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import msgspec

from perdure.errors import JournalDamaged, UsageError
from perdure.log.archived import check_archived
from perdure.log.thread_table import next_number, thread_numbered, thread_or_stub
from perdure.runs.calls.state import thread_name
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import blob_hash, blob_statements
from perdure.runs.journal.entries import DIGEST_MASK, entry_digest
from perdure.runs.journal.journal import read_whole
from perdure.runs.journal.rows import ARGS_OF, COLUMNS, NEVER, RUN_ENCRYPTED, TASK
from perdure.runs.journal.values import use
from perdure.runs.run_table import RUN, RunRow
from perdure.runs.tables import BLOB_BODY, INPUT, JOURNAL, OF_JOURNAL, RUN_BLOB, RUN_EXTERNAL, RUN_VALUE, TABLES
from perdure.storage.program import Batch, Program, Rows, Sql, Statement
from perdure.transfers.tables import table_copy

Advance = Callable[[int], None]  # called with how many rows were written
encode = msgspec.msgpack.Encoder().encode
_PAGE = 200
FAMILY = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND root = :root ORDER BY run", opens=RUN_ENCRYPTED)
_BLOB = Sql("SELECT body FROM blob WHERE tenant = :tenant AND hash = :hash", opens={0: BLOB_BODY})
_USES = Sql("SELECT kind, hash FROM run_external WHERE tenant = :tenant AND run = :run")
_OWN_BLOBS = Sql("SELECT hash FROM run_blob WHERE tenant = :tenant AND run = :run")
_RUN, _JOURNAL = table_copy(RUN), table_copy(JOURNAL)
# Not copied as plain rows: arguments are bound to the incarnation, a fork may share the journal, many runs share blobs.
_VALUES = table_copy(RUN_VALUE, "kind <> 'args'")
COPIED = (_VALUES, *(table_copy(table) for table in TABLES if table.moves))
_RENAME = Sql("UPDATE run SET id = :id, input = :input WHERE tenant = :tenant AND run = :run", seals={"input": INPUT})
_RENAME_THREAD = Sql("UPDATE thread SET name = :name WHERE tenant = :tenant AND thread = :thread")
_DROPS = (
    *(copy.drop for copy in (_JOURNAL, *COPIED)),
    table_copy(RUN_BLOB).drop,
    table_copy(RUN_EXTERNAL).drop,
    _RUN.drop,
)


class RunPart(NamedTuple):
    row: RunRow
    args: bytes | None
    journal: Rows  # seq, kind, body
    copied: list[Rows]  # of each table in COPIED
    blobs: list[bytes]
    values: list[tuple[str, bytes]]  # uses of large values: kind and hash

    def known(self) -> list[Any]:
        """Return the values that are the same in a copy of the run."""
        copied = sorted(encode(row[1:]) for some in self.copied for row in some)
        return [self.row.id, self.row.incarnation, self.row.status, self.args, self.journal, copied]


def read_run(tenant: int, row: RunRow) -> Program[RunPart]:
    """Read everything that is stored of a run. Raises JournalDamaged."""
    journal = yield from read_whole(tenant, row)
    args, own, uses, *copied = yield Batch(
        ARGS_OF(tenant=tenant, run=row.run),
        _OWN_BLOBS(tenant=tenant, run=row.run),
        _USES(tenant=tenant, run=row.run),
        *(copy.rows(tenant, row.run) for copy in COPIED),
    )
    keys = [*((recorded.entry.extra or {}).get("blob") for recorded in journal.entries), *(key for (key,) in own)]
    blobs = []
    for key in dict.fromkeys(key for key in keys if key is not None):
        [rows_there] = yield Batch(_BLOB(tenant=tenant, hash=key))
        if not rows_there or blob_hash(rows_there[0][0]) != key:
            raise JournalDamaged(f"a large result of run {row.id!r} is damaged or gone; restore it from a backup")
        blobs.append(rows_there[0][0])
    values = {(kind, bytes(key)) for kind, key in uses}
    for part in journal.segments[:-1]:
        [shared] = yield Batch(_USES(tenant=tenant, run=part.run))
        values |= {(OF_JOURNAL, bytes(key)) for _, key in shared}
    return RunPart(row, args[0][0] if args else None, journal.rows, copied, blobs, sorted(values))


def read_tasks(tenant: int, thread: int) -> Program[list[RunPart]]:
    """Read what the tasks of a graph's thread have recorded, as a copy has it.

    A running task becomes a waiting one, because no process runs it in the copy. Its last call is in doubt, as after a
    crash.
    """
    [family] = yield Batch(FAMILY(tenant=tenant, root=thread))
    parts: list[RunPart] = []
    for row in (row for row in map(RunRow._make, family) if row.function.startswith(TASK)):
        part = yield from read_run(tenant, row)
        if row.status == "running":
            part = part._replace(row=row._replace(status="waiting", wake_at=NEVER))
        parts.append(part)
    return parts


def add_runs(
    to: int, parts: list[RunPart], changes: dict[int, dict[str, Any]], advance: Advance
) -> Generator[Batch, list[Rows], None]:
    """Write runs under new numbers. `changes` has new values of columns, by the run's old number."""
    numbers: dict[int, int] = {}
    for part in parts:
        yield from _make_room(to, part.row)
        number = numbers[part.row.run] = yield from next_number()
        row = _moved(part, numbers)._replace(**changes[part.row.run])
        yield Batch(_RUN.insert(tenant=to, **row._asdict()))
        statements = _statements(to, part, number)
        for start in range(0, len(statements), _PAGE):
            yield Batch(*statements[start : start + _PAGE])
        advance(len(statements) + 1)


def drop_run(tenant: int, run: int) -> list[Statement]:
    """Return the statements that delete all rows of a run."""
    return [drop(tenant=tenant, number=run) for drop in _DROPS]


def _make_room(to: int, row: RunRow) -> Generator[Batch, list[Rows], None]:
    """Free the id of a run that is to be written.

    Rename the row that an earlier move out of this store has left: a fork may still share its journal. Delete a task
    whose thread was deleted. Raises UsageError if the run or another one of this id is here, and Archived if the id is
    archived.
    """
    there = yield from rows.look_up(to, row.id)
    thread = yield from thread_or_stub(to, thread_name(row.id))
    if there is None:
        yield from check_archived(to, "run", row.id)
        if thread is not None:
            raise UsageError(f"there is a thread {thread.name!r} in the target already: nothing was copied")
        return
    if there.function.startswith(TASK) and (yield from thread_numbered(to, there.root)) is None:
        yield Batch(*drop_run(to, there.run))
        return
    if there.status != "exported" or bytes(there.incarnation) != bytes(row.incarnation) or there.fence > row.fence + 1:
        raise UsageError(f"there is a run {row.id!r} in the target already ({there.status}): nothing was copied")
    old = f"{row.id[:450]}~moved-{there.run}"
    yield Batch(_RENAME(tenant=to, run=there.run, id=old, function=there.function, input=there.input))
    if thread is not None:
        yield Batch(_RENAME_THREAD(tenant=to, thread=thread.thread, name=thread_name(old)))


def _moved(part: RunPart, numbers: dict[int, int]) -> RunRow:
    """Return a run's row with the numbers and the journal checksum of the target."""
    row = part.row
    number = numbers[row.run]
    total = sum(entry_digest(number, seq, kind, body) for seq, kind, body in part.journal)
    return row._replace(
        run=number,
        parent=numbers.get(row.parent or 0),
        root=next(iter(numbers.values())),
        origin=None,
        owner=None,
        fence=row.fence + 1,
        lease_until=0,
        wakeup_pending=0,
        entries=len(part.journal),
        digest=total & DIGEST_MASK,
        seq=max((row.seq, *(seq for seq, _, _ in part.journal))),
    )


def _statements(tenant: int, part: RunPart, number: int) -> list[Statement]:
    statements = _JOURNAL.inserts(tenant, [(number, *entry) for entry in part.journal])
    if part.args is not None:
        args = {"incarnation": part.row.incarnation, "args": part.args}
        statements.append(rows.SET_ARGS(tenant=tenant, run=number, **args))
    for blob in part.blobs:
        statements += blob_statements(tenant, number, blob)
    statements += [use(tenant, number, kind, key) for kind, key in part.values]
    for copy, some in zip(COPIED, part.copied, strict=True):
        statements += copy.inserts(tenant, some, run=number)
    return statements
