"""Moving or copying a run, with the runs that it started, into any store.

A finished run is copied, with its states, in one transaction of the target. Any other run moves, in three:

    1  arrive     the target gets its rows, under new numbers, with the status `exported`: no worker can claim it yet
    2  fence      the source reads the run again in a write transaction; if nothing has changed, it gets the status
                  `exported` and a higher fence. From here on no process can continue it in the source
    3  publish    the target gets the threads that hold the states (`threads.py`), and the runs get their statuses:
                  workers may claim them

A kill before 2 changes nothing that counts; the same call drops what has arrived, if the run has changed since. A kill
after 2 leaves a run that neither store continues, and the same call does the rest. A fork takes the part of the journal
that it shares along, as rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from perdure.errors import Conflict, JournalDamaged, NotFound, UsageError
from perdure.log import gc
from perdure.log.archived import check_archived
from perdure.log.thread_table import ThreadRow, find_thread, next_number, thread_or_stub
from perdure.runs.calls.state import thread_name
from perdure.runs.domain import TABLES
from perdure.runs.engine import flows
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import blob_hash, blob_statements
from perdure.runs.journal.entries import DIGEST_MASK, entry_digest
from perdure.runs.journal.journal import read_whole
from perdure.runs.journal.rows import ARGS_OF, FINISHED, RUN_ENCRYPTED, TASK, WAITS, RunRow
from perdure.runs.journal.rows import COLUMNS as RUN_COLUMNS
from perdure.storage.columns import BLOB, INPUT
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, drive, read, write
from perdure.threads.context import StoreContext
from perdure.transfers.tables import table_copy
from perdure.transfers.threads import Advance, copy_threads, encode, thread_digest

_ATTEMPTS = 8
_PAGE = 200
_OF_FAMILY = "FROM run WHERE tenant = :tenant AND root = :root ORDER BY run"
_FAMILY = Sql(f"SELECT {RUN_COLUMNS} {_OF_FAMILY}", opens=RUN_ENCRYPTED)
_BLOB = Sql("SELECT body FROM blob WHERE tenant = :tenant AND hash = :hash", opens={0: BLOB})
_OWN_BLOBS = Sql("SELECT hash FROM run_blob WHERE tenant = :tenant AND run = :run")
_TABLES = {table.name: table for table in TABLES}
_RUN, _JOURNAL = table_copy(_TABLES["run"], "run"), table_copy(_TABLES["journal"], "run")
# Arguments are bound to the incarnation, journals may be shared with a fork, and blobs by many runs.
_VALUES = table_copy(_TABLES["run_value"], "run", "kind <> 'args'")
_COPIED = (_VALUES, *(table_copy(_TABLES[name], "run") for name in ("ask", "answer", "signal")))
# Every writer locks a run before its questions, and runs in the order of their numbers.
_LOCK_FAMILY = Sql("SELECT run FROM run WHERE tenant = :tenant AND root = :root ORDER BY run {for_update}")
_LOCK_ASKS = Sql(
    """SELECT a.path FROM ask a JOIN run r ON r.tenant = a.tenant AND r.run = a.run
    WHERE a.tenant = :tenant AND r.root = :root ORDER BY a.run, a.path {for_update}"""
)
_FENCE = Sql(
    """UPDATE run SET status = 'exported', fence = fence + 1, owner = NULL, request = NULL, waiting = :waiting,
        changed_at = {now} WHERE tenant = :tenant AND run = :run""",
    seals=WAITS,
)
_CLOSE_ASKS = Sql("UPDATE ask SET status = 'closed' WHERE tenant = :tenant AND run = :run AND status = 'open'")
_PUBLISH = Sql(
    """UPDATE run SET status = :status, wake_at = :wake_at, waiting = :waiting
    WHERE tenant = :tenant AND run = :run AND status = 'exported'""",
    seals=WAITS,
)
_RENAME = Sql("UPDATE run SET id = :id, input = :input WHERE tenant = :tenant AND run = :run", seals={"input": INPUT})
_RENAME_THREAD = Sql("UPDATE thread SET name = :name WHERE tenant = :tenant AND thread = :thread")
_DROPS = (*(copy.drop for copy in (_JOURNAL, *_COPIED)), table_copy(_TABLES["run_blob"], "run").drop, _RUN.drop)

LockedTree = tuple[ThreadRow, list[ThreadRow]]  # a thread, and all threads of its tree


class RunPart(NamedTuple):
    """What is stored of one run."""

    row: RunRow
    args: bytes | None
    journal: Rows  # seq, kind, body
    copied: list[Rows]  # of each table in _COPIED
    blobs: list[bytes]


def copy_run(source: StoreContext, to: int, run_id: str, advance: Advance, *, as_is: bool = False) -> Program[int]:
    """Inside a write transaction of the target: copy a finished run, those it started, and their states. How many runs;
    0: they are there already. `as_is`: whatever its status, for a copy that is not continued."""
    tenant, top = drive(source.driver, flows.locate(source, run_id))
    flows.check_no_task(top)
    if (yield from _has(to, top)):
        return 0
    parts = drive(source.driver, read(partial(_collect, tenant, top.run, move=None if as_is else False)))
    yield from _add_family(to, parts, {part.row.run: {} for part in parts}, advance)
    yield from _copy_states(source, to, [part.row.id for part in parts], advance)
    return len(parts)


def copy_tasks(source: StoreContext, to: int, thread: str, advance: Advance) -> Program[None]:
    """Inside a write transaction of the target that has a copy of a graph's thread: what its tasks have recorded."""
    tenant = drive(source.driver, source.tenant()) or 0
    old = drive(source.driver, read(partial(find_thread, tenant, thread)))
    new = yield from find_thread(to, thread)
    parts = drive(source.driver, read(partial(_tasks, tenant, old.thread)))
    yield from _add_family(to, parts, {part.row.run: {"root": new.thread} for part in parts}, advance)


