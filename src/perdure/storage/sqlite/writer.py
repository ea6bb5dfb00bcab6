"""Committing a group of jobs to SQLite: one transaction with a savepoint for each job, and one fsync.

The order is: file lock, BEGIN IMMEDIATE, the jobs, COMMIT, sometimes a checkpoint. A failed job undoes only its own
work; a failed COMMIT fails all jobs. A failed fsync is never tried again: the kernel may have dropped the pages and
marked them clean, so success of a second one proves nothing. The store closes itself instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import Any

import apsw

from perdure.errors import OutcomeUnknown, StoreClosed, UsageError
from perdure.storage import metrics
from perdure.storage.prepared import PreparedHere
from perdure.storage.program import Batch, Maintenance, Program, Rows, Sql, Statement
from perdure.storage.row_hashes import check_rows
from perdure.storage.sqlite.commit_queue import Group, Job
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.file_lock import PATIENCE_S, FileLock
from perdure.storage.sqlite.opening import Target
from perdure.storage.sqlite.snapshot_views import show
from perdure.storage.sqlite.statements import NOTHING_CHANGED, Text, prepare, step_of

Hook = Callable[[str], None]

# The log is copied into the store when it has this many pages (4 MB), SQLite's own default …
_CHECKPOINT_PAGES = 2000
# … but overlapping readers keep SQLite from starting it over. From this size on (64 MB) the writer waits for them.
_RESTART_PAGES = 32_768
_RESTART_WAIT_MS = 200
_SCRUB_WAIT_MS = 1000
_LOOK_COMMITS = 16  # of the straight commits, how many share one look at the length of the log: a callback costs 2 µs


def perform(op: Callable[[], Program[Any]], cursor: apsw.Cursor, hook: Hook | None) -> Any:
    """Run one program inside the transaction that is open on the cursor."""
    program = op()
    try:
        batch = next(program)
    except StopIteration as stop:
        return stop.value
    return perform_from(program, batch, cursor, hook)


def perform_at(epoch: int, op: Callable[[], Program[Any]], cursor: apsw.Cursor, hook: Hook | None) -> Any:
    """Run a program that reads a store in memory as of an epoch, which its only connection shows meanwhile."""
    cursor.execute("SAVEPOINT shown")
    try:
        show(cursor.connection, epoch)
        return perform(op, cursor, hook)
    finally:
        cursor.execute("ROLLBACK TO shown; RELEASE shown")


def perform_from(program: Program[Any], batch: Batch, cursor: apsw.Cursor, hook: Hook | None) -> Any:
    """Run a program that has yielded its first batch."""
    execute, fetch = cursor.execute, cursor.fetchall
    number = 0
    try:
        while True:
            answers: list[Rows] = []
            for sql, params in batch.statements:
                for text, take in sql.prepared or prepare(sql):
                    if hook is not None:
                        hook(f"statement:{number}")
                        number += 1
                    execute(text, take(params))
                rows = fetch()
                answers.append(check_rows(sql, params, rows) if rows and sql.checks else rows)
            was_last, batch = batch.last, program.send(answers)
            if was_last:  # PostgreSQL would have committed by now
                raise UsageError("a program continued after the batch that it had called its last; nothing is written")
    except StopIteration as stop:
        return stop.value
    finally:
        program.close()  # a traceback would keep it alive, with what it holds


_PREPARED = "SELECT gid, decider, deadline FROM prepared LIMIT 1"


def refuse_prepared(cursor: apsw.Cursor) -> None:
    """Raise PreparedHere if the store waits for the decision about a transaction (`storage/prepared.py`)."""
    if (row := cursor.execute(_PREPARED).fetchone()) is not None:
        raise PreparedHere(*row)


class CountDiffers(Exception):
    """A statement of an append changed a number of rows other than expected."""


def perform_append(
    statements: Sequence[Statement],
    counts: Sequence[int | None],
    cursor: apsw.Cursor,
    hook: Hook | None,
    steps: Mapping[Sql, Text] = MappingProxyType({}),
) -> bool:
    """Run the statements of an append inside the transaction that is open on the cursor. Raises CountDiffers.

    steps: the single text of each statement that runs in one step. Texts of the others run one after the other.
    """
    execute, changes = cursor.execute, cursor.connection.changes
    number = 0
    for (sql, params), count in zip(statements, counts, strict=True):
        if sql in steps:
            if hook is not None:
                hook(f"statement:{number}")
                number += 1
            text, take = steps[sql]
            execute(text, take(params))
            continue
        for text, take in sql.prepared or prepare(sql):
            if hook is not None:
                hook(f"statement:{number}")
                number += 1
            execute(text, take(params))
        if count is not None and changes() != count:
            raise CountDiffers
    return True


def is_unchanged(error: BaseException) -> bool:
    """Return whether a step failed because its last text changed no row."""
    return isinstance(error, apsw.ConstraintError) and NOTHING_CHANGED in str(error)


class Writer:
    """The only connection of this process that writes to the store. One leader at a time uses it."""

    def __init__(
        self,
        target: Target,
        connection: apsw.Connection,
        lock: FileLock,
        hook: Hook | None,
        on_lost: Callable[[str], None],
    ) -> None:
        self.connection = connection
        self._cursor = connection.cursor()
        self._execute = self._cursor.execute
        self._target = target
        self._lock = lock
        self._hook = hook
        self._on_lost = on_lost
        self._lost = ""
        self._steps: dict[Sql, Text] = {}  # statements of several texts as one text
        self._log_pages = self._appends = 0
        self._restart_at = _RESTART_PAGES
        # It replaces SQLite's own checkpoint inside COMMIT: ours runs after the waiters were woken.
        self._set_log_hook = (lambda _: None) if target.in_memory else connection.set_wal_hook
        self._set_log_hook(self._committed_to_log)

    def commit(self, group: Group) -> None:
        """Finish every job of the group. Raises only what belongs to no job (KeyboardInterrupt)."""
        first = group.jobs[0]
        if self._lost:
            first.fail(StoreClosed(self._lost))
            return
        try:
            self._lock.acquire(first.deadline, PATIENCE_S)
            began_s = monotonic()
            left_s = first.deadline - began_s
            # The time in the queue counts: SQLite waits only for the remaining time.
            is_late = left_s < self._target.timeout_s - 0.05
            if is_late:
                self.connection.set_busy_timeout(max(1, int(left_s * 1000)))
            try:
                self._set_log_hook(self._committed_to_log)
                if first.outside:
                    first.result, first.done = first.work(self._cursor, self._hook), True
                else:
                    self._transact(group)
            finally:
                if is_late:
                    self._reset_busy_timeout()
            self._committed(began_s, len(group.jobs))
            if self._log_pages >= _CHECKPOINT_PAGES and not self._lost:
                group.wake()  # before the checkpoint: their work is committed
                self._checkpoint()
        except Exception as error:
            self._fail(group.jobs, error)
        finally:
            self._lock.release()

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """Write one append in a transaction of its own, on the leader's thread, without a job or a group."""
        if self._lost:
            raise StoreClosed(self._lost)
        committing, hook = False, self._hook
        began_s = monotonic()
        self._appends += 1
        looks = self._appends % _LOOK_COMMITS == 0
        if looks or self._appends % _LOOK_COMMITS == 1:
            self._set_log_hook(self._committed_to_log if looks else None)
        try:
            self._lock.acquire(began_s + self._target.timeout_s, PATIENCE_S)
            refuse_prepared(self._cursor)
            sql, params = statements[0]
            if len(statements) == 1 and (sql.step or len(sql.sqlite) == 1):
                if hook is not None:
                    hook("begin")
                    hook("statement:0")
                    hook("commit")
                committing = True  # a transaction by itself
                text, take = self._steps.get(sql) or (
                    self._step(sql) if sql.step else (sql.prepared or prepare(sql))[0]
                )
                self._execute(text, take(params))
                if counts[0] is not None and not sql.step and self.connection.changes() != counts[0]:
                    return False
            else:
                for sql, _ in statements:  # before BEGIN: a rollback would remove the views
                    if sql.step:
                        self._step(sql)
                self._execute("BEGIN IMMEDIATE")
                if hook is not None:
                    hook("begin")
                perform_append(statements, counts, self._cursor, hook, self._steps)
                if hook is not None:
                    hook("commit")
                committing = True
                self._execute("COMMIT")
            if hook is not None:
                hook("committed")
            if metrics.sink is not None:
                self._committed(began_s, 1)
            if looks and self._log_pages >= _CHECKPOINT_PAGES:
                self._checkpoint()
        except BaseException as error:
            self._roll_back(error)
            if isinstance(error, CountDiffers) or is_unchanged(error):
                return False
            if committing and isinstance(error, apsw.IOError):
                self._lose(error)
                raise self._unknown(error) from error
            if isinstance(error, apsw.Error):
                raise translate(error, self._target.path, self._target.timeout_s) from error
            raise
        finally:
            self._lock.release()
        return True

    def _step(self, sql: Sql) -> Text:
        """Return a statement of several texts as one text, and make the view that it needs on this connection."""
        text = self._steps.get(sql)
        if text is None:
            create, text = step_of(sql)
            self._execute(create)
            self._steps[sql] = text
        return text

    def maintain(self, kind: Maintenance) -> str:
        """Rewrite the file or truncate its log, outside of any transaction. Return "" or what prevented it."""
        call = self._hook or (lambda _: None)
        if self._target.in_memory:
            return ""
        if kind == "reclaim":
            self._vacuum()
        elif kind == "scrub":  # removed data must not stay in free pages
            call("statement:0")
            self.connection.pragma("secure_delete", 1)
            self._vacuum()
            self.connection.pragma("secure_delete", 0)
        call("commit")
        self.connection.set_busy_timeout(_SCRUB_WAIT_MS)
        try:
            self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            return f"{self._target.path}-wal: a reader is active, so that it could not be truncated yet"
        finally:
            self._reset_busy_timeout()
        call("committed")
        return ""

    def _vacuum(self) -> None:
        """Rewrite the file. SQLite attaches the new file meanwhile, which connections otherwise must not do."""
        self.connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 1)
        try:
            self._execute("VACUUM")
        finally:
            self.connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)

    def close(self) -> None:
        """Close the connection. At the last one of a store, SQLite moves the log into the store and removes it."""
        self._cursor.close()
        self.connection.close()

    def _transact(self, group: Group) -> None:
        hook = self._hook
        committing = False
        kept: list[Job] = []
        try:
            self._execute("BEGIN IMMEDIATE")
            if hook is not None:
                hook("begin")
            job: Job | None = group.jobs[0]
            while job is not None and self._attempt(job, kept):
                job = group.take()
            if not kept:
                return
            if hook is not None:
                hook("commit")
            committing = True
            self._execute("COMMIT")
        except BaseException as error:
            if committing and isinstance(error, apsw.IOError):
                self._roll_back(error)
                self._lose(error)
                for job in kept:
                    job.fail(self._unknown(error))
            elif committing and not isinstance(error, Exception) and not self.connection.in_transaction:
                _finish(kept)  # interrupted right after COMMIT returned: the jobs are written, and must not run again
            else:
                self._roll_back(error)
            raise
        _finish(kept)
        if hook is not None:
            try:
                hook("committed")
            except Exception as error:
                for job in kept:
                    job.error = error

    def _attempt(self, job: Job, kept: list[Job]) -> bool:
        """Run one job. Return False if the group must end."""
        # The first job needs no savepoint: if it fails, there is nothing else to roll back.
        nested = bool(kept)
        if nested:
            self._execute("SAVEPOINT job")
        try:
            if not nested and not job.settles:  # no job of a group prepares the store: one look is enough for all
                refuse_prepared(self._cursor)
            job.result = job.work(self._cursor, self._hook)
        except Exception as error:
            if nested and not self.connection.in_transaction:
                raise  # SQLite ended the whole transaction (disk full, I/O error): it failed for all
            if self.connection.in_transaction:
                self._execute("ROLLBACK TO job; RELEASE job" if nested else "ROLLBACK")
            self._fail((job,), error)
            return nested
        if nested:
            self._execute("RELEASE job")
        kept.append(job)
        return True

    def _unknown(self, error: BaseException) -> OutcomeUnknown:
        unknown = OutcomeUnknown(
            f"the disk under {self._target.path} failed during COMMIT: "
            "this may or may not be written; open the store again and look"
        )
        unknown.__cause__ = error
        return unknown

    def _roll_back(self, error: BaseException) -> None:
        try:
            if self.connection.in_transaction:
                self._execute("ROLLBACK")
        except apsw.Error:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self._lost = (
            f"the store {self._target.path} closed itself after a failure that must not be retried "
            f"({type(error).__name__}: {error}); check the disk, then open it again"
        )
        self._on_lost(self._lost)

    def _fail(self, jobs: Iterable[Job], error: BaseException) -> None:
        for job in jobs:
            if not job.done:
                job.fail(translate(error, self._target.path, self._target.timeout_s))

    def _reset_busy_timeout(self) -> None:
        if not self._lost:
            self.connection.set_busy_timeout(int(self._target.timeout_s * 1000))

    def _committed(self, began_s: float, jobs: int) -> None:
        if (sink := metrics.sink) is not None:
            sink.record(metrics.COMMIT, monotonic() - began_s, "sqlite")
            sink.record(metrics.COMMIT_JOBS, jobs, "sqlite")

    def _committed_to_log(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._log_pages = pages
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        """Copy the log into the store, under the file lock: otherwise writers lengthen it faster than it is copied."""
        pages, mode = self._log_pages, apsw.SQLITE_CHECKPOINT_PASSIVE
        if pages >= self._restart_at:
            mode = apsw.SQLITE_CHECKPOINT_RESTART
            self._restart_at = pages + _RESTART_PAGES  # a reader that never ends costs one wait per 64 MB
            self.connection.set_busy_timeout(_RESTART_WAIT_MS)
        elif pages < _RESTART_PAGES:
            self._restart_at = _RESTART_PAGES
        try:
            self.connection.wal_checkpoint(mode=mode)
        except apsw.IOError as error:
            self._lose(error)
        except apsw.Error:
            pass  # readers, another checkpoint or a full disk: the log has all data, and the next commit tries again
        finally:
            if mode == apsw.SQLITE_CHECKPOINT_RESTART:
                self._reset_busy_timeout()


def _finish(jobs: list[Job]) -> None:
    for job in jobs:
        job.done = True
