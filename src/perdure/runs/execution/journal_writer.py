"""Writes of an execution to its journal: at once, buffered, or in one transaction with other rows.

Every write names the fence that the run was claimed with. If the fence has moved, another process has the run, and the
execution stops.
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

# Pauses in seconds between the attempts to write while the database is unavailable.
_PATIENCE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, None)
_HAS_ROW = Sql(
    "SELECT body FROM journal WHERE tenant = :tenant AND run = :run AND seq = :seq AND kind = :kind",
    opens={0: JOURNAL_BODY},
)
Draft = tuple[int, Entry]
Part = Callable[[], Generator[Batch, list[Rows], Any]]  # a program that runs inside another transaction
EntryOf = Callable[[Any], Entry]
Fenced = Callable[[FenceToken], Program[Any]]  # an operation that writes nothing if the fence has moved
_ONE = (1,)


class Drafted(NamedTuple):
    """Entries as they are stored."""

    lines: list[JournalRow]
    recorded: list[Recorded]  # as the index keeps them
    blobs: list[Statement]  # these store the large values
    digest: int  # the sum of the rows' hashes


class Attempt(NamedTuple):
    """The rows that one attempt of a transaction wrote, or tried to write."""

    request: str | None  # an operator's request
    drafted: Drafted
    result: Any  # of the program in the same transaction


class JournalWriter:
    """The writer of one execution's journal."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.pending: list[Draft] = []  # buffered entries, not durable yet
        self._lock = threading.Lock()

    def buffer(self, kind: int, entry: Entry) -> None:
        """Keep an entry until the next write. Only for entries that nothing outside this process has seen yet."""
        if self._execution.replay:
            raise self._execution.end_of_replay(entry.path, entry.name)
        with self._lock:
            self.pending.append((kind, entry))

    def flush(self) -> Operation[None]:
        """Write the buffered entries. Called before a body runs, so that no effect is ahead of the journal."""
        if any(entry.path != NAMING for _, entry in self.pending):  # no body sees the key of task names
            yield from self.record()

    def record(self, *drafts: Draft) -> Operation[None]:
        """Write entries and the buffered ones in one transaction. They are durable when this returns."""
        yield from self.write(drafts)

    def commit(
        self, program: Part, draft: Draft, entry_of: EntryOf | None = None, *, other: str | None = None
    ) -> Operation[Any]:
        """Run a program and append an entry, in one transaction. Return the program's result.

        The fence is checked first: a run that was taken over writes nothing. The entry is appended last. `entry_of`
        makes it from the result, at the path of the draft; without `entry_of` it is the draft's entry. `other` is the
        id of another run that the program writes to.
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
        """Implement `record` and `commit`. `stateless` does not write changes of the run's state (`calls/state.py`)."""
        execution = self._execution
        if execution.replay and drafts:
            raise execution.end_of_replay(drafts[0][1].path, drafts[0][1].name)
        if execution.state is not None and drafts and not stateless:  # its changes are written in the same transaction
            write = partial(self.write, other=other, stateless=True)
            return (yield from execution.state.recording(drafts, program, entry_of, write))
        with self._lock:
            # A value stays buffered until it is durable. A branch that writes in the meantime writes it a second time;
            # both rows are equal and have the same path, so they are read as one. A note is written once.
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
        """Record one entry from a blocking call, with a single statement if nothing else has to be written."""
        execution, value = self._execution, entry.value
        if self.pending or execution.state is not None or (value is not None and len(value) >= BLOB_MIN_BYTES):
            run_operation(execution.root, self.record((kind, entry)))
            return
        index, (tenant, run, fence) = execution.index, execution.token
        seq, body = index.reserve(1), pack(entry)
        # The statement that `APPEND_ALONE(…)` would make, in fewer calls.
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
        # Another process has the run, an operator has a request, or the database is unavailable.
        drafted = self._drafted(seq, [(kind, entry)])
        op = partial(_append, drafted=drafted)
        run_operation(execution.root, self._land(op, [Attempt(None, drafted, None)], 1, failed))
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")

    def _commit(
        self, taken: list[Draft], program: Part | None, entry_of: EntryOf | None, other: str | None
    ) -> Operation[Any]:
        """Number entries, and commit them in one transaction with the writes of a program."""
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
        """Commit `count` entries and add them to the index. Return the result of the program among them.

        `attempts` has what each attempt of `op` wrote, or tried to write. `failed` is the error of a first attempt that
        was made before.
        """
        try:
            written = yield from self.commit_with_retry(op, partial(self._landed, attempts), failed)
        except StoreError as error:
            # The code has seen values that are not recorded, so it must not continue.
            self._execution.halt(error)
            raise
        except Exception:
            self._execution.index.release(count)  # the program raised, and the transaction was rolled back
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
        """Return the buffered entries as rows, for the transaction that ends the execution."""
        if any(len(entry.value or b"") >= BLOB_MIN_BYTES for _, entry in self.pending):
            yield from self.flush()  # a large value needs a blob besides its row
        with self._lock:
            taken, self.pending = self.pending, []
        drafted = self._drafted(self._execution.index.reserve(len(taken)), taken)
        self._execution.index.add(drafted.recorded, drafted.digest)
        return drafted.lines

    def write_fenced(self, program: Part) -> Operation[None]:
        """Run a program that writes no journal entry and may safely run twice. Raises LeaseLost."""
        if not (yield from self.commit_with_retry(partial(_fenced, program=program), _unknown)):
            self._execution.on_lease_lost()

    def commit_with_retry(
        self, op: Fenced, landed: Callable[[], Operation[Any]], failed: StoreError | None = None
    ) -> Operation[Any]:
        """Commit `op` with the run's fence, retrying while the database is unavailable, and return its answer.

        If the answer to COMMIT was lost, `landed` first looks for the write. It returns the lost answer, or None if the
        write is not there. `failed` is the error of a first attempt that was made before. All writes of a run come
        through here, except the single statement of `append`.

        A body may have run by now. Giving up at once would leave its effect in doubt although its end is known.
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
                # An earlier attempt may have landed after `landed` looked. Then this error is a conflict with its rows.
                if doubted and (answer := (yield from landed())) is not None:
                    return answer
                raise
            yield Pause(pause)
        raise AssertionError("the last attempt returns or raises")

    def _landed(self, attempts: list[Attempt]) -> Operation[Attempt | None]:
        """Return the attempt whose last row is in the journal; None if there is none."""
        if not attempts:
            return None
        row = attempts[0].drafted.lines[-1]
        key = {"tenant": self._execution.tenant, "run": self._execution.row.run, "seq": row.seq, "kind": row.kind}
        body = yield from read(partial(_row, key))
        return next((one for one in attempts if one.drafted.lines[-1].body == body), None)


def _append(token: FenceToken, drafted: Drafted) -> Program[Attempt | None]:
    request = yield from rows.append(token, drafted.lines)
    return None if request is None else Attempt(request[0], drafted, None)


def _fenced(token: FenceToken, program: Part) -> Program[bool]:
    [held] = yield Batch(rows.HOLD(**token._asdict()))
    if held:
        yield from program()
    return bool(held)


def _unknown() -> Operation[None]:
    """Return None: a write that may safely run twice is not looked for."""
    yield from ()


def _row(key: dict[str, int]) -> Program[bytes | None]:
    [bodies] = yield Batch(_HAS_ROW(**key), last=True)
    return bodies[0][0] if bodies else None
