"""What a run in this process writes to its journal: at once, buffered, or with other rows in the same transaction.

Every write names the fence that the run was claimed with. If it finds the fence moved, another process has the run, and
the execution stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

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
from perdure.storage.program import Batch, ConstraintFailed, Program, Rows, Sql, Statement, Transaction, read
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
SameTx = Callable[[], Generator[Batch, list[Rows], Any]]
Fenced = Callable[[FenceToken], Program[Any]]  # an operation that writes nothing if the fence has moved
_HOLDS = Sql(
    """SELECT run FROM run WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'
    {for_update}"""
)
_ONE = (1,)
# Rows, as what the index keeps of them, statements that store large values apart, the sum of the rows' hashes.
Drafted = tuple[list[JournalRow], list[Recorded], list[Any], int]


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

    def record(
        self,
        *drafts: Draft,
        same_tx: SameTx | None = None,
        stateless: bool = False,
        other: str | None = None,
    ) -> Operation[None]:
        """Write entries, and whatever else belongs to them, in one transaction, and what was buffered with them.
        Durable when it returns. `other` is the id of a run that `same_tx` writes to."""
        if self._execution.replay and drafts:
            raise self._execution.end_of_replay(drafts[0][1].path, drafts[0][1].name)
        if self._execution.state is not None and drafts and not stateless:  # what changed in the state goes with it
            yield from self._execution.state.recording(
                drafts, same_tx, partial(self.record, stateless=True, other=other)
            )
            return
        with self._lock:
            # A value stays until it is durable: a branch that writes meanwhile writes it too, and both are read as one,
            # since they say the same at the same path. A note is written once.
            buffered = self.pending
            self.pending = [draft for draft in buffered if draft[0] != NOTE]
        taken = [*buffered, *drafts]
        if not taken:
            return
        kind, entry = drafts[0] if drafts else taken[-1]
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "before")
        try:
            yield from self._commit(self._lines(taken), same_tx, other)
        except BaseException:
            with self._lock:
                self.pending[:0] = [draft for draft in buffered if draft[0] == NOTE]
            raise
        with self._lock:
            written = set(map(id, buffered))
            self.pending = [draft for draft in self.pending if id(draft) not in written]
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")

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
        digest = entry_digest(run, seq, kind, body)
        drafted: Drafted = [JournalRow(seq, kind, body)], [without_value(Recorded(run, seq, kind, entry))], [], digest
        run_operation(execution.root, self._commit(drafted, failed=failed))
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")

    def _commit(
        self,
        drafted: Drafted,
        same_tx: SameTx | None = None,
        other: str | None = None,
        failed: StoreError | None = None,
    ) -> Operation[None]:
        """Commit rows that have their numbers. `failed`: how the first attempt has ended."""
        lines, recorded, statements, digest = drafted
        if same_tx is None and not statements:
            op: Fenced = partial(rows.append, lines=lines)
        else:
            op = partial(_append_with, lines=lines, statements=statements, same_tx=same_tx, other=other)
        try:
            answer = yield from self.commit_with_retry(op, partial(self._is_written, lines[-1]), failed)
        except StoreError as error:
            # The code has seen what is not recorded: it must not continue.
            self._execution.halt(error)
            raise
        except Exception:
            self._execution.index.release(len(lines))  # what goes with it refused, and undid the transaction
            raise
        if answer is None:
            self._execution.on_lease_lost()
        assert answer is not None
        self._execution.index.add(recorded, digest)
        if answer[0] is not None:
            self._execution.apply_request(answer[0])

    def _lines(self, taken: Sequence[Draft]) -> Drafted:
        """Drafts as rows, as what the index keeps of them, the statements that store large values apart, and the sum of
        the rows' hashes."""
        lines, recorded, statements, digest = [], [], [], 0
        run = self._execution.row.run
        for seq, (kind, entry) in enumerate(taken, self._execution.index.reserve(len(taken))):
            if entry.value is not None and len(entry.value) >= BLOB_MIN_BYTES:
                statements += blob_statements(self._execution.tenant, run, entry.value)
                entry = out_of_line(entry)
            body = pack(entry)
            digest += entry_digest(run, seq, kind, body)
            lines.append(JournalRow(seq, kind, body))
            recorded.append(without_value(Recorded(run, seq, kind, entry)))
        return lines, recorded, statements, digest

    def closing_lines(self) -> Operation[list[JournalRow]]:
        """What is buffered, for the transaction that ends the execution."""
        if any(len(entry.value or b"") >= BLOB_MIN_BYTES for _, entry in self.pending):
            yield from self.flush()  # it is more than a line
        with self._lock:
            taken, self.pending = self.pending, []
        lines, recorded, _, digest = self._lines(taken)
        self._execution.index.add(recorded, digest)
        return lines

    def write_fenced(self, same_tx: SameTx) -> Operation[None]:
        """Write something for the run that is no entry of its journal, and may be written twice. Raises LeaseLost."""
        if not (yield from self.commit_with_retry(partial(_fenced, same_tx=same_tx), _unknown)):
            self._execution.on_lease_lost()

    def commit_with_retry(
        self, op: Fenced, happened: Callable[[], Operation[bool]], failed: StoreError | None = None
    ) -> Operation[Any]:
        """Commit `op`, retrying while the database is unavailable. If the acknowledgement of the COMMIT was lost, check
        first whether it landed. Every write of a run but `append` comes through here, and gets the run's fence.
        `failed`: how the first attempt has ended.

        A body has run by now: giving up at once would leave an effect in doubt that we know the end of.
        """
        unknown = doubted = False
        for pause in _PATIENCE_PAUSES:
            try:
                if failed is not None:
                    error, failed = failed, None
                    raise error
                if unknown and (yield from happened()):
                    return (None,)
                unknown = False
                return (yield Transaction(partial(op, self._execution.token), write=True))
            except OutcomeUnknown:
                if pause is None:
                    raise
                unknown = doubted = True
            except ConstraintFailed:
                # It is there: the first attempt was still on its way when we looked.
                if doubted and (yield from happened()):
                    return (None,)
                raise
            except Unavailable:
                if pause is None:
                    raise
            yield Pause(pause)
        raise AssertionError("the last attempt returns or raises")

    def _is_written(self, line: JournalRow) -> Operation[bool]:
        key = {"tenant": self._execution.tenant, "run": self._execution.row.run, "seq": line.seq, "kind": line.kind}
        body = yield from read(partial(_row, key))
        return bool(body == line.body)


def _append_with(
    token: FenceToken,
    lines: list[JournalRow],
    statements: list[Any],
    same_tx: SameTx | None,
    other: str | None,
) -> Program[Any]:
    locks = [] if other is None else [rows.LOCK_TWO(tenant=token.tenant, run=token.run, other=other)]
    answers = yield Batch(*locks, *rows.append_statements(token, lines))
    appended = answers[len(locks)]
    if not appended:
        return None
    if statements:
        yield Batch(*statements)
    if same_tx is not None:
        yield from same_tx()
    return appended[0]


def _fenced(token: FenceToken, same_tx: SameTx) -> Program[bool]:
    [held] = yield Batch(_HOLDS(**token._asdict()))
    if held:
        yield from same_tx()
    return bool(held)


def _unknown() -> Operation[bool]:
    """For what may be written twice, there is no need to look."""
    yield from ()
    return False


def _row(key: dict[str, int]) -> Program[bytes | None]:
    [found] = yield Batch(_HAS_ROW(**key), last=True)
    return found[0][0] if found else None
