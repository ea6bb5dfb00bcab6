"""A bounded pool of threads per store, for blocking calls. asyncio's default executor is left to the application.

The threads are daemons: a body that cannot be stopped must not keep the process from exiting. Always enter the lock,
never the condition: Ctrl-C may interrupt a caller at the entry of any Python function, and `Condition.__exit__` is one.
The lock's own methods are written in C.
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
    """A pool of at most `most` threads."""

    def __init__(self, _driver: Driver | None = None, *, most: int = THREADS_MAX) -> None:
        self._most = most
        self._count = self._idle = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)

    def try_run(self, work: Callable[[], None]) -> bool:
        """Run `work` on a thread now. Return False if all threads are busy."""
        return self._take(work, waits=False)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` as soon as a thread is free.

        The bound does not apply to calls from this pool's own threads. If all of them wait for each other's work,
        a bound would be a deadlock.
        """
        future: Future[T] = Future()
        self._take(partial(_fulfil, future, work), waits=True)
        return future

    async def call(self, work: Callable[[], T]) -> T:
        """Await `submit`, with the caller's context variables. Work that no thread has begun can be cancelled."""
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
    except StopIteration as error:  # asyncio's futures refuse it, and would never be done
        refused = RuntimeError("a call on a thread raised StopIteration")
        refused.__cause__ = error
        future.set_exception(refused)
    except BaseException as error:
        future.set_exception(error)


_threads = PerDriver(StoreThreads)


def threads_of(driver: Driver) -> StoreThreads:
    """Return this process's thread pool for a driver's database."""
    return _threads.of(driver.capabilities.base)
