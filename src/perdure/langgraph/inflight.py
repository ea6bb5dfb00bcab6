"""What is being stored right now: a checkpoint that supersedes writes waits until those are stored.

LangGraph hands pending writes and the next checkpoint to background threads or tasks, in no order. If the checkpoint
were stored first and the process died, the finished tasks would run again (langgraph#8039).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

Key = tuple[str | None, ...]  # what is under way, and the thread, namespace and id of the checkpoint


class _Doing:
    """Something under way: on which event loop, and what others wait for, made when the first of them does."""

    __slots__ = ("_done", "loop")

    def __init__(self) -> None:
        self.loop = _running_loop()
        self._done: Future[None] | None = None

    def done(self) -> Future[None]:
        if self._done is None:
            self._done = Future()
            self._done.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it
        return self._done

    def end(self) -> None:
        if self._done is not None:
            self._done.set_result(None)


class InFlight:
    """What is under way, by what it concerns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._by_key: dict[Key, list[_Doing]] = {}

    @contextmanager
    def doing(self, key: Key) -> Iterator[None]:
        """While this is open, `wait` and `await_` of the same key wait."""
        one = _Doing()
        with self._lock:
            self._by_key.setdefault(key, []).append(one)
        try:
            yield
        finally:
            with self._lock:
                of_key = self._by_key[key]
                of_key.remove(one)
                if not of_key:
                    del self._by_key[key]
            one.end()  # none begins to wait for it any more

    def wait(self, key: Key) -> None:
        """Blocking. On an event loop's thread it does not wait for tasks: those of this loop could never finish, and
        those of another may be waiting for one of this."""
        if os.getpid() != self._pid:
            return  # forked: what was under way is the parent's, and the store will say so
        here = _running_loop()
        with self._lock:
            waiting = [one.done() for one in self._by_key.get(key, ()) if one.loop is None or here is None]
        if waiting:
            wait(waiting)

    async def await_(self, key: Key) -> None:
        with self._lock:
            waiting = [one.done() for one in self._by_key.get(key, ())]
        for done in waiting:
            await asyncio.wrap_future(done)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
