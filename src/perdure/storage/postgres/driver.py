"""The PostgreSQL driver: one transaction per program, blocking or async, in as few round trips as it allows.

A batch is one pipeline. A program whose only batch is `last` is one round trip: all statements up to the one
Sync are one transaction of PostgreSQL's own, without BEGIN and COMMIT (reads of several statements get them,
in the same pipeline, for one snapshot). Otherwise BEGIN rides with the first batch and COMMIT with the one
flagged last.

Writes run READ COMMITTED, reads READ ONLY REPEATABLE READ. What is run again and what is not:

    serialization failure, deadlock      again, a few times; the operation is called anew, not the generator
    connection lost before COMMIT        again, once, on a fresh connection
    connection lost after COMMIT went    never: OutcomeUnknown, and the caller looks the record up

How to run it behind PgBouncer in transaction mode: see `opening.py`. The logic below is one generator
that yields what it waits for; `run` and `arun` only differ in how they wait.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from perdure.errors import ForkedProcess, OpenError, StoreClosed, UsageError
from perdure.storage.program import (
    Batch,
    Capabilities,
    Dialect,
    Maintenance,
    Program,
    Rows,
    Sql,
    Statement,
    Transaction,
)

try:
    import psycopg
except ImportError as missing:  # pragma: no cover - the extra is installed wherever the tests run
    raise OpenError('PostgreSQL needs its driver: pip install "psycopg[binary]>=3.2"') from missing

from perdure.storage import metrics
from perdure.storage.notifications import Notifications
from perdure.storage.postgres import errors as meaning
from perdure.storage.postgres.connection import ConnectionLost, PipelinedConnection, ServerTimeout, Statements
from perdure.storage.postgres.gather import Again
from perdure.storage.postgres.notifications import PostgresNotifications
from perdure.storage.postgres.opening import (
    AsyncConnection,
    Connection,
    Durability,
    first_connection,
    parsed,
    prepare_store,
)
from perdure.storage.postgres.pool import BlockingPool, LoopConnection, LoopPool, wait
from perdure.storage.postgres.tenants import tenancy_of
from perdure.storage.row_hashes import check_rows

_BEGIN_READ = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_BEGIN_WRITE = b"BEGIN ISOLATION LEVEL READ COMMITTED"
_ATTEMPTS_MAX = 12

Hook = Callable[[str], None]
# What an attempt waits for: None is a line, a number is that many seconds, a line is the answer on it.
Wanted: TypeAlias = PipelinedConnection | float | None


def backoff_s(attempt: int, chance: Callable[[], float] = random.random) -> float:
    """How long to wait before an attempt is repeated: doubling, capped, and spread so that rivals part."""
    ceiling: float = min(0.2, 0.002 * 2.0**attempt)
    return ceiling * (0.5 + chance() / 2)


class PostgresDriver:
    """A store on PostgreSQL. Opening checks the server and brings the schema up to date."""

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
        hook: Hook | None = None,
    ) -> None:
        if pool_size < 1:
            raise UsageError(f"pool_size must be at least 1, not {pool_size}")
        self._target = parsed(url, schema=schema, timeout_s=timeout_s, durability=durability)
        self._timeout_s = timeout_s
        self._pool_size = pool_size
        self._hook = hook
        self._pid = os.getpid()
        self._closed = False
        self._statements = Statements(prepare=prepare)
        self._loop_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopPool]
        self._loop_pools = weakref.WeakKeyDictionary()
        self._loop_pools_lock = threading.Lock()
        connection, self._startup_options = first_connection(self._target)
        try:
            self.store_id = prepare_store(connection, self._target, create=create, pooled=not self._startup_options)
            self._statements.tenancy = tenancy_of(connection, self._target)
        except BaseException as error:
            connection.close()
            if isinstance(error, psycopg.Error):
                raise meaning.translated(error, self._target, timeout_s) from error
            raise
        self._pool = BlockingPool(self._connect, size=pool_size, timeout_s=timeout_s)
        self._pool.add(PipelinedConnection(connection, self._statements))

    def __repr__(self) -> str:
        return f"PostgresDriver({self._target})"

    @property
    def dialect(self) -> Dialect:
        return "postgres"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self, sees_all_tenants=self._statements.tenancy is None)

    def run(self, transaction: Transaction) -> Any:
        """Run a program in one transaction."""
        return self._drive(self._attempts(partial(self._attempt, transaction), write=transaction.write))

    async def arun(self, transaction: Transaction) -> Any:
        """`run`, awaited: concurrent writes of one batch share an exchange (`gather.py`)."""
        steps = self._attempts(partial(self._attempt, transaction), write=transaction.write)
        if not transaction.write or transaction.solo or self._hook is not None:
            return await self._adrive(steps)
        self._check()
        gatherer = self._loop_pool().gatherer
        if not gatherer.idle:
            program = transaction.op()
            step = _next(program, None)
            if not isinstance(step, Batch):
                return _result(step)
            if step.last:
                try:
                    return _result(_next(program, _checked(step, await gatherer.run(step.statements))))
                except Again:
                    pass  # from the start, alone
            program.close()
        with gatherer.alone():
            return await self._adrive(steps)

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """Run statements in one round trip, which is one transaction (see `Driver`)."""
        return bool(self._drive(self._attempts(partial(self._append, statements, counts), write=True)))

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """`append`, awaited: concurrent ones share an exchange (`gather.py`)."""
        self._check()
        gatherer = self._loop_pool().gatherer
        if self._hook is None and not gatherer.idle:
            try:
                return _matches(counts, await gatherer.append(statements))
            except Again:
                pass  # alone
        with gatherer.alone():
            return bool(await self._adrive(self._attempts(partial(self._append, statements, counts), write=True)))

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        """Vacuum a table and take the planner's samples of it anew, which hold values in the clear. `scrub_full`
        rewrites the table, which locks it meanwhile. Space is reclaimed by the server itself."""
        if not table:
            return ""
        vacuum = Sql(f"VACUUM ({'FULL, ' if kind == 'scrub_full' else ''}ANALYZE) {table}")
        return str(self._drive(self._attempts(partial(self._vacuum, vacuum), write=True)))

    def _drive(self, steps: Generator[Wanted, Any, Any]) -> Any:
        self._check()
        pool = self._pool
        line: PipelinedConnection | None = None
        try:
            wanted = next(steps)
            while True:
                try:
                    answer: PipelinedConnection | None = None
                    if wanted is None:
                        if line is not None:
                            held, line = line, None
                            pool.release(held)
                        answer = line = pool.acquire()
                    elif isinstance(wanted, PipelinedConnection):
                        wait(wanted, self._timeout_s)
                    else:
                        time.sleep(wanted)
                except BaseException as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            if line is not None:
                pool.release(line)

    async def _adrive(self, steps: Generator[Wanted, Any, Any]) -> Any:
        self._check()
        pool = self._loop_pool()
        held: LoopConnection | None = None
        try:
            wanted = next(steps)
            while True:
                try:
                    answer: PipelinedConnection | None = None
                    if wanted is None:
                        if held is not None:
                            kept, held = held, None
                            pool.release(kept)
                        held = pool.acquire_now() or await pool.acquire()
                        answer = held.line
                    elif held is not None and wanted is held.line:
                        await held.wait(self._timeout_s)
                    else:
                        await asyncio.sleep(float(wanted))  # type: ignore[arg-type]
                except BaseException as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            if held is not None:
                pool.release(held)

    def close(self) -> None:
        """Close every connection. Operations under way finish; later ones raise StoreClosed."""
        self._closed = True
        if os.getpid() != self._pid:
            return  # the sockets are the parent's: closing them here would end its sessions
        self._pool.close()
        with self._loop_pools_lock:
            pools = list(self._loop_pools.values())
            self._loop_pools.clear()
        for pool in pools:
            pool.close_from_anywhere()

    async def aclose(self) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this store was opened by the parent process; open it again in the child")
        if self._closed:
            raise StoreClosed("the store was closed")

    def listen(self) -> Notifications:
        """Hear that a run is due, on a connection of its own."""
        self._check()
        return PostgresNotifications(self._connect_plain, self._target)

    # One operation, until it succeeds or fails for good.

    def _attempts(
        self, work: Callable[[PipelinedConnection], Generator[Wanted, Any, Any]], *, write: bool
    ) -> Generator[Wanted, Any, Any]:
        losses = 0
        for attempt in range(_ATTEMPTS_MAX):
            line: PipelinedConnection | None = None
            try:
                line = yield None
                if (sink := metrics.sink) is not None and write:
                    return (yield from _timed(sink, work(line)))
                return (yield from work(line))
            except ConnectionLost as error:
                if line is not None and line.decisive:
                    raise meaning.unknown(str(error), self._target) from error
                losses += 1
                if losses > 1 or isinstance(error, ServerTimeout):
                    raise meaning.lost(str(error), self._target) from error
                reason = "lost"
            except psycopg.Error as error:
                if line is None:
                    raise meaning.not_connected(error, self._target) from error
                if attempt + 1 == _ATTEMPTS_MAX or not self._worth_another(error, attempt):
                    raise meaning.translated(error, self._target, self._timeout_s) from error
                reason = "conflict" if error.sqlstate in meaning.RETRIED else "plan"
            if (sink := metrics.sink) is not None:
                sink.record(metrics.RETRIES, 1, "postgresql", reason)
            yield backoff_s(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _append(
        self, statements: Sequence[Statement], counts: Sequence[int | None], line: PipelinedConnection
    ) -> Generator[Wanted, Any, bool]:
        hook = self._hook
        if hook is not None:
            hook("statement:0")
        line.send(statements, decisive=True)
        yield line
        changed = line.take_counts()
        if hook is not None:
            hook("committed")
        return _matches(counts, changed)

    def _attempt(self, transaction: Transaction, line: PipelinedConnection) -> Generator[Wanted, Any, Any]:
        if self._hook is None:
            return self._transact(line, transaction)
        return self._stepwise(line, transaction, self._hook)

    def _vacuum(self, vacuum: Sql, line: PipelinedConnection) -> Generator[Wanted, Any, str]:
        """What PostgreSQL refuses to do inside a transaction."""
        hook = self._hook
        if hook is not None:
            hook("statement:0")
        line.send([vacuum()])
        yield line
        line.take()
        if hook is not None:
            hook("committed")
        return ""

    def _worth_another(self, error: psycopg.Error, attempt: int) -> bool:
        """Whether the statement, which was rolled back, may succeed if the operation is run again."""
        state = error.sqlstate
        if state in meaning.RETRIED:
            return True
        if state in meaning.FOREIGN_SESSION and (self._statements.prepare or attempt == 0):
            # Behind a pooler that does not know prepared statements; from here on we do without them. What was sent
            # before another operation found that out is worth another attempt too.
            self._statements.prepare = False
            return True
        if state == meaning.STALE_PLAN and self._statements.prepare and attempt == 0:
            self._statements.renew()
            return True
        return False

    def _transact(self, line: PipelinedConnection, transaction: Transaction) -> Generator[Wanted, Any, Any]:
        """One attempt, in as few round trips as the program's batches allow."""
        program, write = transaction.op(), transaction.write
        first = True
        step = _next(program, None)
        while isinstance(step, Batch):
            last = step.last
            # A pipeline is one transaction by itself; it is one snapshot only if it is one statement.
            whole = last and first and (write or len(step.statements) == 1)
            begin = (_BEGIN_WRITE if write else _BEGIN_READ) if first and not whole else None
            line.send(
                step.statements,
                begin=begin,
                end=b"COMMIT" if last and not whole else None,
                decisive=last and write,
            )
            first = False
            yield line
            try:
                step = _next(program, _checked(step, line.take()))
            except Exception:
                yield from _rollback(line)
                raise
            if last:
                return _result(step)
        if not first:
            line.send((), end=b"COMMIT", decisive=write)
            yield line
            line.take()
        return _result(step)

    def _stepwise(self, line: PipelinedConnection, transaction: Transaction, hook: Hook) -> Generator[Wanted, Any, Any]:
        """One attempt with a round trip for each statement, so that a fault can strike at every point.

        What the hook raises leaves the transaction open, and a line with an open one is closed by its pool.
        """
        program, number = transaction.op(), 0
        hook("begin")
        line.send((), begin=_BEGIN_WRITE if transaction.write else _BEGIN_READ)
        yield line
        line.take()
        step = _next(program, None)
        while isinstance(step, Batch):
            answers: list[Rows] = []
            last = step.last
            for statement in step.statements:
                hook(f"statement:{number}")
                number += 1
                line.send((statement,))
                yield line
                answers += line.take()
            step = _next(program, _checked(step, answers))
            if last:
                break
        hook("commit")
        line.send((), end=b"COMMIT", decisive=transaction.write)
        yield line
        line.take()
        hook("committed")
        return _result(step)

    # Connections.

    def _settings(self) -> dict[str, Any]:
        return {"options": self._target.options} if self._startup_options else {}

    def _connect_plain(self) -> Connection:
        return Connection.connect(self._target.conninfo, autocommit=True, **self._settings())

    def _connect(self) -> PipelinedConnection:
        return PipelinedConnection(self._connect_plain(), self._statements)

    async def _aconnect(self) -> PipelinedConnection:
        made = await AsyncConnection.connect(self._target.conninfo, autocommit=True, **self._settings())
        return PipelinedConnection(made, self._statements)

    def _unknown(self, error: ConnectionLost) -> BaseException:
        return meaning.unknown(str(error), self._target)

    def _loop_pool(self) -> LoopPool:
        loop = asyncio.get_running_loop()
        pool = self._loop_pools.get(loop)
        return pool if pool is not None else self._new_loop_pool(loop)

    def _new_loop_pool(self, loop: asyncio.AbstractEventLoop) -> LoopPool:
        pool = LoopPool(loop, self._aconnect, self._unknown, size=self._pool_size, timeout_s=self._timeout_s)
        with self._loop_pools_lock:
            # `asyncio.run` ends a loop without telling anybody; its connections are of no use to the next
            # one.
            for ended in [known for known in self._loop_pools if known.is_closed()]:
                self._loop_pools.pop(ended).close()
            self._loop_pools[loop] = pool
        return pool


