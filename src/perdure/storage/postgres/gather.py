"""Writes of concurrent tasks in one exchange: what the commit queue is for SQLite.

A write whose statements are known at once (an append, a program of one batch) is one transaction in one exchange. While
one is under way, those of other tasks gather, and the next exchange sends them together: one transaction, one commit,
one answer, which costs server and client a fraction of as many. Each learns from its own results what it did, as if it
were alone. If one of them fails, all are rolled back and each is done again by itself, so that the error reaches the
task that caused it.

Writes are sent in the order of the rows that they lock, so that two exchanges cannot wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from perdure.storage import metrics
from perdure.storage.postgres.connection import ConnectionLost
from perdure.storage.program import Rows, Statement

if TYPE_CHECKING:
    from perdure.storage.postgres.pool import LoopConnection, LoopPool

_EXCHANGES_MAX = 2  # one is answered while the next is prepared
_LATE_S = 0.02  # an exchange that takes longer may wait for a row lock: the others do not wait for it
_WRITES_MAX = 64


class Again(Exception):
    """Writes failed together: do each alone. Nothing was written."""


class _Write:
    __slots__ = ("future", "statements", "wants_rows")

    def __init__(self, statements: Sequence[Statement], wants_rows: bool, future: asyncio.Future[list[Any]]) -> None:
        self.statements = statements
        self.wants_rows = wants_rows
        self.future = future

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Gatherer:
    """The writes of one event loop."""

    def __init__(self, pool: LoopPool, timeout_s: float, unknown: Callable[[ConnectionLost], BaseException]) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._unknown = unknown
        self._waiting: deque[_Write] = deque()
        self._alone = 0
        self._exchanges: dict[asyncio.Task[None], float] = {}  # since when each waits for the server

    @property
    def idle(self) -> bool:
        return not self._alone and not self._exchanges and not self._waiting

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One write outside of the gatherer; those that come meanwhile gather."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    async def append(self, statements: Sequence[Statement]) -> list[int]:
        """How many rows each statement has changed, committed. Raises Again if it must be done alone."""
        return await self._write(statements, wants_rows=False)

    async def run(self, statements: Sequence[Statement]) -> list[Rows]:
        """The rows of each statement, committed. Raises Again if it must be done alone."""
        return await self._write(statements, wants_rows=True)

    async def _write(self, statements: Sequence[Statement], *, wants_rows: bool) -> list[Any]:
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(statements, wants_rows, future))
        late = time.monotonic() - _LATE_S
        if sum(since > late for since in self._exchanges.values()) < _EXCHANGES_MAX:
            task = asyncio.get_running_loop().create_task(self._run())
            self._exchanges[task] = time.monotonic()
            task.add_done_callback(self._exchanges.pop)
        return await future

    async def _run(self) -> None:
        held: LoopConnection | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            while self._waiting:
                if held is None:
                    held = self._pool.acquire_now() or await self._pool.acquire()
                writes = self._take()
                self._exchanges[task] = time.monotonic()
                if writes and not await self._exchange(held, writes):
                    self._pool.release(held)
                    held = None
        except BaseException as error:  # no connection: each tries alone, and gets the error
            while self._waiting:
                self._waiting.popleft().fail(Again())
            if not isinstance(error, Exception):
                raise
        finally:
            if held is not None:
                self._pool.release(held)

    def _take(self) -> list[_Write]:
        writes: list[_Write] = []
        while self._waiting and len(writes) < _WRITES_MAX:
            write = self._waiting.popleft()
            if not write.future.done():  # else its task was cancelled
                writes.append(write)
        writes.sort(key=_locked_row)
        return writes

    async def _exchange(self, held: LoopConnection, writes: list[_Write]) -> bool:
        """Send writes and answer them. False: the connection must not be used again."""
        line = held.line
        began_s = time.monotonic()
        try:
            line.send([statement for write in writes for statement in write.statements], decisive=True)
            await held.wait(self._timeout_s)
            results = line.take_results()
        except ConnectionLost as error:
            for write in writes:
                write.fail(self._unknown(error))
            return False
        except psycopg.Error:
            for write in writes:
                write.fail(Again())
            return line.reusable
        except BaseException:
            for write in writes:
                write.fail(Again())
            raise
        if (sink := metrics.sink) is not None:
            sink.record(metrics.COMMIT, time.monotonic() - began_s, "postgresql")
        at = 0
        for write in writes:
            end = at + len(write.statements)
            if not write.future.done():
                own = results[at:end]
                write.future.set_result(
                    [line.rows(result) for result in own]
                    if write.wants_rows
                    else [result.command_tuples or 0 for result in own]
                )
            at = end
        return True


def _locked_row(write: _Write) -> tuple[int, int]:
    params = write.statements[0].params if write.statements else {}
    tenant, row = params.get("tenant"), params.get("thread") or params.get("run")
    return tenant if isinstance(tenant, int) else 0, row if isinstance(row, int) else 0
