"""Move or copy a run, with the runs that it started, into any store.

A finished run is copied in one transaction of the target. Any other run moves in three: its rows arrive as `exported`,
then the run is fenced in the source, then the target publishes it to workers. After a kill before the second the source
still has it; after one before the third the same call finishes the move.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import orjson
from blake3 import blake3

from perdure.errors import Conflict, NotFound, UsageError
from perdure.log import gc
from perdure.log.thread_table import ThreadRow, thread_or_stub
from perdure.runs.calls.state import thread_name
from perdure.runs.engine import flows
from perdure.runs.journal import rows
from perdure.runs.journal.rows import FINISHED, WAITS
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Program, Rows, Sql, drive, read, write
from perdure.threads.context import StoreContext
from perdure.threads.externals import copy_values, has_values
from perdure.transfers.run_rows import FAMILY, Advance, RunPart, add_runs, drop_run, encode, read_run
from perdure.transfers.threads import copy_threads, thread_digest, values_of

_ATTEMPTS = 8
# The lock order of all writers: runs by their numbers, then questions.
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
_PUBLISH = Sql(
    """UPDATE run SET status = :status, wake_at = :wake_at, waiting = :waiting
    WHERE tenant = :tenant AND run = :run AND status = 'exported'""",
    seals=WAITS,
)
LockedTree = tuple[ThreadRow, list[ThreadRow]]  # a thread, and all threads of its tree


def copy_run(source: StoreContext, to: int, run_id: str, advance: Advance, *, as_is: bool = False) -> Program[int]:
    """Copy a finished run, those it started, and their states, inside a write transaction of the target.

    Return how many runs were copied; 0 if the target has them already. `as_is` copies a run of any status, for a copy
    that is never continued.
    """
    tenant, top = drive(source.driver, flows.locate(source, run_id))
    flows.check_no_task(top)
    if (yield from _has(to, top)):
        return 0
    parts = drive(source.driver, read(partial(read_family, tenant, top.run, move=None if as_is else False)))
    yield from add_runs(to, parts, {part.row.run: {} for part in parts}, advance)
    yield from copy_states(source, to, [part.row.id for part in parts], advance)
    return len(parts)


def copy_run_values(source: StoreContext, target: StoreContext, run_id: str) -> None:
    """Copy the large values that a run, those it started and their states refer to, before the runs."""
    tenant, top = drive(source.driver, flows.locate(source, run_id))
    if drive(source.driver, has_values(tenant)):
        parts = drive(source.driver, read(partial(read_family, tenant, top.run, move=None)))
        copy_values(source, target, _values_of(source, parts))


def _values_of(source: StoreContext, parts: list[RunPart]) -> list[bytes]:
    tenant, keys = drive(source.driver, source.tenant()) or 0, {key for part in parts for _, key in part.values}
    for name in (thread_name(part.row.id) for part in parts):
        if drive(source.driver, read(partial(thread_or_stub, tenant, name))) is not None:
            keys.update(drive(source.driver, read(partial(values_of, tenant, [name]))))
    return sorted(keys)


def family_head(source: StoreContext, run_id: str) -> RunRow:
    """Return the root of a run's family: the run that started all others."""
    tenant, row = drive(source.driver, flows.locate(source, run_id))
    return drive(source.driver, read(partial(rows.numbered, tenant, row.root))) or row


