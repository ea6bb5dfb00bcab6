"""What a run in this process writes to its journal: at once, buffered, or with other rows in the same transaction.

Every write names the fence that the run was claimed with. If it finds the fence moved, another process has the run, and
the execution stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import OutcomeUnknown, StoreError, Unavailable
from perdure.runs.execution import hooks
from perdure.runs.execution.operation import Operation, Pause, run_operation
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import BLOB_MIN_BYTES, blob_statements, out_of_line
from perdure.runs.journal.entries import (
    KEPT_MAX_BYTES,
    KIND_NAMES,
    NAMING,
    NOTE,
    Entry,
    Recorded,
    entry_digest,
    pack,
    without_value,
)
from perdure.runs.journal.rows import FenceToken, JournalRow
from perdure.runs.tables import JOURNAL_BODY
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, Transaction, read
from perdure.storage.row_hashes import with_hash

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution

# While the database is unavailable: how long a write is retried.
_PATIENCE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, None)
_HAS_ROW = Sql(
    "SELECT body FROM journal WHERE tenant = :tenant AND run = :run AND seq = :seq AND kind = :kind",
    opens={0: JOURNAL_BODY},
)
Draft = tuple[int, Entry]
Part = Callable[[], Generator[Batch, list[Rows], Any]]  # a program inside of another transaction
EntryOf = Callable[[Any], Entry]
Fenced = Callable[[FenceToken], Program[Any]]  # an operation that writes nothing if the fence has moved
_ONE = (1,)


class Drafted(NamedTuple):
    """Entries as they are stored."""

    lines: list[JournalRow]
    recorded: list[Recorded]  # as the index keeps them
    blobs: list[Statement]  # store large values apart
    digest: int  # the sum of the rows' hashes


class Attempt(NamedTuple):
    """What one run of a transaction wrote, or tried to."""

    request: str | None  # what an operator asks for
    drafted: Drafted
    result: Any  # of the program that went with it


class JournalWriter:
    """Writes the journal of one execution."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.pending: list[Draft] = []  # buffered, and not durable yet
        self._lock = threading.Lock()

    def buffer(self, kind: int, entry: Entry) -> None:
        """Write an entry with the next one: for what no process outside can have seen yet."""
        if self._execution.replay:
            raise self._execution.end_of_replay(entry.path, entry.name)
        with self._lock:
            self.pending.append((kind, entry))

    def flush(self) -> Operation[None]:
        """Write what was buffered: before a body runs, so that the journal never lags behind the world."""
        if any(entry.path != NAMING for _, entry in self.pending):  # names of tasks are seen by no body
            yield from self.record()

    def record(self, *drafts: Draft) -> Operation[None]:
        """Write entries in one transaction, with what was buffered. They are durable when it returns."""
        yield from self.write(drafts)

    def commit(
        self, program: Part, draft: Draft, entry_of: EntryOf | None = None, *, other: str | None = None
    ) -> Operation[Any]:
        """Run a program and record it, in one transaction. Return the program's result.

        The fence is checked first: a run that was taken over writes nothing. The entry is appended last. `entry_of`
        makes it from the result, at the path of the draft; without `entry_of` it is the draft's. `other` is the id of a
        run that the program writes to.
        """
        return (yield from self.write((draft,), program, entry_of, other))

    def write(
        self,
        drafts: tuple[Draft, ...],
        program: Part | None = None,
        entry_of: EntryOf | None = None,
        other: str | None = None,
        *,
        stateless: bool = False,
    ) -> Operation[Any]:
        """`record` and `commit`. `stateless`: the run's state is not looked at (`calls/state.py`)."""
        execution = self._execution
        if execution.replay and drafts:
            raise execution.end_of_replay(drafts[0][1].path, drafts[0][1].name)
        if execution.state is not None and drafts and not stateless:  # what changed in the state goes with it
            write = partial(self.write, other=other, stateless=True)
            return (yield from execution.state.recording(drafts, program, entry_of, write))
        with self._lock:
            # A value stays until it is durable: a branch that writes meanwhile writes it too, and both are read as one,
            # since they say the same at the same path. A note is written once.
            buffered = self.pending
            self.pending = [draft for draft in buffered if draft[0] != NOTE]
        taken = [*buffered, *drafts]
        if not taken:
            return None
        kind, entry = drafts[0] if drafts else taken[-1]
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "before")
        try:
            result = yield from self._commit(taken, program, entry_of, other)
        except BaseException:
            with self._lock:
                self.pending[:0] = [draft for draft in buffered if draft[0] == NOTE]
            raise
        with self._lock:
            written = set(map(id, buffered))
            self.pending = [draft for draft in self.pending if id(draft) not in written]
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")
        return result

    def append(self, kind: int, entry: Entry) -> None:
        """`record` of one entry by a blocking call: where nothing else has to be written, one statement."""
        execution, value = self._execution, entry.value
        if self.pending or execution.state is not None or (value is not None and len(value) >= BLOB_MIN_BYTES):
            run_operation(execution.root, self.record((kind, entry)))
            return
        index, (tenant, run, fence) = execution.index, execution.token
        seq, body = index.reserve(1), pack(entry)
        # As `APPEND_ALONE(…)` makes it, in fewer calls.
        stored = with_hash(JOURNAL_BODY, tenant, (run, seq, kind), body)
        params = {"tenant": tenant, "run": run, "fence": fence, "seq": seq, "kind": kind, "body": stored}
        failed: StoreError | None = None
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "before")
        try:
            if execution.ctx.driver.append((Statement(rows.APPEND_ALONE, params),), _ONE):
                if hooks.hook is not None:
                    hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")
                row = Recorded(run, seq, kind, entry)
                if value is not None and len(value) > KEPT_MAX_BYTES:
                    row = without_value(row)
                index.add_one(row, entry_digest(run, seq, kind, body))
                return
        except StoreError as error:
            failed = error
        # Another process has the run, an operator asks for something, or the database is unavailable.
        drafted = self._drafted(seq, [(kind, entry)])
        op = partial(_append, drafted=drafted)
        run_operation(execution.root, self._land(op, [Attempt(None, drafted, None)], 1, failed))
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")

    def _commit(
        self, taken: list[Draft], program: Part | None, entry_of: EntryOf | None, other: str | None
    ) -> Operation[Any]:
        """Give entries their numbers, and commit them with what a program writes."""
        first = self._execution.index.reserve(len(taken))
        attempts: list[Attempt] = []
        if program is None:
            drafted = self._drafted(first, taken)
            attempts.append(Attempt(None, drafted, None))
            if not drafted.blobs:
                return (yield from self._land(partial(_append, drafted=drafted), attempts, len(taken)))

        def transaction(token: FenceToken) -> Program[Attempt | None]:
            locks = [] if other is None else [rows.LOCK_TWO(tenant=token.tenant, run=token.run, other=other)]
            *_, held = yield Batch(*locks, rows.HELD(**token._asdict()))
            if not held:
                return None
            result, drafts = None, taken
            if program is not None:
                result = yield from program()
                if entry_of is not None:
                    drafts = [*taken[:-1], (taken[-1][0], entry_of(result))]
            drafted = self._drafted(first, drafts)
            attempts.append(Attempt(held[0][0], drafted, result))
            yield Batch(*drafted.blobs, *rows.append_statements(token, drafted.lines, held=True), last=True)
            return attempts[-1]

        return (yield from self._land(transaction, attempts, len(taken)))

    def _land(
        self, op: Fenced, attempts: list[Attempt], count: int, failed: StoreError | None = None
    ) -> Operation[Any]:
        """Commit `count` entries, and note them in the index. `attempts` is what each run of `op` wrote, or tried to.
        `failed`: how the first attempt has ended."""
        try:
            written = yield from self.commit_with_retry(op, partial(self._landed, attempts), failed)
        except StoreError as error:
            # The code has seen what is not recorded: it must not continue.
            self._execution.halt(error)
            raise
        except Exception:
            self._execution.index.release(count)  # the program refused, and undid the transaction
            raise
        if written is None:
            self._execution.on_lease_lost()
        assert written is not None
        self._execution.index.add(written.drafted.recorded, written.drafted.digest)
        self._execution.apply_request(written.request)
        return written.result

    def _drafted(self, first: int, taken: Sequence[Draft]) -> Drafted:
        """Return entries as rows, numbered from `first`."""
        lines, recorded, blobs, digest = [], [], [], 0
        run = self._execution.row.run
        for seq, (kind, entry) in enumerate(taken, first):
            if entry.value is not None and len(entry.value) >= BLOB_MIN_BYTES:
                blobs += blob_statements(self._execution.tenant, run, entry.value)
                entry = out_of_line(entry)
            body = pack(entry)
            digest += entry_digest(run, seq, kind, body)
            lines.append(JournalRow(seq, kind, body))
            recorded.append(without_value(Recorded(run, seq, kind, entry)))
        return Drafted(lines, recorded, blobs, digest)

    def closing_lines(self) -> Operation[list[JournalRow]]:
        """What is buffered, for the transaction that ends the execution."""
        if any(len(entry.value or b"") >= BLOB_MIN_BYTES for _, entry in self.pending):
            yield from self.flush()  # it is more than a line
        with self._lock:
            taken, self.pending = self.pending, []
        drafted = self._drafted(self._execution.index.reserve(len(taken)), taken)
        self._execution.index.add(drafted.recorded, drafted.digest)
        return drafted.lines

    def write_fenced(self, program: Part) -> Operation[None]:
        """Write something for the run that is no entry of its journal, and may be written twice. Raises LeaseLost."""
        if not (yield from self.commit_with_retry(partial(_fenced, program=program), _unknown)):
            self._execution.on_lease_lost()

    def commit_with_retry(
        self, op: Fenced, landed: Callable[[], Operation[Any]], failed: StoreError | None = None
    ) -> Operation[Any]:
        """Commit `op`, retrying while the database is unavailable, and return its answer.

        If the answer to COMMIT was lost, `landed` looks first whether the write is there: it returns the answer that
        was lost, or None. Every write of a run but `append` comes through here, and gets the run's fence. `failed`: how
        the first attempt has ended.

        A body has run by now: giving up at once would leave an effect in doubt that we know the end of.
        """
        unknown = doubted = False
        for pause in _PATIENCE_PAUSES:
            try:
                if failed is not None:
                    error, failed = failed, None
                    raise error
                if unknown and (answer := (yield from landed())) is not None:
                    return answer
                unknown = False
                return (yield Transaction(partial(op, self._execution.token), write=True))
            except OutcomeUnknown:
                if pause is None:
                    raise
                unknown = doubted = True
            except Unavailable:
                if pause is None:
                    raise
            except Exception:
                # The first attempt may have landed after we looked. Then this one has met what that one wrote.
                if doubted and (answer := (yield from landed())) is not None:
                    return answer
                raise
            yield Pause(pause)
        raise AssertionError("the last attempt returns or raises")

    def _landed(self, attempts: list[Attempt]) -> Operation[Attempt | None]:
        """Return the attempt whose last row is in the journal."""
        for attempt in attempts[:1]:
            row = attempt.drafted.lines[-1]
            key = {"tenant": self._execution.tenant, "run": self._execution.row.run, "seq": row.seq, "kind": row.kind}
            body = yield from read(partial(_row, key))
            return next((one for one in attempts if one.drafted.lines[-1].body == body), None)
        return None


def _append(token: FenceToken, drafted: Drafted) -> Program[Attempt | None]:
    request = yield from rows.append(token, drafted.lines)
    return None if request is None else Attempt(request[0], drafted, None)


def _fenced(token: FenceToken, program: Part) -> Program[bool]:
    [held] = yield Batch(rows.HOLD(**token._asdict()))
    if held:
        yield from program()
    return bool(held)


def _unknown() -> Operation[None]:
    """Do not look for a write that may be made twice."""
    yield from ()


def _row(key: dict[str, int]) -> Program[bytes | None]:
    [found] = yield Batch(_HAS_ROW(**key), last=True)
    return found[0][0] if found else None
