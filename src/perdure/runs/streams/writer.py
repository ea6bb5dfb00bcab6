"""Store what steps emit. `perdure.emit` in a body calls `put`, which only appends to memory; a thread stores it.

The thread writes at most every 50 ms. `run.stream` reads the rows in any process (`engine/following.py`). Nothing here
may hold up or fail a step. Values that cannot be stored are dropped; readers see how many are missing.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from perdure.errors import StoreClosed, UsageError
from perdure.runs.execution.scope import StepCall
from perdure.runs.streams import rows
from perdure.storage.events import event, said
from perdure.storage.program import Driver, Statement, drive
from perdure.threads.context import StoreContext

if TYPE_CHECKING:
    from concurrent.futures import Future

    from perdure.runs.execution.execution import Execution

VALUE_BYTES_MAX = 65_536
STEP_VALUES_MAX = 10_000  # of one attempt; the oldest are dropped
STEP_BYTES_MAX = 1_000_000
_PAUSE_S = 0.05
_GRACE_S = 2.0  # after a step ended, so that readers get its last values
_IDLE_S = 1.0  # how long the thread waits for another value
_PATIENCE_S = 2.0  # how long a step that ended waits until its values are stored
_SWEEP_EVERY_S = 60.0
_log = logging.getLogger("perdure")


class Emitted:
    """What one attempt of a step has emitted. The writer's lock guards it."""

    def __init__(self, call: StepCall) -> None:
        token = call.execution.token
        self.execution: Execution = call.execution
        self.key = rows.AttemptKey(token.tenant, token.run, token.fence, call.path, call.attempt)
        self.name = call.name
        self.is_over = False
        self.waiting: deque[bytes] = deque()  # not stored yet
        self.waiting_bytes = 0
        self.count = 0  # of all values so far
        self.stored: deque[tuple[int, int, int]] = deque()  # rows: number of the last value, values, bytes
        self.stored_count = self.stored_bytes = 0

    def add(self, text: bytes) -> None:
        self.waiting.append(text)
        self.waiting_bytes += len(text)
        self.count += 1
        while len(self.waiting) > STEP_VALUES_MAX or self.waiting_bytes > STEP_BYTES_MAX:
            self.waiting_bytes -= len(self.waiting.popleft())

    def take(self) -> list[Statement]:
        """Return the statements that store the waiting values, and remove the oldest if there are too many."""
        texts, size = list(self.waiting), self.waiting_bytes
        self.waiting.clear()
        self.waiting_bytes = 0
        self.execution.emitted += len(texts)
        upto = self.execution.emitted
        at = self.execution.ctx.clock_us()
        statements = [rows.add(self.key, self.name, upto, self.count - len(texts), at, texts)]
        self.stored.append((upto, len(texts), size))
        self.stored_count += len(texts)
        self.stored_bytes += size
        removed = 0
        while self.stored_count > STEP_VALUES_MAX or self.stored_bytes > STEP_BYTES_MAX:
            removed, count, size = self.stored.popleft()
            self.stored_count -= count
            self.stored_bytes -= size
        return [*statements, rows.remove(self.key, removed)] if removed else statements