def _timed(sink: metrics.Sink, attempt: Generator[Wanted, Any, Any]) -> Generator[Wanted, Any, Any]:
    """An attempt to commit; what failed is not counted."""
    begun_s = time.perf_counter()
    answer = yield from attempt
    sink.record(metrics.COMMIT, time.perf_counter() - begun_s, "postgresql")
    return answer


class _Returned(NamedTuple):
    value: Any


def _checked(batch: Batch, answers: list[Rows]) -> list[Rows]:
    return [
        check_rows(sql, params, rows) if rows and sql.checks else rows
        for (sql, params), rows in zip(batch.statements, answers, strict=True)
    ]


def _matches(counts: Sequence[int | None], changed: Sequence[int]) -> bool:
    return all(count is None or count == found for count, found in zip(counts, changed, strict=True))


def _next(program: Program[Any], answers: list[Rows] | None) -> Batch | _Returned:
    """The program's next batch, or what it returned."""
    try:
        # The first step of a generator takes None.
        return program.send(answers)  # type: ignore[arg-type]
    except StopIteration as stop:
        return _Returned(stop.value)


def _result(step: Batch | _Returned) -> Any:
    if isinstance(step, Batch):
        raise UsageError("a program went on after the batch that it had called its last; that one was committed")
    return step.value


def _rollback(line: PipelinedConnection) -> Generator[Wanted, Any, None]:
    """Keep the connection after a failure, if possible; else its pool closes it, which rolls back too."""
    if line.pending or line.reusable:
        return
    try:
        line.send((), end=b"ROLLBACK")
        yield line
        line.take()
    except (ConnectionLost, psycopg.Error):
        return
