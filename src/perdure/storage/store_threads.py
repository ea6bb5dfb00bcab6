"""The threads of a store, a bounded number: for what blocks, so that asyncio's own executor stays the application's.

They are daemons: a body that cannot be stopped must not keep the process from ending. An idle thread ends by itself.

Ctrl-C may interrupt a caller at the entry of any Python function. `Condition.__exit__` is one, so a caller that enters
the condition itself can leave with its lock held. The lock's own methods are not written in Python.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Driver

T = TypeVar("T")
THREADS_MAX = 128
_IDLE_S = 5.0
_NAME = "perdure-thread"
_own = threading.local()


class StoreThreads:
    """At most `most` threads at once."""

    def __init__(self, _driver: Driver | None = None, *, most: int = THREADS_MAX) -> None:
        self._most = most
        self._count = self._idle = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)

    def try_run(self, work: Callable[[], None]) -> bool:
        """Have a thread do something now. Returns False if all are at work."""
        return self._take(work, waits=False)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread do something as soon as one is free.

        A thread of this store that waits for another one is not held up by the bound: all of them may do that.
        """
        future: Future[T] = Future()
        self._take(partial(_fulfil, future, work), waits=True)
        return future

    async def call(self, work: Callable[[], T]) -> T:
        """`submit`, awaited, with the caller's context variables. Cancelled before a thread took it, it is not done."""
        import asyncio
        from contextvars import copy_context

        return await asyncio.wrap_future(self.submit(partial(copy_context().run, work)))

    def _take(self, work: Callable[[], None], *, waits: bool) -> bool:
        with self._lock:
            if self._idle > len(self._queue):
                self._queue.append(work)
                self._news.notify()
                return True
            is_full = self._count >= self._most and not (waits and getattr(_own, "threads", None) is self)
            if is_full and not waits:
                return False
            self._queue.append(work)
            if is_full:
                return True
            self._count += 1
            try:
                threading.Thread(target=self._run, name=_NAME, daemon=True).start()
            except RuntimeError:  # the system has no more threads
                self._count -= 1
                if self._count and waits:
                    return True
                self._queue.remove(work)
                if waits:
                    raise
                return False
            return True

    def _run(self) -> None:
        _own.threads = self
        while (work := self._next()) is not None:
            work()
            threading.current_thread().name = _NAME

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._queue:
                self._idle += 1
                self._news.wait_for(lambda: bool(self._queue), _IDLE_S)
                self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._count -= 1
            return None


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except StopIteration as error:  # a future of asyncio refuses it, and would never be done
        refused = RuntimeError("a call on a thread raised StopIteration")
        refused.__cause__ = error
        future.set_exception(refused)
    except BaseException as error:
        future.set_exception(error)


_threads = PerDriver(StoreThreads)


def threads_of(driver: Driver) -> StoreThreads:
    """The threads of this process for a store's database."""
    return _threads.of(driver.capabilities.base)
