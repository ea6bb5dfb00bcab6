"""Writes of concurrent tasks in one exchange, as the commit queue does for SQLite.

While an exchange is under way, writes of other tasks gather, and the next exchange sends them as one transaction. If
one fails, all are rolled back and run again one by one. Writes are sent in the order of the rows that they lock, so two
exchanges cannot deadlock. Threads of the driver do the exchanges, never the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import psycopg

from perdure.errors import StoreClosed
from perdure.storage import metrics
from perdure.storage.postgres.connection import ConnectionLost, PipelinedConnection
from perdure.storage.postgres.pool import ConnectionPool
from perdure.storage.program import Statement
from perdure.storage.settling import until_done

T = TypeVar("T")
_EXCHANGES_MAX = 1  # more compete for the interpreter's lock: as measured, each one makes all slower
_LATE_S = 0.02  # an exchange that takes longer may wait for a row lock: another one is started beside it
_WRITES_MAX = 64


class Again(Exception):
    """Writes failed together, and nothing was written. Each must run alone."""


@dataclass(slots=True, eq=False)
class _Write:
    statements: Sequence[Statement]
    wants_rows: bool
    future: asyncio.Future[list[Any]]
    sent: bool = False
    dropped: bool = False  # its task was cancelled before it was sent
    ended: bool = False
    answer: list[Any] = field(default_factory=list)
    error: BaseException | None = None


class GroupCommit:
    """Gathers the writes of all event loops, and has threads that work for tasks."""

    def __init__(self, pool: ConnectionPool, threads: int, unknown: Callable[[str], BaseException]) -> None:
        self._pool = pool
        self._unknown = unknown
        self._threads = ThreadPoolExecutor(threads, "perdure-postgres")
        self._lock = Lock()
        self._waiting: deque[_Write] = deque()
        self._alone = 0
        self._exchanges: dict[object, float] = {}  # when each began to wait for the server

    @property
    def idle(self) -> bool:
        return not self._alone and not self._exchanges and not self._waiting

    async def alone(self, work: Callable[[], T], *, write: bool) -> T:
        """Call `work` on a thread by itself. Writes that come meanwhile gather."""
        with self._lock:
            self._alone += write
        try:
            working = self._submit(work)
            try:
                return await asyncio.wrap_future(working)
            except asyncio.CancelledError:
                if write and not working.cancel():
                    await until_done(asyncio.wrap_future(working))
                raise
        finally:
            with self._lock:
                self._alone -= write

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(work)
        except RuntimeError as error:  # another task has just shut the executor down
            raise StoreClosed("the store was closed") from error

    async def write(self, statements: Sequence[Statement], *, wants_rows: bool) -> list[Any]:
        """Commit statements, and return the rows of each or how many it changed. Raises Again if it must run alone."""
        write = _Write(statements, wants_rows, asyncio.get_running_loop().create_future())
        with self._lock:
            self._waiting.append(write)
        self._start(write)
        try:
            return await write.future
        except asyncio.CancelledError:
            with self._lock:
                write.dropped = not write.sent
            if not write.dropped and not write.ended:
                write.future = asyncio.get_running_loop().create_future()
                await until_done(write.future)
            raise

    def _start(self, write: _Write) -> None:
        """Start an exchange for a write, at once or when those under way are late."""
        exchange, now = object(), time.monotonic()
        with self._lock:
            if write.sent or write.dropped:
                return
            starts = sum(since > now - _LATE_S for since in self._exchanges.values()) < _EXCHANGES_MAX
            if starts:
                self._exchanges[exchange] = now
        if starts:
            self._submit(partial(self._run, exchange))
        else:
            write.future.get_loop().call_later(_LATE_S, self._start, write)

    def _run(self, exchange: object) -> None:
        """Send the waiting writes until none is left."""
        while writes := self._take(exchange):
            try:
                with self._pool.connection() as line:
                    self._exchange(line, writes)
            except Exception:  # no connection: each tries alone, and gets the error
                for write in writes:
                    write.error = write.error or Again()
            for loop in {write.future.get_loop() for write in writes}:
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(_resolve, [write for write in writes if write.future.get_loop() is loop])

    def _take(self, exchange: object) -> list[_Write]:
        writes: list[_Write] = []
        with self._lock:
            while self._waiting and len(writes) < _WRITES_MAX:
                write = self._waiting.popleft()
                if not write.dropped:
                    write.sent = True
                    writes.append(write)
            if writes:
                self._exchanges[exchange] = time.monotonic()
            else:
                del self._exchanges[exchange]
        writes.sort(key=_locked_row)
        return writes

    def _exchange(self, line: PipelinedConnection, writes: list[_Write]) -> None:
        began_s = time.monotonic()
        try:
            results = line.exchange([each for write in writes for each in write.statements], decisive=True)
        except ConnectionLost as error:
            for write in writes:
                write.error = self._unknown(str(error))
            return
        except psycopg.Error:
            for write in writes:
                write.error = Again()
            return
        if (sink := metrics.sink) is not None:
            sink.record(metrics.COMMIT, time.monotonic() - began_s, "postgresql")
            sink.record(metrics.COMMIT_JOBS, len(writes), "postgresql")
        at = iter(results)
        for write in writes:
            own = [next(at) for _ in write.statements]
            write.answer = [line.rows(result) if write.wants_rows else result.command_tuples or 0 for result in own]


def _resolve(writes: list[_Write]) -> None:
    for write in writes:
        write.ended = True
        if write.future.done():
            continue  # its task, on this loop, has just been cancelled
        if write.error is not None:
            write.future.set_exception(write.error)
        else:
            write.future.set_result(write.answer)


def _locked_row(write: _Write) -> tuple[int, int]:
    params = write.statements[0].params if write.statements else {}
    tenant, row = params.get("tenant"), params.get("thread") or params.get("run")
    return tenant if isinstance(tenant, int) else 0, row if isinstance(row, int) else 0
