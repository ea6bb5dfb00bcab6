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
from perdure.runs.execution.operation import CannotWait, Operation, Pause, run_operation
from perdure.runs.journal import rows
from perdure.runs.journal.blobs import BLOB_MIN_BYTES, blob_statements, out_of_line
from perdure.runs.journal.entries import DONE, KIND_NAMES, NOTE, Entry, Recorded, entry_digest, pack
from perdure.runs.journal.rows import FenceToken, JournalRow
from perdure.storage.base import ConstraintFailed
from perdure.storage.columns import JOURNAL
from perdure.storage.program import Batch, Program, Rows, Sql, Transaction, read

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution

# A database that is away: how long a write is retried.
_PATIENCE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, None)
_HAS_ROW = Sql(
    "SELECT body FROM journal WHERE tenant = :tenant AND run = :run AND seq = :seq AND kind = :kind", opens={0: JOURNAL}
)
_LOOK_S = 0.0005  # how soon to look again whether another branch has written what was put off
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
        self._pending: list[tuple[int, Entry]] = []
        self._buffered = self._durable = 0  # how many entries were buffered, and how many of these are written
        self._flushing: list[tuple[int, Entry]] | None = None  # those that a branch is writing right now
        self._broken: StoreError | None = None  # they could not be written
        self._lock = threading.Lock()

    def buffer(self, kind: int, entry: Entry) -> None:
        """Write an entry with the next one: for what nobody outside can have seen yet."""
        if self._execution.replay:
            raise self._execution.end_of_replay(entry.path, entry.name)
        if self._execution.state is not None and kind == DONE:
            entry = self._execution.state.delta_into(entry)
        with self._lock:
            self._pending.append((kind, entry))
            self._buffered += 1

    @property
    def has_pending(self) -> bool:
        return self._durable < self._buffered

    def flush(self) -> Operation[None]:
        """Write what was put off: before a body runs, so that the journal never lags behind the world."""
        target = self._buffered
        while self._durable < target and (yield from self._until_flushed(target)):
            if self._durable < target:
                yield from self.record()

    def _until_flushed(self, target: int) -> Operation[bool]:
        """Another branch is writing what was put off here: wait until it has. False: that cannot be waited for."""
        while self._durable < target:
            if self._broken is not None:
                raise self._broken
            if self._flushing is None:
                break
            try:
                yield Pause(_LOOK_S, for_others=True)
            except CannotWait:
                # Then it is written twice and read as one: such an entry says the same at the same path.
                with self._lock:
                    copies = [draft for draft in (*(self._flushing or ()), *self._pending) if draft[0] != NOTE]
                yield from self._write((), copies)
                return False
        return True

    def record(
        self,
        *drafts: tuple[int, Entry],
        same_tx: SameTx | None = None,
        stateless: bool = False,
        other: str | None = None,
    ) -> Operation[None]:
        """Write entries, and whatever else belongs to them, in one transaction, and what was put off with them. Durable
        when it returns. `other` is the id of a run that `same_tx` writes to."""
        if self._execution.replay and drafts:
            raise self._execution.end_of_replay(drafts[0][1].path, drafts[0][1].name)
        if self._execution.state is not None and drafts and not stateless:  # what changed in the state goes with it
            yield from self._execution.state.recording(
                drafts, same_tx, partial(self.record, stateless=True, other=other)
            )
            return
        target = self._buffered
        if not target:  # nothing ever was
            yield from self._write((), drafts, same_tx, other)
            return
        # The end of a step brings nothing to light that its beginning did not: it need not wait for what was put off.
        is_end = same_tx is None and bool(drafts) and all(kind == DONE for kind, _ in drafts)
        while True:
            with self._lock:
                is_carrier = self._flushing is None and bool(self._pending)
                if is_carrier:
                    buffered, self._pending = self._pending, []
                    self._flushing, until = buffered, self._buffered
            if is_carrier or is_end or self._durable >= target or not (yield from self._until_flushed(target)):
                break
        if not is_carrier:
            yield from self._write((), drafts, same_tx, other)
            return
        try:
            yield from self._write(buffered, drafts, same_tx, other)
            self._durable = until
        except StoreError as error:
            self._broken = error
            raise
        except BaseException:
            with self._lock:  # what goes with it refused, and undid the transaction: this is still to be written
                self._pending[:0] = buffered
            raise
        finally:
            self._flushing = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing has to be decided, observed or written with the next entry."""
        return (
            self._execution.state is None
            and self._execution.stop is None
            and self._execution.closing is None
            and self._durable == self._buffered
            and not self._execution.replay
        )

    def append(self, kind: int, entry: Entry) -> None:
        """`record` of one entry by a blocking call where `is_plain` holds: one statement, and nothing else."""
        value = entry.value
        if value is not None and len(value) >= BLOB_MIN_BYTES:
            run_operation(self._execution.root, self.record((kind, entry)))
            return
        execution = self._execution
        index, (tenant, run, fence) = execution.index, execution.hold
        seq, body = index.reserve(1), pack(entry)
        row = rows.APPEND_ALONE(tenant=tenant, run=run, fence=fence, seq=seq, kind=kind, body=body)
        failed: StoreError | None = None
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "before")
        try:
            if execution.ctx.driver.append([row], _ONE):
                if hooks.hook is not None:
                    hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")
                index.add_one(Recorded(seq, kind, entry), entry_digest(run, seq, kind, body))
                return
        except StoreError as error:
            failed = error
        # Another process has the run, an operator asks for something, or the database is away.
        digest = entry_digest(run, seq, kind, body)
        drafted: Drafted = [JournalRow(seq, kind, body)], [Recorded(seq, kind, entry)], [], digest
        run_operation(execution.root, self._commit(drafted, failed=failed))
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "after")

    def _write(
        self,
        buffered: Sequence[tuple[int, Entry]],
        drafts: Sequence[tuple[int, Entry]],
        same_tx: SameTx | None = None,
        other: str | None = None,
    ) -> Operation[None]:
        taken = [*buffered, *drafts] if buffered else drafts
        if not taken:
            return
        kind, entry = drafts[0] if drafts else taken[-1]
        if hooks.hook is not None:
            hooks.fault_point(KIND_NAMES[kind], entry.path, entry.name, entry.attempt, "before")
        yield from self._commit(self._lines(taken), same_tx, other)
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
            self._execution.stop = (
                self._execution.stop or error
            )  # the code has seen what is not recorded: it must not go on
            raise
        except Exception:
            self._execution.index.release(len(lines))  # what goes with it refused, and undid the transaction
            raise
        if answer is None:
            self._execution.lose()
        assert answer is not None
        self._execution.index.add(recorded, digest)
        if answer[0] is not None:
            self._execution.heed(answer[0])

    def _lines(self, taken: Sequence[tuple[int, Entry]]) -> Drafted:
        """Drafts as rows, as what the index keeps of them, the statements that store large values apart, and the sum of
        the rows' hashes."""
        lines, recorded, statements, digest = [], [], [], 0
        for seq, (kind, entry) in enumerate(taken, self._execution.index.reserve(len(taken))):
            if entry.value is not None and len(entry.value) >= BLOB_MIN_BYTES:
                statements += blob_statements(self._execution.tenant, self._execution.row.run, entry.value)
                entry = out_of_line(entry)
            body = pack(entry)
            digest += entry_digest(self._execution.row.run, seq, kind, body)
            lines.append(JournalRow(seq, kind, body))
            recorded.append(Recorded(seq, kind, entry))
        return lines, recorded, statements, digest

    def closing_lines(self) -> Operation[list[JournalRow]]:
        """What was put off, for the transaction that ends the execution."""
        if any(len(entry.value or b"") >= BLOB_MIN_BYTES for _, entry in self._pending):
            yield from self.flush()  # it is more than a line
        with self._lock:
            taken, self._pending = self._pending, []
            self._durable = self._buffered
        lines, recorded, _, digest = self._lines(taken)
        self._execution.index.add(recorded, digest)
        return lines

    def write_fenced(self, same_tx: SameTx) -> Operation[None]:
        """Write something for the run that is no entry of its journal, and may be written twice. Raises LeaseLost."""
        if not (yield from self.commit_with_retry(partial(_fenced, same_tx=same_tx), _unknown)):
            self._execution.lose()

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
                return (yield Transaction(partial(op, self._execution.hold), write=True))
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
    hold: FenceToken,
    lines: list[JournalRow],
    statements: list[Any],
    same_tx: SameTx | None,
    other: str | None,
) -> Program[Any]:
    locks = [] if other is None else [rows.LOCK_TWO(tenant=hold.tenant, run=hold.run, other=other)]
    answers = yield Batch(*locks, *rows.append_statements(hold, lines))
    appended = answers[len(locks)]
    if not appended:
        return None
    if statements:
        yield Batch(*statements)
    if same_tx is not None:
        yield from same_tx()
    return appended[0]


def _fenced(hold: FenceToken, same_tx: SameTx) -> Program[bool]:
    [held] = yield Batch(_HOLDS(**hold._asdict()))
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
