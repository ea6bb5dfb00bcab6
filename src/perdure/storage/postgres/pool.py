"""Pools of connections: one for blocking callers, one for each event loop.

psycopg's pools keep worker threads, or tasks that belong to one loop and complain when it ends. Here a pool
is a list of idle lines and a count of permits. Connections are made when they are needed and checked, without
a round trip, when they are taken: an idle line has nothing to read, so one that is readable was closed by the
server (or is about to be) and is replaced. That is what keeps a restarted server from turning the next write
of each connection into an unknown outcome.

Must never happen here: a connection used by two callers, or touched by a forked child.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable

from perdure.errors import Busy, StoreClosed
from perdure.storage import metrics
from perdure.storage.postgres.connection import ConnectionLost, PipelinedConnection, ServerTimeout
from perdure.storage.postgres.gather import Gatherer

# On top of the server's own timeouts, which answer first unless the server or the network hangs.
GRACE_S = 5.0


def quiet(line: PipelinedConnection) -> bool:
    """Whether an idle line can be used: connected, and nothing to read."""
    poll = select.poll()
    poll.register(line.fileno, select.POLLIN)
    return not poll.poll(0)


def patience_s(line: PipelinedConnection, timeout_s: float) -> float:
    """How long to wait for an answer. The server's timeout counts per statement."""
    return timeout_s * max(1, line.statements_sent) + GRACE_S


def wait(line: PipelinedConnection, timeout_s: float) -> None:
    """Block until the exchange under way is answered."""
    deadline = time.monotonic() + patience_s(line, timeout_s)
    poll = select.poll()
    writing = line.flush()
    poll.register(line.fileno, select.POLLIN | (select.POLLOUT if writing else 0))
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ServerTimeout(f"no answer within {patience_s(line, timeout_s):g} s")
        events = poll.poll(left_s * 1000)
        if writing:
            writing = line.flush()
            if not writing:
                poll.modify(line.fileno, select.POLLIN)
        if any(event & ~select.POLLOUT for _, event in events) and line.receive():
            return


class BlockingPool:
    """Lines for blocking callers of any thread."""

    def __init__(self, connect: Callable[[], PipelinedConnection], *, size: int, timeout_s: float) -> None:
        self._connect = connect
        self._idle: deque[PipelinedConnection] = deque()
        self._permits = threading.Semaphore(size)
        self._size = size
        self._timeout_s = timeout_s
        self.closed = False

    def acquire(self) -> PipelinedConnection:
        if not self._permits.acquire(blocking=False):
            self._wait_for_permit()
        try:
            while True:
                if self.closed:
                    raise StoreClosed("the store was closed")
                try:
                    line = self._idle.pop()
                except IndexError:
                    return self._connect()
                if quiet(line):
                    return line
                line.close()
        except BaseException:
            self._permits.release()
            raise

    def _wait_for_permit(self) -> None:
        begun_s = time.monotonic()
        if not self._permits.acquire(timeout=self._timeout_s):
            raise _exhausted(self._size, self._timeout_s)
        if (sink := metrics.sink) is not None:
            sink.record(metrics.LOCK_WAIT, time.monotonic() - begun_s, "postgresql", "pool")

    def add(self, line: PipelinedConnection) -> None:
        """A line that was made elsewhere; whoever comes first uses it."""
        self._idle.append(line)

    def release(self, line: PipelinedConnection) -> None:
        if line.reusable and not self.closed:
            self._idle.append(line)
        else:
            line.close()
        self._permits.release()

    def close(self) -> None:
        self.closed = True
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return