class RunMove:
    """The move of a run and those that it started. The source records `where` as the run's new place."""

    def __init__(self, source: StoreContext, target: StoreContext, run_id: str, where: str, advance: Advance) -> None:
        self._source, self._target, self._id, self._where, self._advance = source, target, run_id, where, advance
        self._to = drive(target.driver, target.ensure_tenant())

    def run(self, *, or_skip: bool) -> int:
        """Move the runs. Return how many were moved; 0 if the target has them already.

        If they were moved elsewhere before, skip them (`or_skip`) or raise UsageError.
        """
        for _ in range(_ATTEMPTS):
            tenant, top = drive(self._source.driver, flows.locate(self._source, self._id))
            flows.check_no_task(top)
            arrived = drive(self._target.driver, read(partial(_arrived, self._to, self._id)))
            about = _about(arrived[0]) if arrived else {}
            if top.status == "exported" and about.get("token", "") == _about(top).get("token"):
                return int(self._write(self._publish))
            if top.status in FINISHED and drive(self._target.driver, read(partial(_has, self._to, top))):
                return 0
            if top.status == "exported" and or_skip:
                return 0
            if top.status == "exported":
                raise UsageError(
                    f"run {self._id!r} was moved already, to {_about(top).get('to', 'another store')}: it continues "
                    "there. If that transfer was interrupted, repeat it with the same target"
                )
            parts = drive(self._source.driver, read(partial(read_family, tenant, top.run, move=True)))
            copy_values(self._source, self._target, _values_of(self._source, parts))
            seen = blake3(encode(parts)).hexdigest()
            if about.get("seen") != seen:
                about = {"kind": "arrival", "seen": seen, "token": self._target.entropy(16).hex()}
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
        """Step 1: write the rows to the target, in place of those of an earlier call."""
        yield from self._clear()
        changes = {}
        for row, *_ in parts:
            then = {"status": row.status, "wake_at": row.wake_at, "waiting": row.waiting}
            waiting = orjson.dumps(about | {"then": then}).decode()
            changes[row.run] = {"status": "exported", "wake_at": rows.NEVER, "waiting": waiting}
        yield from add_runs(self._to, parts, changes, self._advance)

    def _clear(self) -> Program[None]:
        for row in (yield from _arrived(self._to, self._id)):
            yield Batch(*drop_run(self._to, row.run))

    def _fence(self, tenant: int, top: RunRow, about: dict[str, Any]) -> Program[bool]:
        """Step 2: fence the runs in the source. Return False if a run has changed since it was read."""
        yield from _lock_root(tenant, top.root)
        parts = yield from read_family(tenant, top.run, move=True)
        if blake3(encode(parts)).hexdigest() != about["seen"]:
            return False
        waiting = orjson.dumps({"kind": "transfer", "to": self._where, "token": about["token"]}).decode()
        now = self._source.clock_us()
        for part in parts:
            key = {"tenant": tenant, "run": part.row.run}
            yield Batch(_FENCE(**key, waiting=waiting, now=now), rows.CLOSE_ASKS(**key))
        return True

    def _publish(self) -> Program[int]:
        """Step 3: write the states, and the statuses that let workers claim the runs. Return how many runs."""
        arrived = yield from _arrived(self._to, self._id)
        yield from copy_states(self._source, self._to, [row.id for row in arrived], self._advance)
        for row in arrived:
            yield Batch(_PUBLISH(tenant=self._to, run=row.run, **_about(row)["then"]))
        return len(arrived)


def _about(row: RunRow) -> dict[str, Any]:
    """Return what an `exported` run records about its move; {} for other runs."""
    return orjson.loads(row.waiting) if row.waiting and row.status == "exported" else {}


# --- the target


def _has(tenant: int, top: RunRow) -> Program[bool]:
    """Return whether the target has this run, and not another one of the same id."""
    there = yield from rows.look_up(tenant, top.id)
    return there is not None and there.status != "exported" and bytes(there.incarnation) == bytes(top.incarnation)


def _arrived(tenant: int, run_id: str) -> Program[list[RunRow]]:
    """Return a run that has arrived but is not published, with those it started; [] if there is none."""
    top = yield from rows.look_up(tenant, run_id)
    if top is None or _about(top).get("kind") != "arrival":
        return []
    [family] = yield Batch(FAMILY(tenant=tenant, root=top.run))
    return [RunRow._make(row) for row in family]


def copy_states(source: StoreContext, to: int, ids: list[str], advance: Advance) -> Program[None]:
    tenant = drive(source.driver, source.tenant()) or 0
    for name in map(thread_name, ids):
        if drive(source.driver, read(partial(thread_or_stub, tenant, name))) is not None:
            yield from copy_threads(source, to, [name], advance)


# --- reading a family


def read_family(tenant: int, run: int, move: bool | None) -> Program[list[RunPart]]:
    """Read a run and its descendants, parents first. Raises UsageError if they cannot be moved (`move`) or copied.

    If `move` is None, the status is not checked.
    """
    [row_there] = yield Batch(rows.BY_NUMBER(tenant=tenant, run=run))
    if not row_there:
        raise NotFound("the run is not there")
    top = RunRow._make(row_there[0])
    [members] = yield Batch(FAMILY(tenant=tenant, root=top.root))
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


def lock_family(tenant: int, run_id: str) -> Generator[Batch, list[Rows], None]:
    """Lock a run's family and its questions, in the lock order of all writers."""
    if (row := (yield from rows.look_up(tenant, run_id))) is not None:
        yield from _lock_root(tenant, row.root)


def _lock_root(tenant: int, root: int) -> Generator[Batch, list[Rows], None]:
    yield Batch(_LOCK_FAMILY(tenant=tenant, root=root), _LOCK_ASKS(tenant=tenant, root=root))


def run_digest(tenant: int, run_id: str) -> Program[tuple[bytes, list[RunRow], list[LockedTree]]]:
    """Return a hash of a finished run and those it started, with their rows and the threads of their states.

    A copy has the same hash. The threads are locked.
    """
    top = yield from rows.look_up(tenant, run_id)
    parts = yield from read_family(tenant, top.run if top else 0, move=False)
    known: list[Any] = [part.known() for part in parts]
    states = []
    for part in parts:
        thread = yield from thread_or_stub(tenant, thread_name(part.row.id))
        if thread is not None:
            states.append((yield from gc.lock_tree(tenant, thread.name, thread.thread)))
            known.append((yield from thread_digest(tenant, thread.name)))
    return blake3(encode(known)).digest(), [part.row for part in parts], states
