"""The PostgreSQL driver: one transaction per program, in as few round trips as it allows.

A batch is one pipeline; one that is `last` carries the COMMIT. Writes run READ COMMITTED, reads READ ONLY REPEATABLE
READ. A serialization failure or a deadlock runs the operation again, and so does a connection lost before COMMIT. One
lost after COMMIT was sent is OutcomeUnknown: the caller looks for the record.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from sys import audit
from typing import Any, NamedTuple

from perdure.errors import ExtraMissing, ForkedProcess, OpenError, StoreClosed, StoreError, UsageError
from perdure.storage.program import (
    WRITE_EVENT,
    Batch,
    Capabilities,
    Dialect,
    Driver,
    Maintenance,
    Program,
    Rows,
    Sql,
    Statement,
    Transaction,
)

try:
    import psycopg
except ImportError as missing:
    raise ExtraMissing("PostgreSQL", "postgres") from missing

from perdure.storage import metrics
from perdure.storage.notifications import Notifications
from perdure.storage.postgres import errors as meaning
from perdure.storage.postgres.connection import ConnectionLost, PipelinedConnection, ServerTimeout, Statements
from perdure.storage.postgres.group_commit import Again, GroupCommit
from perdure.storage.postgres.notifications import PostgresNotifications
from perdure.storage.postgres.opening import Connection, Durability, first_connection, parsed, prepare_store
from perdure.storage.postgres.pool import ConnectionPool
from perdure.storage.postgres.tenants import tenancy_of
from perdure.storage.row_hashes import check_rows
from perdure.storage.wrapping import SnapshotDriver

_BEGIN_READ = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_BEGIN_WRITE = b"BEGIN ISOLATION LEVEL READ COMMITTED"
_ATTEMPTS_MAX = 12

Hook = Callable[[str], None]


def backoff_s(attempt: int, chance: Callable[[], float] = random.random) -> float:
    """Return how long to wait before the next attempt: doubled, capped, and random so that rivals do not collide."""
    ceiling: float = min(0.2, 0.002 * 2.0**attempt)
    return ceiling * (0.5 + chance() / 2)


class PostgresDriver:
    """Runs programs on a PostgreSQL store. Opening it checks the server and upgrades the schema."""

    def __init__(
        self,
        url: str,
        *,
        schema: str = "perdure",
        pool_size: int = 8,
        timeout_s: float = 30.0,
        durability: Durability = "full",
        prepare: bool = True,
        create: bool = True,
        read_only: bool = False,
        hook: Hook | None = None,
    ) -> None:
        if pool_size < 1:
            raise UsageError(f"pool_size must be at least 1, not {pool_size}")
        self._target = parsed(url, schema=schema, timeout_s=timeout_s, durability=durability, read_only=read_only)
        self._timeout_s = timeout_s
        self._pool_size = pool_size
        self._hook = hook
        self._pid = os.getpid()
        self._closed = False
        self._statements = Statements(prepare=prepare)
        self._view: PostgresDriver | None = None  # whose connections see snapshots
        connection, self._startup_options = first_connection(self._target)
        try:
            if read_only and not self._startup_options:
                raise OpenError(f"{self._target}: a pooler refuses read_only=True; connect to the server itself")
            self.store_id = prepare_store(connection, self._target, create=create, pooled=not self._startup_options)
            self._statements.tenancy = tenancy_of(connection, self._target)
        except BaseException as error:
            connection.close()
            if isinstance(error, psycopg.Error):
                raise meaning.translated(error, self._target, timeout_s) from error
            raise
        self._open_pool(pool_size)
        self._pool.add(PipelinedConnection(connection, self._statements, timeout_s))

    def __str__(self) -> str:
        return str(self._target)

    def __repr__(self) -> str:
        return f"PostgresDriver({self})"

    @property
    def dialect(self) -> Dialect:
        return "postgres"

    @property
    def capabilities(self) -> Capabilities:
        target = self._target
        place = (target.host, target.port, target.database, target.schema, self.store_id)
        return Capabilities(self, place=place)

    def run(self, transaction: Transaction) -> Any:
        if transaction.write:
            audit(WRITE_EVENT, self)
        return self._attempts(partial(self._transact, transaction), write=transaction.write)

    async def arun(self, transaction: Transaction) -> Any:
        """`run`, awaited: concurrent writes of one batch share an exchange."""
        self._check()
        if transaction.write:
            audit(WRITE_EVENT, self)
        if transaction.write and not transaction.solo and self._gathers:
            program = transaction.op()
            step = _next(program, None)
            if not isinstance(step, Batch):
                return _result(step)
            if step.last:
                with suppress(Again):  # then from the start, alone
                    rows = await self._group.write(step.statements, wants_rows=True)
                    return _result(_next(program, _checked(step, rows)))
            program.close()
        work = partial(self._attempts, partial(self._transact, transaction), write=transaction.write)
        return await self._group.alone(work, write=transaction.write)

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        audit(WRITE_EVENT, self)
        return _matches(counts, self._attempts(partial(self._append, statements), write=True))

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """`append`, awaited: concurrent ones share an exchange."""
        self._check()
        audit(WRITE_EVENT, self)
        if self._gathers:
            with suppress(Again):  # then alone
                return _matches(counts, await self._group.write(statements, wants_rows=False))
        work = partial(self._attempts, partial(self._append, statements), write=True)
        return _matches(counts, await self._group.alone(work, write=True))

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        """Vacuum a table and renew the planner's samples, which hold plain values. The server itself reclaims space.

        `scrub_full` rewrites the table, which is locked meanwhile.
        """
        if table:
            vacuum = Sql(f"VACUUM ({'FULL, ' if kind == 'scrub_full' else ''}ANALYZE) {table}")
            self._attempts(partial(self._append, [vacuum()], decisive=False), write=True)
        return ""

    def end_prepared(self, gid: str, outcome: str) -> bool:
        """Commit or abort a prepared transaction. Return False if there is none of this name."""
        verb = "COMMIT" if outcome == "commit" else "ROLLBACK"
        end = Sql(postgres=f"{verb} PREPARED '{int(gid, 16):032x}'")
        try:
            self._attempts(partial(self._append, [end()], decisive=False), write=True)
        except StoreError as error:
            if getattr(error.__cause__, "sqlstate", "") == "42704":
                return False
            raise
        return True

    def use_callers_clock(self) -> None:
        """Take the time that callers pass for the server's, so that a test can set it (`perdure.testing.Clock`)."""
        self._statements.callers_clock = True
        self._statements.renew()

    def listen(self) -> Notifications:
        """Return notifications of runs that are due, on a connection of their own."""
        self._check()
        return PostgresNotifications(self.connect_alone, self._target)

    def at(self, epoch: int, token: str) -> Driver:
        """Return a driver that reads the store as it was at a snapshot (see `Driver`).

        Each of its transactions puts the views of another schema before the tables. It has its own connections, because
        their prepared statements refer to the views.
        """
        if self._view is None:
            view = copy(self)
            view._statements = Statements(prepare=self._statements.prepare)
            view._statements.tenancy = self._statements.tenancy
            view._open_pool(self._pool_size)
            self._view = view
        view = self._view
        return SnapshotDriver(self, token, lambda op: view.run(Transaction(op)), lambda op: view.arun(Transaction(op)))

    def close(self) -> None:
        """Close every connection. Operations under way end first, later ones raise StoreClosed."""
        self._closed = True
        if self._view is not None:
            self._view.close()
        if os.getpid() == self._pid:  # in a forked child the sockets are the parent's
            self._pool.close()
            self._group.close()

    async def aclose(self) -> None:
        self.close()

    @property
    def _gathers(self) -> bool:
        return self._hook is None and not self._group.idle

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this store was opened by the parent process; open it again in the child")
        if self._closed:
            raise StoreClosed("the store was closed")

    # One operation, until it succeeds or fails for good.

    def _attempts(self, work: Callable[[PipelinedConnection], Any], *, write: bool) -> Any:
        lost = False
        for attempt in range(_ATTEMPTS_MAX):
            self._check()
            line: PipelinedConnection | None = None
            try:
                with self._pool.connection() as line:
                    began_s = time.perf_counter()
                    answer = work(line)
                if write and (sink := metrics.sink) is not None:
                    sink.record(metrics.COMMIT, time.perf_counter() - began_s, "postgresql")
                return answer
            except ConnectionLost as error:
                if line is not None and line.decisive:
                    raise meaning.unknown(str(error), self._target) from error
                if lost or isinstance(error, ServerTimeout):
                    raise meaning.lost(str(error), self._target) from error
                lost, reason = True, "lost"
            except psycopg.Error as error:
                if line is None:
                    raise meaning.not_connected(error, self._target) from error
                if attempt + 1 == _ATTEMPTS_MAX or not self._worth_another(error, attempt):
                    raise meaning.translated(error, self._target, self._timeout_s) from error
                reason = "conflict" if error.sqlstate in meaning.RETRIED else "plan"
            if (sink := metrics.sink) is not None:
                sink.record(metrics.RETRIES, 1, "postgresql", reason)
            time.sleep(backoff_s(attempt))
        raise AssertionError("the last attempt returns or raises")

    def _worth_another(self, error: psycopg.Error, attempt: int) -> bool:
        """Return whether an operation that was rolled back may succeed if it runs again."""
        state = error.sqlstate
        if state in meaning.RETRIED:
            return True
        if state in meaning.FOREIGN_SESSION and (self._statements.prepare or attempt == 0):
            # A pooler does not support prepared statements: from here on none are used. Operations that were sent
            # before that are repeated too.
            self._statements.prepare = False
            return True
        if state == meaning.STALE_PLAN and self._statements.prepare and attempt == 0:
            self._statements.renew()
            return True
        return False

    def _append(
        self, statements: Sequence[Statement], line: PipelinedConnection, *, decisive: bool = True
    ) -> Sequence[int]:
        """Return how many rows each statement changed."""
        hook = self._hook
        if hook is not None:
            hook("statement:0")
        changed = [result.command_tuples or 0 for result in line.exchange(statements, decisive=decisive)]
        if hook is not None:
            hook("committed")
        return changed

    def _transact(self, transaction: Transaction, line: PipelinedConnection) -> Any:
        program = transaction.op()
        try:
            return self._perform(program, transaction.write, line, _ending(transaction))
        finally:
            program.close()  # a traceback would keep it alive, with what it holds

    def _perform(self, program: Program[Any], write: bool, line: PipelinedConnection, ending: bytes) -> Any:
        """Run a program once, in as few round trips as its batches allow."""
        hook = self._hook
        begin: bytes | None = _BEGIN_WRITE if write else _BEGIN_READ
        number = 0
        if hook is not None:
            hook("begin")
            line.exchange((), begin=begin)
            begin = None
        step = _next(program, None)
        while isinstance(step, Batch):
            last, statements = step.last, step.statements
            if hook is not None:
                rows = []
                for statement in statements:  # a round trip each, so that a fault can strike at every point
                    hook(f"statement:{number}")
                    number += 1
                    rows += [line.rows(result) for result in line.exchange((statement,))]
            else:
                # A pipeline is one transaction, but only a single statement sees one snapshot.
                whole = last and begin is not None and (write or len(statements) == 1)
                end = b"COMMIT" if last and not whole else None
                results = line.exchange(statements, begin=None if whole else begin, end=end, decisive=last and write)
                begin, rows = None, [line.rows(result) for result in results]
            try:
                step = _next(program, _checked(step, rows))
            except Exception:
                _roll_back(line)
                raise
            if last and hook is None:
                return _result(step)
            if last:
                break
        if hook is not None:
            hook("commit")
        if begin is None:
            line.exchange((), end=ending, decisive=write)
        if hook is not None:
            hook("committed")
        return _result(step)

    # Connections.

    def _open_pool(self, size: int) -> None:
        self._pool = ConnectionPool(self._connect, size=size, timeout_s=self._timeout_s)
        self._group = GroupCommit(self._pool, size, partial(meaning.unknown, target=self._target))

    def connect_alone(self) -> Connection:
        settings: dict[str, Any] = {"options": self._target.options} if self._startup_options else {}
        return Connection.connect(self._target.conninfo, autocommit=True, **settings)

    def _connect(self) -> PipelinedConnection:
        return PipelinedConnection(self.connect_alone(), self._statements, self._timeout_s)