class LoopConnection:
    """A line and its event loop: the loop calls `readable` when something arrived."""

    __slots__ = ("future", "line", "writing")

    def __init__(self, line: PipelinedConnection, loop: asyncio.AbstractEventLoop) -> None:
        self.line = line
        self.future: asyncio.Future[None] | None = None
        self.writing = False
        # Registered once for the connection's life: registering for each answer costs two system calls per
        # save.
        loop.add_reader(line.fileno, self.readable, weakref.ref(loop))

    def readable(self, loop_ref: weakref.ref[asyncio.AbstractEventLoop]) -> None:
        future = self.future
        if future is None or future.done():
            # Nobody waits: the server hangs up. The pool finds the line readable and replaces it.
            loop = loop_ref()
            if loop is not None:
                loop.remove_reader(self.line.fileno)
            return
        try:
            if self.line.receive():
                future.set_result(None)
        except ConnectionLost as error:
            future.set_exception(error)

    def writable(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if self.line.flush():
                return
        except ConnectionLost as error:
            if self.future is not None and not self.future.done():
                self.future.set_exception(error)
        loop.remove_writer(self.line.fileno)
        self.writing = False

    async def wait(self, timeout_s: float) -> None:
        """Wait until the exchange under way is answered."""
        loop = asyncio.get_running_loop()
        line = self.line
        self.future = future = loop.create_future()
        if line.flush():
            loop.add_writer(line.fileno, self.writable, loop)
            self.writing = True
        timer = loop.call_later(patience_s(line, timeout_s), _give_up, future)
        try:
            await future
        finally:
            timer.cancel()
            self.future = None

    def close(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.line.fileno)
            if self.writing:
                loop.remove_writer(self.line.fileno)
        self.line.close()


class LoopPool:
    """Lines for one event loop, known weakly: a loop that ended can go, and its lines with it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connect: Callable[[], Awaitable[PipelinedConnection]],
        unknown: Callable[[ConnectionLost], BaseException],
        *,
        size: int,
        timeout_s: float,
    ) -> None:
        self.gatherer = Gatherer(self, timeout_s, unknown)
        self._loop = weakref.ref(loop)
        self._connect = connect
        self._idle: list[LoopConnection] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._permits = size
        self._size = size
        self._timeout_s = timeout_s
        self.closed = False

    def acquire_now(self) -> LoopConnection | None:
        """An idle line, if there is one and nobody waits for it."""
        while self._idle and self._permits and not self._waiting and not self.closed:
            line = self._idle.pop()
            if quiet(line.line):
                self._permits -= 1
                return line
            line.close(self._loop())
        return None

    async def acquire(self) -> LoopConnection:
        await self._permit()
        try:
            while True:
                if self.closed:
                    raise StoreClosed("the store was closed")
                if not self._idle:
                    return LoopConnection(await self._connect(), asyncio.get_running_loop())
                line = self._idle.pop()
                if quiet(line.line):
                    return line
                line.close(self._loop())
        except BaseException:
            self._free()
            raise

    async def _permit(self) -> None:
        if self._permits and not self._waiting:
            self._permits -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        timer = loop.call_later(self._timeout_s, _give_up, turn)
        begun_s = time.monotonic()
        try:
            await turn
            if (sink := metrics.sink) is not None:
                sink.record(metrics.LOCK_WAIT, time.monotonic() - begun_s, "postgresql", "pool")
        except ServerTimeout:
            raise _exhausted(self._size, self._timeout_s) from None
        except asyncio.CancelledError:
            # Cancelled just after its turn came: the next one must not wait for ever.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free()
            raise
        finally:
            timer.cancel()

    def _free(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done() and not turn.get_loop().is_closed():
                turn.set_result(None)
                return
        self._permits += 1

    def release(self, line: LoopConnection) -> None:
        if line.line.reusable and not self.closed:
            self._idle.append(line)
        else:
            line.close(self._loop())
        self._free()

    def close(self) -> None:
        """On the loop's own thread, or when the loop no longer runs."""
        self.closed = True
        while self._idle:
            self._idle.pop().close(self._loop())

    def close_from_anywhere(self) -> None:
        loop = self._loop()
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if loop is None or loop is running or not loop.is_running():
            self.close()
            return
        self.closed = True
        try:
            loop.call_soon_threadsafe(self.close)
        except RuntimeError:  # it ended just now
            self.close()


def _give_up(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(ServerTimeout("no answer in time"))


def _exhausted(size: int, timeout_s: float) -> Busy:
    if (sink := metrics.sink) is not None:
        sink.record(metrics.LOCK_TIMEOUTS, 1, "postgresql")
    return Busy(
        f"all {size} connections of the pool were in use for {timeout_s:g} s; nothing was written. "
        "Open the store with a larger pool_size, or use fewer callers at once."
    )
