"""The connections of a store, made on demand and shared by all threads and event loops of the process.

A connection is checked without a round trip before it is used: if an idle one is readable, the server has closed it,
and another one is made. So the first write after a restart of the server has a known outcome. No two callers use one
connection at once, and a forked child uses none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from perdure.errors import Busy, StoreClosed
from perdure.storage import metrics
from perdure.storage.postgres.connection import PipelinedConnection


class ConnectionPool:
    def __init__(self, connect: Callable[[], PipelinedConnection], *, size: int, timeout_s: float) -> None:
        self._connect = connect
        self._idle: deque[PipelinedConnection] = deque()
        # Not a semaphore: Ctrl-C at the entry of one of its methods, which are Python, can leave its lock held.
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(size):
            self._permits.put(None)
        self._size = size
        self._timeout_s = timeout_s
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[PipelinedConnection]:
        """Lend a connection to the block. It is closed if the block leaves it in the middle of an exchange."""
        try:
            self._permits.get_nowait()
        except Empty:
            self._wait_for_permit()
        try:
            idle = self._take()
            try:
                yield idle
            finally:
                self.add(idle)
        finally:
            self._permits.put(None)

    def add(self, connection: PipelinedConnection) -> None:
        """Keep a connection for the next caller, or close it if it cannot be used again."""
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def _take(self) -> PipelinedConnection:
        while True:
            if self._closed:
                raise StoreClosed("the store was closed")
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect()
            if connection.is_quiet:
                return connection
            connection.close()

    def _wait_for_permit(self) -> None:
        sink, began_s = metrics.sink, time.monotonic()
        try:
            self._permits.get(timeout=self._timeout_s)
        except Empty:
            if sink is not None:
                sink.record(metrics.LOCK_TIMEOUTS, 1, "postgresql")
            raise Busy(
                f"all {self._size} connections of the pool were in use for {self._timeout_s:g} s; nothing was written. "
                "Open the store with a larger pool_size, or use fewer callers at once."
            ) from None
        if sink is not None:
            sink.record(metrics.LOCK_WAIT, time.monotonic() - began_s, "postgresql", "pool")
