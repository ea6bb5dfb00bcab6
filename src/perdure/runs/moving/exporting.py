"""Taking a run out of a store: read it, write the file, fence the source, make the file one that can be imported.

    1  read the run, and those that it has started, in one transaction
    2  write `<path>.part` and sync it; it cannot be imported yet
    3  in one transaction: read again, and if nothing has changed, mark the source `exported` and move its fence
    4  make the file ready, under its own name

A kill before 3 changes nothing: the next export begins anew. One after 3 leaves a fenced source that names the file,
and the same call again does 4. So at no time can the run go on in both places.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from perdure.errors import Conflict, Damaged, JournalDamaged, NotFound, UsageError
from perdure.log.history_walk import Stretch, read_stretch
from perdure.log.reading import read_state
from perdure.log.records import Record
from perdure.log.thread_table import try_thread
from perdure.runs.calls.state import thread_name
from perdure.runs.engine import flows
from perdure.runs.journal import rows
from perdure.runs.journal.entries import unpack
from perdure.runs.journal.journal import read_segments
from perdure.runs.journal.rows import ARGS_OF, FINISHED, RUN_CELLS, WAITS, RunRow
from perdure.runs.moving.packages import (
    BYTES_MAX,
    AnswerPart,
    AskPart,
    Package,
    RunPart,
    SignalPart,
    StatePart,
    fingerprint,
    publish,
    read_package,
    write_pending,
)
from perdure.storage.columns import ANSWER, ASK_ANSWER, BLOB, QUESTION, RUN_VALUE, SIGNAL, TERMS
from perdure.storage.program import Batch, Driver, Flow, Program, Rows, Sql, adrive, drive, read, write
from perdure.threads.context import Context

T = TypeVar("T")
_ATTEMPTS = 8
_STORE = Sql("SELECT value FROM meta WHERE key = 'store'")
_FAMILY = Sql(
    f"SELECT {', '.join(RunRow._fields)} FROM run WHERE tenant = :tenant AND root = :root ORDER BY run",
    opens=RUN_CELLS,
)
_VALUES = Sql(
    "SELECT sort, value FROM run_value WHERE tenant = :tenant AND run = :run AND sort <> 'args' ORDER BY sort",
    opens={1: RUN_VALUE.at("run", 0)},
)
_ASKS = Sql(
    """SELECT path, sort, question, terms, asked_at, deadline, status, answer FROM ask
    WHERE tenant = :tenant AND run = :run ORDER BY path""",
    opens={2: QUESTION.at("run", 0), 3: TERMS.at("run", 0), 7: ASK_ANSWER.at("run", 0)},
)
# After the family's rows: every writer locks a run before its questions.
_LOCK_ASKS = Sql(
    """SELECT a.path FROM ask a JOIN run r ON r.tenant = a.tenant AND r.run = a.run
    WHERE a.tenant = :tenant AND r.root = :root ORDER BY a.run, a.path {for_update}"""
)
_LOCK_FAMILY = Sql("SELECT run FROM run WHERE tenant = :tenant AND root = :root ORDER BY run {for_update}")
_ANSWERS = Sql(
    "SELECT path, who, value, at FROM answer WHERE tenant = :tenant AND run = :run ORDER BY path, who",
    opens={2: ANSWER.at("run", 0, 1)},
)
_SIGNALS = Sql(
    "SELECT topic, seq, key, value, at, received FROM signal WHERE tenant = :tenant AND run = :run ORDER BY topic, seq",
    opens={3: SIGNAL.at("run", 0, 2)},
)
_BLOB = Sql("SELECT body FROM blob WHERE tenant = :tenant AND hash = :hash", opens={0: BLOB})
_MARK = Sql(
    """UPDATE run SET status = 'exported', fence = fence + 1, owner = NULL, request = NULL, waiting = :waiting,
        changed_at = {now} WHERE tenant = :tenant AND run = :run""",
    seals=WAITS,
)
_CLOSE_ASKS = Sql("UPDATE ask SET status = 'closed' WHERE tenant = :tenant AND run = :run AND status = 'open'")


@dataclass(slots=True)
class Found:
    """A family of runs as it was read: their rows, and what goes into the file."""

    rows: list[RunRow]
    parts: list[RunPart]
    blobs: dict[bytes, bytes] = field(default_factory=dict)


class Export:
    """One export, in the order of its methods. `read` and `mark` are flows, the others touch files only."""

    def __init__(self, ctx: Context, run_id: str, path: str | Path, *, keep: bool) -> None:
        self._ctx = ctx
        self._id = run_id
        self._keep = keep
        self.path = Path(path)
        if not self.path.name:
            raise UsageError(f"{self.path} is a folder; name a file in it")
        self._part = self.path.with_name(self.path.name + ".part")
        self._package: Package | None = None
        self._token = ctx.entropy(16)
        self.is_marked = False  # by an export that was killed: only the file is to be made ready

    def read(self) -> Flow[None]:
        """1: what goes into the file."""
        ctx = self._ctx
        tenant, row = yield from flows.locate(ctx, self._id)
        flows.check_no_task(row)
        if row.status == "exported":
            self._take_up(row)
            return
        if self.path.exists():
            raise UsageError(f"{self.path} exists already: choose another name")
        found = yield from read(partial(_collect, tenant, row.run, keep=self._keep))
        store = yield from read(_store_id)
        for part in found.parts:
            yield from _add_states(tenant, part)
        self._package = Package(self._token, store, ctx.clock_us(), found.parts, list(found.blobs.values()))

    def write(self) -> None:
        """2: the file, safe on the disk, and not to be imported yet."""
        assert self._package is not None
        write_pending(self._package, self._part)

    def mark(self) -> Flow[bool]:
        """3: fence the source. False: it has changed since it was read; begin again."""
        if self._keep:
            return True
        assert self._package is not None
        tenant, row = yield from flows.locate(self._ctx, self._id)
        seen = fingerprint(self._package.runs)
        return (yield from write(partial(self._mark, tenant, row.root, row.run, seen), solo=True))

    def _mark(self, tenant: int, root: int, run: int, seen: bytes) -> Program[bool]:
        yield Batch(_LOCK_FAMILY(tenant=tenant, root=root), _LOCK_ASKS(tenant=tenant, root=root))
        found = yield from _collect(tenant, run, keep=False)
        if fingerprint(found.parts) != seen:
            return False
        about = {"for": "import", "file": str(self.path.absolute()), "export": self._token.hex()}
        waiting = orjson.dumps(about).decode()
        now = self._ctx.clock_us()
        for row in found.rows:
            yield Batch(
                _MARK(tenant=tenant, run=row.run, waiting=waiting, now=now), _CLOSE_ASKS(tenant=tenant, run=row.run)
            )
        return True

    def publish(self) -> None:
        """4: the file under its own name, to be imported from now on."""
        if self._part.exists():
            publish(self._part, self.path)

    def drop(self) -> None:
        """The source was not marked, and will not be: there is nothing to import."""
        self._part.unlink(missing_ok=True)

    def _take_up(self, row: RunRow) -> None:
        """An export that was killed between 3 and 4 is finished; another one has been done already."""
        about = orjson.loads(row.waiting) if row.waiting else {}
        for candidate in (self._part, self.path):
            if candidate.exists() and read_package(candidate, pending=True).token.hex() == about.get("export"):
                self.is_marked = True
                return
        raise UsageError(
            f"run {row.id!r} was exported already, to {about.get('file', 'a file')}: it goes on where that is "
            "imported. If the export was interrupted, call export_run again with that path"
        )


def _store_id() -> Program[str]:
    [found] = yield Batch(_STORE(), last=True)
    return str(found[0][0]) if found else ""


# --- reading a family


def _collect(tenant: int, run: int, *, keep: bool) -> Generator[Batch, list[Rows], Found]:
    """A run and its descendants, parents first. Raises UsageError if it cannot be exported as it is."""
    [found] = yield Batch(rows.BY_NUMBER(tenant=tenant, run=run))
    top = RunRow._make(found[0])
    [members] = yield Batch(_FAMILY(tenant=tenant, root=top.root))
    family = _descendants(top, [RunRow._make(row) for row in members])
    _check(top, family, keep)
    places = {row.run: place for place, row in enumerate(family)}
    gathered = Found(family, [])
    for row in family:
        part, hashes = yield from _part(tenant, row, None if row is family[0] else places[row.parent or 0])
        gathered.parts.append(part)
        for key in hashes:
            if key not in gathered.blobs:
                [bodies] = yield Batch(_BLOB(tenant=tenant, hash=key))
                if not bodies:
                    raise JournalDamaged(f"a large result of run {row.id!r} is gone; restore it from a backup")
                gathered.blobs[key] = bytes(bodies[0][0])
        if sum(map(len, gathered.blobs.values())) > BYTES_MAX:
            raise UsageError(f"run {top.id!r} has more than {BYTES_MAX:,} bytes of results, more than a file holds")
    return gathered


def _descendants(top: RunRow, members: list[RunRow]) -> list[RunRow]:
    """A run and those below it, each behind its parent: children have greater numbers."""
    family, known = [top], {top.run}
    for row in members:
        if row.parent in known and row.run != top.run:
            family.append(row)
            known.add(row.run)
    return family


def _check(top: RunRow, family: list[RunRow], keep: bool) -> None:
    if top.parent is not None:
        raise UsageError(f"run {top.id!r} was started by another run, which waits for it: export that one, and all go")
    for row in family:
        if row.status == "running":
            raise UsageError(
                f"run {row.id!r} is running: pause it (run.pause()) or wait until it waits, then export {top.id!r}"
            )
        if row.status == "exported":
            raise UsageError(f"run {row.id!r} was exported already: it goes on where its file is imported")
        if keep and row.status not in FINISHED:
            raise UsageError(
                f"export_run(keep=True) is for finished runs: {row.id!r} is {row.status}, and would go on in two places"
            )


def _part(tenant: int, row: RunRow, parent: int | None) -> Generator[Batch, list[Rows], tuple[RunPart, list[bytes]]]:
    this = {"tenant": tenant, "run": row.run}
    segments = yield from read_segments(tenant, row)
    args, values, asks, answers, signals = yield Batch(
        ARGS_OF(**this), _VALUES(**this), _ASKS(**this), _ANSWERS(**this), _SIGNALS(**this)
    )
    journal: list[tuple[int, int, bytes]] = []
    hashes: list[bytes] = []
    for segment in segments:
        counted = {recorded.seq for recorded in segment.entries}
        for seq, kind, body in segment.rows:
            if seq in counted:
                journal.append((seq, kind, bytes(body)))
                blob = (unpack(body).more or {}).get("blob")
                hashes += [blob] if blob is not None else []
    part = RunPart(
        id=row.id,
        function=row.function,
        version=row.version,
        input=bytes(row.input),
        incarnation=bytes(row.incarnation),
        parent=parent,
        parent_path=row.parent_path,
        shared_until=row.origin_seq if row.since == 0 else 0,
        status=row.status,
        queue=row.queue,
        priority=row.priority,
        fence=row.fence + 1,
        wake_at=row.wake_at,
        request=row.request,
        waiting=row.waiting,
        seq=max((row.seq, *(seq for seq, _, _ in journal))),
        since=row.since,
        created_at=row.created_at,
        changed_at=row.changed_at,
        keep_until=row.keep_until,
        values={sort: bytes(value) for sort, value in [*(("args", value) for value, _ in args), *values]},
        journal=journal,
        asks=[AskPart(*ask) for ask in asks],
        answers=[AnswerPart(*answer) for answer in answers],
        signals=[SignalPart(*signal) for signal in signals],
    )
    return part, hashes


# --- its states


def _add_states(tenant: int, part: RunPart) -> Flow[None]:
    """The checkpoints that the journal names, oldest first. One that cannot be read any more is left out."""
    wanted = set()
    for _, _, body in part.journal:
        checkpoint = ((unpack(body).more or {}).get("state") or {}).get("c")
        if checkpoint is not None:
            wanted.add(int(checkpoint))
    thread = (yield from read(partial(try_thread, tenant, thread_name(part.id)))) if wanted else None
    if thread is None:
        return
    found: dict[int, tuple[Record, bytes]] = {}
    size = 0
    for checkpoint in sorted(wanted, reverse=True):
        if checkpoint in found:
            continue
        for record, text in (yield from _stretch(tenant, thread.tree, checkpoint)):
            if record.id in wanted and record.id not in found:
                found[record.id] = record, bytes(text)
                size += len(text)
        if size > BYTES_MAX:
            raise UsageError(f"run {part.id!r} has more than {BYTES_MAX:,} bytes of states, more than a file holds")
    for record_id, (record, text) in sorted(found.items()):
        parent = record.parent if record.parent in found else None
        metadata = record.metadata
        part.states.append(StatePart(record_id, parent, record.kind, record.at, record.note, metadata, text))


def _stretch(tenant: int, tree: int, checkpoint: int) -> Flow[list[tuple[Record, bytes]]]:
    """The states from a checkpoint back to its keyframe, all that can be read."""
    try:
        stretch: Stretch | None = yield from read(partial(read_stretch, tenant, tree, checkpoint))
        if stretch is not None:
            return [(record, bytes(text)) for record, text in stretch.states()]
    except Damaged:
        try:
            loaded = yield from read(partial(read_state, tenant, tree, checkpoint))
            return [] if loaded is None else [(loaded.record, loaded.data)]
        except (Damaged, NotFound):
            pass
    return []


def export(ctx: Context, run_id: str, path: str | Path, keep: bool) -> Generator[Any, Any, Path]:
    """All of it: yields flows to drive and plain functions to call (they touch files), and takes what they give."""
    for _ in range(_ATTEMPTS):
        one = Export(ctx, run_id, path, keep=keep)
        yield one.read()
        if not one.is_marked:
            yield one.write
        try:
            marked = one.is_marked or (yield one.mark())
        except (UsageError, NotFound):
            yield one.drop
            raise
        if marked:
            yield one.publish
            return one.path
    yield one.drop
    raise Conflict(f"run {run_id!r} changed each time it was to be exported: pause it first, then export it")


def drive_steps(driver: Driver, steps: Generator[Any, Any, T]) -> T:
    """Drive what yields flows and functions, blocking."""
    try:
        want = next(steps)
        while True:
            try:
                answer = want() if callable(want) else drive(driver, want)
            except BaseException as error:
                want = steps.throw(error)
            else:
                want = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def adrive_steps(driver: Driver, steps: Generator[Any, Any, T]) -> T:
    """The same on the running event loop, which does not wait for files."""
    from asyncio import to_thread

    try:
        want = next(steps)
        while True:
            try:
                answer = (await to_thread(want)) if callable(want) else (await adrive(driver, want))
            except BaseException as error:
                want = steps.throw(error)
            else:
                want = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
