"""The threads (for sync functions) and the event loop (for async ones) on which a worker executes its runs.

No exception of a run's code, not even SystemExit, ends the thread, the loop or the worker. All threads are daemons: a
body that cannot be stopped must not keep the process from ending.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from perdure.runs.engine.local import RunExecution
from perdure.storage.events import event, where

if TYPE_CHECKING:
    import asyncio

Ended = Callable[[RunExecution, str, BaseException | None], None]
_JOIN_S = 2.0
_log = logging.getLogger("perdure")


class WorkerPool:
    """Executes jobs, and calls `ended` with the outcome of each."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def start(self, job: RunExecution) -> None:
        if not job.spec.is_async:
            self.call(partial(self._run, job))
            return
        import asyncio

        asyncio.run_coroutine_threadsafe(self._arun(job), self._running_loop())

    def call(self, work: Callable[[], None]) -> None:
        """Call `work` on an idle thread, or on a new one."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._thread, name="perdure-worker", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(work)

    def await_(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the event loop, and wait for its end on this thread."""
        import asyncio

        asyncio.run_coroutine_threadsafe(work, self._running_loop()).result()

    def close(self) -> None:
        """End the idle threads now, and the others when their work is done. Stop the loop."""
        for _ in self._threads:
            self._calls.put(None)
        if self._loop is not None and self._loop_thread is not None:
            loop = self._loop
            loop.call_soon_threadsafe(lambda: loop.create_task(_stop(loop)))
            self._loop_thread.join(_JOIN_S)

    def _thread(self) -> None:
        while (work := self._calls.get()) is not None:
            try:
                work()
            except BaseException as error:
                kind, at = type(error).__name__, where(error)
                fields = event("worker.bug", error=kind, where=at)
                _log.error("a bug in Perdure stopped a job of this worker: %s at %s", kind, at, extra=fields)
            with self._lock:
                self._idle += 1

    def _run(self, job: RunExecution) -> None:
        error: BaseException | None
        try:
            status, error = job.run(), None
        except BaseException as raised:
            status, error = "lost", raised
        self._ended(job, status, error)

    async def _arun(self, job: RunExecution) -> None:
        error: BaseException | None
        try:
            status, error = await job.arun(), None
        except BaseException as raised:
            status, error = "lost", raised
        self._ended(job, status, error)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(
                target=_turn, args=(self._loop,), name="perdure-worker-loop", daemon=True
            )
            self._loop_thread.start()
        return self._loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except (SystemExit, KeyboardInterrupt):
            # asyncio raises these out of the loop. They concern one run, and its job catches them too.
            fields = event("run.tried_to_exit")
            _log.error("the code of a run tried to end the process; only the run was ended", extra=fields)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _stop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the remaining tasks and stop the loop. Their runs were already released."""
    import asyncio

    left = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_JOIN_S / 2)
    loop.stop()