def _tasks(tenant: int, thread: int) -> Program[list[RunPart]]:
    [found] = yield Batch(_FAMILY(tenant=tenant, root=thread))
    parts: list[RunPart] = []
    for row in (row for row in map(RunRow._make, found) if row.function.startswith(TASK)):
        part = yield from read_run(tenant, row)
        parts.append(part)
    return parts


class RunMove:
    """The move of one run and those that it started. `where`: what the source says of where it went."""

    def __init__(self, source: StoreContext, target: StoreContext, run_id: str, where: str, advance: Advance) -> None:
        self._source, self._target, self._id, self._where, self._advance = source, target, run_id, where, advance
        self._to = drive(target.driver, target.ensure_tenant())

    def run(self) -> int:
        """Do it. How many runs were moved; 0: they are there already."""
        for _ in range(_ATTEMPTS):
            tenant, top = drive(self._source.driver, flows.locate(self._source, self._id))
            flows.check_no_task(top)
            arrived = drive(self._target.driver, read(partial(_arrived, self._to, self._id)))
            about = _about(arrived[0]) if arrived else {}
            if top.status == "exported" and about.get("token", "") == _about(top).get("token"):
                return int(self._write(self._publish))
            if top.status in FINISHED and drive(self._target.driver, read(partial(_has, self._to, top))):
                return 0
            if top.status == "exported":
                raise UsageError(
                    f"run {self._id!r} was moved already, to {_about(top).get('to', 'another store')}: it continues "
                    "there. If that transfer was interrupted, repeat it with the same target"
                )
            parts = drive(self._source.driver, read(partial(_collect, tenant, top.run, move=True)))
            seen = blake3(encode(parts)).hexdigest()
            if about.get("seen") != seen:
                about = {"for": "arrival", "seen": seen, "token": self._target.entropy(16).hex()}
                self._write(partial(self._arrive, parts, about))
            try:
                fenced = drive(self._source.driver, write(partial(self._fence, tenant, top, about), solo=True))
            except UsageError:
                self._write(self._clear)
                raise
            if fenced:
                return int(self._write(self._publish))
        raise Conflict(f"run {self._id!r} changed each time it was to be moved: pause it first, then move it")

    def _write(self, op: Callable[[], Program[Any]]) -> Any:
        return drive(self._target.driver, write(op, solo=True))

    def _arrive(self, parts: list[RunPart], about: dict[str, Any]) -> Program[None]:
        """1: in place of what an earlier call has brought, if there is something."""
        yield from self._clear()
        changes = {}
        for row, *_ in parts:
            then = {"status": row.status, "wake_at": row.wake_at, "waiting": row.waiting}
            waiting = orjson.dumps(about | {"then": then}).decode()
            changes[row.run] = {"status": "exported", "wake_at": rows.NEVER, "waiting": waiting}
        yield from _add_family(self._to, parts, changes, self._advance)

    def _clear(self) -> Program[None]:
        for row in (yield from _arrived(self._to, self._id)):
            yield Batch(*drop_run(self._to, row.run))

    def _fence(self, tenant: int, top: RunRow, about: dict[str, Any]) -> Program[bool]:
        """2: in the source. False if the run has changed since it was read."""
        yield Batch(_LOCK_FAMILY(tenant=tenant, root=top.root), _LOCK_ASKS(tenant=tenant, root=top.root))
        parts = yield from _collect(tenant, top.run, move=True)
        if blake3(encode(parts)).hexdigest() != about["seen"]:
            return False
        waiting = orjson.dumps({"for": "transfer", "to": self._where, "token": about["token"]}).decode()
        now = self._source.clock_us()
        for part in parts:
            this = {"tenant": tenant, "run": part.row.run}
            yield Batch(_FENCE(**this, waiting=waiting, now=now), _CLOSE_ASKS(**this))
        return True

    def _publish(self) -> Program[int]:
        """3: the states, and the statuses that let workers claim the runs."""
        arrived = yield from _arrived(self._to, self._id)
        yield from _copy_states(self._source, self._to, [row.id for row in arrived], self._advance)
        for row in arrived:
            yield Batch(_PUBLISH(tenant=self._to, run=row.run, **_about(row)["then"]))
        return len(arrived)