class StreamWriter:
    """Stores what the runs of this process emit, for one database. Its thread ends when nothing is left to do."""

    def __init__(self) -> None:
        # No reference to the driver, as in `Runtime`: what is emitted refers to its execution, and that to the driver.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fresh: dict[Emitted, None] = {}  # has values that are not stored; ordered
        self._ending: list[tuple[Emitted, Future[None]]] = []  # its step waits until they are stored
        self._ended: deque[tuple[float, Emitted]] = deque()  # when to remove the rows, the earliest first
        self._is_working = False
        self._is_waiting = False  # the thread waits for the first value, so `put` must wake it
        self._is_failing = False
        self._tenants: set[int] = set()  # whose steps have emitted since the last sweep
        self._swept_at_s = 0.0

    def put(self, call: StepCall, text: bytes) -> None:
        """Pass on a value that the body of a step emits."""
        if len(text) > VALUE_BYTES_MAX:
            raise UsageError(
                f"perdure.emit() in step {call.name!r}: the value has {len(text):,} bytes as text, and at most "
                f"{VALUE_BYTES_MAX:,} are passed on. Return large values from the step"
            )
        with self._lock:
            emitted: Emitted | None = call.emitted
            if emitted is None or emitted.key.attempt != call.attempt:
                emitted = call.emitted = Emitted(call)
                self._tenants.add(emitted.key.tenant)
            if emitted.is_over:
                return  # the body outlived its time
            emitted.add(text)
            self._fresh[emitted] = None
            self._wake()

    def end(self, call: StepCall) -> Future[None]:
        """Return a future that is done when the values of an attempt are stored. Then its step may record its end."""
        from concurrent.futures import Future

        stored: Future[None] = Future()
        emitted: Emitted = call.emitted
        with self._lock:
            if emitted.is_over:
                stored.set_result(None)
                return stored
            emitted.is_over = True
            self._ending.append((emitted, stored))
            self._wake()
            self._changed.notify()
        return stored

    def close(self) -> None:
        """Remove what is stored, because the store is being closed."""
        with self._lock:
            left = list({emitted: None for _, emitted in self._ended} | self._fresh)
            self._fresh.clear()
            self._ended.clear()
            self._changed.notify()
        if left:
            self._store(left[0].execution.ctx.driver, [rows.remove(emitted.key) for emitted in left])

    def _wake(self) -> None:
        if not self._is_working:
            try:
                _thread.start_new_thread(self._work, ())
            except RuntimeError:  # the interpreter is ending
                self._give_up()
                return
            self._is_working = True
        elif self._is_waiting:
            self._changed.notify()

    def _give_up(self) -> None:
        self._fresh.clear()
        for _, stored in self._ending:
            stored.set_result(None)
        self._ending.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._is_waiting = True
                self._changed.wait_for(lambda: self._fresh or self._ending, self._patience_s())
                self._is_waiting = False
                if not self._fresh and not self._ending and not self._ended:
                    self._is_working = False
                    return
                statements, ending, ctx = self._take()
            if statements:
                self._store(ctx.driver, statements)
            for stored in ending:
                stored.set_result(None)
            if time.monotonic() >= self._swept_at_s + _SWEEP_EVERY_S:
                self._swept_at_s = time.monotonic()
                self._sweep(ctx)
            with self._lock:  # a step that ends does not wait for the pause
                self._changed.wait_for(lambda: self._ending, _PAUSE_S)

    def _patience_s(self) -> float:
        """Return how long the thread waits for values: until rows are to be removed, or it ends."""
        return max(0.0, self._ended[0][0] - time.monotonic()) if self._ended else _IDLE_S

    def _take(self) -> tuple[list[Statement], list[Future[None]], StoreContext]:
        """Return the statements that are due, the futures of the steps that wait for them, and the store."""
        some = next(iter(self._fresh), None) or (self._ending[0][0] if self._ending else self._ended[0][1])
        ctx = some.execution.ctx
        statements = [statement for emitted in self._fresh for statement in emitted.take()]
        self._fresh.clear()
        now = time.monotonic()
        while self._ended and self._ended[0][0] <= now:
            statements.append(rows.remove(self._ended.popleft()[1].key))
        ending, self._ending = self._ending, []
        self._ended.extend((now + _GRACE_S, emitted) for emitted, _ in ending)
        return statements, [stored for _, stored in ending], ctx

    def _store(self, driver: Driver, statements: list[Statement]) -> None:
        try:
            driver.run(rows.write(statements))
            self._is_failing = False
        except StoreClosed:
            pass
        except Exception as error:
            if not self._is_failing:
                self._is_failing = True
                fields = event("stream.failed", error=type(error).__name__)
                _log.warning("emitted values are dropped, until they can be stored: %s", said(error), extra=fields)

    def _sweep(self, ctx: StoreContext) -> None:
        with self._lock:
            tenants, self._tenants = self._tenants, set()
        try:
            for tenant in tenants:
                drive(ctx.driver, rows.sweep(tenant, ctx.clock_us()))
        except Exception as error:  # the next round tries again
            fields = event("stream.sweep_failed", error=type(error).__name__)
            _log.debug("emitted values of ended runs were not removed: %s", said(error), extra=fields)


def wait_until_stored(stored: Future[Any]) -> None:
    """Wait until values are stored, but not for long: a step does not depend on its readers."""
    from concurrent.futures import wait

    wait((stored,), _PATIENCE_S)


async def await_stored(stored: Future[Any]) -> None:
    """Async twin of `wait_until_stored`."""
    import asyncio

    await asyncio.wait((asyncio.wrap_future(stored),), timeout=_PATIENCE_S)