def _ending(transaction: Transaction) -> bytes:
    """Return what ends a transaction. A name is of hexadecimal digits: this statement takes no parameters."""
    return f"PREPARE TRANSACTION '{int(transaction.prepare, 16):032x}'".encode() if transaction.prepare else b"COMMIT"


class _Returned(NamedTuple):
    value: Any


def _checked(batch: Batch, answers: list[Rows]) -> list[Rows]:
    return [
        check_rows(sql, params, rows) if rows and sql.checks else rows
        for (sql, params), rows in zip(batch.statements, answers, strict=True)
    ]


def _matches(counts: Sequence[int | None], changed: Sequence[int]) -> bool:
    return all(count is None or count == actual for count, actual in zip(counts, changed, strict=True))


def _next(program: Program[Any], answers: list[Rows] | None) -> Batch | _Returned:
    """Return the program's next batch, or its result as `_Returned`."""
    try:
        # The first step of a generator takes None.
        return program.send(answers)  # type: ignore[arg-type]
    except StopIteration as stop:
        return _Returned(stop.value)


def _result(step: Batch | _Returned) -> Any:
    if isinstance(step, Batch):
        raise UsageError("a program continued after the batch that it had called its last; that one was committed")
    return step.value


def _roll_back(line: PipelinedConnection) -> None:
    """Roll back after a program failed, so that the connection can be used again. If not, its pool closes it."""
    if not line.reusable:
        try:
            line.exchange((), end=b"ROLLBACK")
        except (ConnectionLost, psycopg.Error):
            pass