def _about(row: RunRow) -> dict[str, Any]:
    """Of a run with the status `exported`: where it is going, or coming from."""
    return orjson.loads(row.waiting) if row.waiting and row.status == "exported" else {}


# --- the target


def _has(tenant: int, top: RunRow) -> Program[bool]:
    """Whether the target has this very run."""
    [found] = yield Batch(rows.BY_ID(tenant=tenant, id=top.id))
    there = RunRow._make(found[0]) if found else None
    return there is not None and there.status != "exported" and bytes(there.incarnation) == bytes(top.incarnation)


def _arrived(tenant: int, run_id: str) -> Program[list[RunRow]]:
    """A run that has arrived and is not published, and those it started."""
    [found] = yield Batch(rows.BY_ID(tenant=tenant, id=run_id))
    if not found or _about(top := RunRow._make(found[0])).get("for") != "arrival":
        return []
    [family] = yield Batch(_FAMILY(tenant=tenant, root=top.run))
    return [RunRow._make(row) for row in family]


def _add_family(
    to: int, parts: list[RunPart], changes: dict[int, dict[str, Any]], advance: Advance
) -> Generator[Batch, list[Rows], None]:
    """Write runs under new numbers. `changes`: columns that get other values, by the run's old number."""
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


def _make_room(to: int, row: RunRow) -> Generator[Batch, list[Rows], None]:
    """What is left of a run that was moved out of this store makes room when it comes back; a fork may still share its
    journal. Raises UsageError if the run is still here, or is another one, and Archived if its stub is."""
    [found] = yield Batch(rows.BY_ID(tenant=to, id=row.id))
    there = RunRow._make(found[0]) if found else None
    thread = yield from thread_or_stub(to, thread_name(row.id))
    if there is None:
        yield from check_archived(to, "run", row.id)
        if thread is not None:
            raise UsageError(f"there is a thread {thread.name!r} in the target already: nothing was copied")
        return
    if there.status != "exported" or bytes(there.incarnation) != bytes(row.incarnation) or there.fence > row.fence + 1:
        raise UsageError(f"there is a run {row.id!r} in the target already ({there.status}): nothing was copied")
    old = f"{row.id[:450]}~moved-{there.run}"
    yield Batch(_RENAME(tenant=to, run=there.run, id=old, function=there.function, input=there.input))
    if thread is not None:
        yield Batch(_RENAME_THREAD(tenant=to, thread=thread.thread, name=thread_name(old)))


def _copy_states(source: StoreContext, to: int, ids: list[str], advance: Advance) -> Program[None]:
    """The threads that hold the runs' states."""
    tenant = drive(source.driver, source.tenant()) or 0
    for name in map(thread_name, ids):
        if drive(source.driver, read(partial(thread_or_stub, tenant, name))) is not None:
            yield from copy_threads(source, to, [name], advance)


# --- reading a family


def _collect(tenant: int, run: int, move: bool | None) -> Program[list[RunPart]]:
    """A run and its descendants, parents first. Raises UsageError if it cannot be transferred as it is; not if `move`
    is None."""
    [found] = yield Batch(rows.BY_NUMBER(tenant=tenant, run=run))
    if not found:
        raise NotFound("the run is not there")
    top = RunRow._make(found[0])
    [members] = yield Batch(_FAMILY(tenant=tenant, root=top.root))
    family = [top]
    known = {top.run}
    for row in map(RunRow._make, members):  # a child has a greater number than its parent
        if row.parent in known and row.run != top.run:
            family.append(row)
            known.add(row.run)
    if move is not None:
        _check(top, family, move)
    parts: list[RunPart] = []
    for row in family:
        part = yield from read_run(tenant, row)
        parts.append(part)
    return parts


def _check(top: RunRow, family: list[RunRow], move: bool) -> None:
    if top.parent is not None:
        raise UsageError(f"run {top.id!r} was started by another run, which waits for it: transfer that one")
    for row in family:
        if row.status == "running":
            raise UsageError(f"run {row.id!r} is running: pause it (run.pause()), then move {top.id!r}")
        if row.status == "exported":
            raise UsageError(f"run {row.id!r} was moved already, to {_about(row).get('to', 'another store')}")
        if not move and row.status not in FINISHED:
            raise UsageError(
                f"run {row.id!r} is {row.status}: a copy of it would continue in two places. Move it with move=True"
            )


def drop_run(tenant: int, run: int) -> list[Statement]:
    """All rows of a run."""
    return [drop(tenant=tenant, number=run) for drop in _DROPS]


def run_state(tenant: int, run_id: str) -> Program[list[Any] | None]:
    """What tells a run and those it started from another state of them; None while one of them is not finished."""
    family = yield from _family(tenant, run_id)
    if any(row.status not in FINISHED for row in family):
        return None
    return sorted([row.id, bytes(row.incarnation), row.status, row.changed_at, row.keep_until or 0] for row in family)


def drop_family(tenant: int, run_id: str) -> Program[list[str]]:
    """Remove a run and those it started, whatever their status: from a store that continues none. Their ids."""
    family = yield from _family(tenant, run_id)
    for row in family:
        yield Batch(*drop_run(tenant, row.run))
    return [row.id for row in family]


def _family(tenant: int, run_id: str) -> Generator[Batch, list[Rows], list[RunRow]]:
    [found] = yield Batch(rows.BY_ID(tenant=tenant, id=run_id))
    root = RunRow._make(found[0]).root if found else 0
    [family] = yield Batch(_FAMILY(tenant=tenant, root=root))
    return [RunRow._make(row) for row in family]


def lock_family(tenant: int, run_id: str) -> Generator[Batch, list[Rows], None]:
    """Lock a run, those it started, and their questions, in the order of all writers."""
    [found] = yield Batch(rows.BY_ID(tenant=tenant, id=run_id))
    for row in map(RunRow._make, found):
        yield Batch(_LOCK_FAMILY(tenant=tenant, root=row.root), _LOCK_ASKS(tenant=tenant, root=row.root))


def run_digest(tenant: int, run_id: str) -> Program[tuple[bytes, list[RunRow], list[LockedTree]]]:
    """A hash of all that a finished run and those it started hold, which a copy has too; their rows, and their states,
    locked."""
    [found] = yield Batch(rows.BY_ID(tenant=tenant, id=run_id))
    parts = yield from _collect(tenant, found[0][0] if found else 0, move=False)
    known: list[Any] = [
        (
            part.row.id,
            part.row.incarnation,
            part.row.status,
            *part[1:3],
            sorted(encode(row[1:]) for some in part.copied for row in some),
        )
        for part in parts
    ]
    states = []
    for part in parts:
        thread = yield from thread_or_stub(tenant, thread_name(part.row.id))
        if thread is not None:
            states.append((yield from gc.lock_tree(tenant, thread.name, thread.thread)))
            known.append((yield from thread_digest(tenant, thread.name)))
    return blake3(encode(known)).digest(), [part.row for part in parts], states


def read_run(tenant: int, row: RunRow) -> Program[RunPart]:
    """All that is stored of a run. Raises JournalDamaged."""
    journal = yield from read_whole(tenant, row)
    args, own, *copied = yield Batch(
        ARGS_OF(tenant=tenant, run=row.run),
        _OWN_BLOBS(tenant=tenant, run=row.run),
        *(copy.rows(tenant, row.run) for copy in _COPIED),
    )
    keys = [*((recorded.entry.extra or {}).get("blob") for recorded in journal.entries), *(key for (key,) in own)]
    blobs = []
    for key in dict.fromkeys(key for key in keys if key is not None):
        [found] = yield Batch(_BLOB(tenant=tenant, hash=key))
        if not found or blob_hash(found[0][0]) != key:
            raise JournalDamaged(f"a large result of run {row.id!r} is damaged or gone; restore it from a backup")
        blobs.append(found[0][0])
    return RunPart(row, args[0][0] if args else None, journal.rows, copied, blobs)


# --- writing it


def _moved(part: RunPart, numbers: dict[int, int]) -> RunRow:
    """The row as the target has it."""
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
    found = _JOURNAL.inserts(tenant, [(number, *entry) for entry in part.journal])
    if part.args is not None:
        args = {"incarnation": part.row.incarnation, "args": part.args}
        found.append(rows.SET_ARGS(tenant=tenant, run=number, **args))
    for blob in part.blobs:
        found += blob_statements(tenant, number, blob)
    for copy, some in zip(_COPIED, part.copied, strict=True):
        found += copy.inserts(tenant, some, run=number)
    return found
