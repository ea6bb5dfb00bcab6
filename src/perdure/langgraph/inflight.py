"""The order of concurrent stores: a checkpoint is stored after the writes on its parent, or in the same commit.

LangGraph hands pending writes and the next checkpoint to background threads or tasks, in no order. If the checkpoint
were stored first and the process died, the finished tasks would run again (langgraph#8039).

If only one task runs on a checkpoint, the next checkpoint usually follows at once. So the task's writes wait for it for
a moment, to share its commit. With a second task they do not wait: the first must not wait for the others.

The checkpoint of a graph's input has one task, which passes the input to the first nodes and ends at once. The put of
that checkpoint waits a moment for the task's writes and lets them store it. All three then share one commit.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from perdure.adapters import PreparedSave, Write

Key = tuple[str | None, ...]  # "put" or "writes", and the thread, namespace and id of the checkpoint
_OFFER_S = 0.004  # how long writes wait for the checkpoint that follows them
_ENDS_S = 0.002  # how long the put of an input waits for the writes of its task
_COMES_S = 0.05  # how long writes wait for their own checkpoint, if LangGraph has not put it yet
_SEEN_MAX = 4096


class UnderWay:
    """A checkpoint or the writes of a task while they are being stored: until the end of its `with`."""

    __slots__ = (
        "_end", "carried", "carrier", "held", "is_alone", "is_done", "key", "loop", "taken", "waiting", "will_carry",
        "writes",
    )  # fmt: skip

    def __init__(self, key: Key, is_alone: bool, end: Callable[[UnderWay], None]) -> None:
        self.key = key
        self.loop = _running_loop()
        self.is_alone = is_alone  # no other of the same key came before it or runs beside it
        self.is_done = False
        self.writes: Sequence[Write] | None = None  # on offer: the next checkpoint may take them
        self.taken: Answer | None = None  # the result of an offer: False if the owner must store the writes itself
        self.waiting: list[Answer] = []  # those that wait for an offer or the end
        self.will_carry = False  # of writes: they can store their checkpoint too
        self.held: PreparedSave | None = None  # of writes: the checkpoint that they must store
        self.carried: UnderWay | None = None  # of writes: the put of that checkpoint
        self.carrier: UnderWay | None = None  # of a put: the writes that must store its checkpoint
        self._end = end

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.carrier is None:
            self._end(self)
        carried, self.carried, self.held = self.carried, None, None  # no cycle may keep a state until it is collected
        if carried is not None:
            self._end(carried)


class InFlight:
    """All puts and writes that are being stored, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._by_key: dict[Key, list[UnderWay]] = {}
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._expected: dict[Key, Signal] = {}

    def _note(self, key: Key) -> None:
        self._seen[key] = None
        if len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)

    def doing(self, key: Key) -> UnderWay:
        """Return a context manager. Until its end, `wait` and `await_` of the same key wait."""
        with self._lock:
            operation = UnderWay(key, key not in self._seen, self._end)
            self._note(key)
            others = self._by_key.setdefault(key, [])
            withdrawn = [other for other in others if self._withdraw(other)]
            for other in others:
                other.is_alone = False
            others.append(operation)
        for other in withdrawn:
            if other.taken is not None:
                other.taken.set_result(False)
        return operation

    def _end(self, operation: UnderWay) -> None:
        with self._lock:
            operation.writes, operation.is_done = None, True
            of_key = self._by_key[operation.key]
            of_key.remove(operation)
            if not of_key:
                del self._by_key[operation.key]
        for waiting in operation.waiting:
            waiting.set_result(True)

    def wait(
        self, key: Key, taking: Taking | None = None, *, task_s: float | None = None, by: UnderWay | None = None
    ) -> None:
        """Wait for all puts or writes of a key, blocking, or take the writes that are on offer.

        On the thread of an event loop it does not wait for tasks: those of this loop could never finish, and those of
        another loop may wait for a task of this one. On other threads it waits at most `task_s` for each task, because
        the loop may be blocked until the caller returns. It does not wait for a put whose checkpoint `by` must store.
        """
        for operation in self._others(key):
            while (pending := self._pending(operation, taking, by, Signal)) is not None:
                try:
                    pending.result(None if operation.loop is None else task_s)
                except TimeoutError:
                    break

    async def await_(self, key: Key, taking: Taking | None = None) -> None:
        for operation in self._all(key):
            while (pending := self._pending(operation, taking, None, _future)) is not None:
                await asyncio.wrap_future(pending)

    # --- a checkpoint that is stored with the writes on it

    def offer_to_carry(self, operation: UnderWay) -> None:
        """Mark the writes of a task that has ended as able to store their checkpoint too."""
        with self._lock:
            operation.will_carry = operation.loop is None
            expected = self._expected.pop(operation.key, None)
        if expected is not None:
            expected.set_result(True)

    def expect_carrier(self, key: Key) -> UnderWay | None:
        """Return the writes of this key that can store their checkpoint, after a short wait, or None."""
        with self._lock:
            carrier = self._carrier(key)
            if carrier is None:
                expected = self._expected[key] = Signal()
        if carrier is not None:
            return carrier
        with suppress(TimeoutError):
            expected.result(_ENDS_S)
        with self._lock:
            self._expected.pop(key, None)
            return self._carrier(key)

    def hand_over(self, put: UnderWay, carrier: UnderWay, held: PreparedSave) -> bool:
        """Let writes store the checkpoint of this put. Return False if the writes are being stored already."""
        with self._lock:
            if not carrier.will_carry:
                return False
            carrier.held, carrier.carried, put.carrier = held, put, carrier
            waiting, put.waiting = put.waiting, []
        for one in waiting:
            one.set_result(True)
        return True

    def take_over(self, operation: UnderWay) -> PreparedSave | None:
        """Return the checkpoint that must be stored before these writes, or None. They accept none after this call."""
        with self._lock:
            operation.will_carry = False
            return operation.held

    def _carrier(self, key: Key) -> UnderWay | None:
        of_key = self._by_key.get(key, ())
        return next((operation for operation in of_key if operation.is_alone and operation.will_carry), None)

    # --- writes that share the commit of the checkpoint that follows

    def offer(self, operation: UnderWay, writes: Sequence[Write], on: Key) -> bool:
        """Offer writes to the next checkpoint until a moment after the put of their own (`on`).

        Return True if they were taken and stored. It makes no offer if that would block an event loop.
        """
        if operation.loop is not None or (taken := self._offer(operation, writes, Signal)) is None:
            return False
        began_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                return taken.result(_OFFER_S)
            if self._is_over(on, began_s):
                return not self._withdrawn(operation) and taken.result()

    async def aoffer(self, operation: UnderWay, writes: Sequence[Write], on: Key) -> bool:
        """`offer`, awaited."""
        if (offered := self._offer(operation, writes, _future)) is None:
            return False
        taken, began_s = asyncio.wrap_future(offered), time.monotonic()
        while not (await asyncio.wait([taken], timeout=_OFFER_S))[0]:
            if self._is_over(on, began_s):
                return not self._withdrawn(operation) and await taken
        return await taken

    def note_stored(self, key: Key) -> None:
        """Record that a checkpoint is in the store, so that no put of it is expected."""
        with self._lock:
            self._note(key)

    def _offer(self, operation: UnderWay, writes: Sequence[Write], new: Callable[[], A]) -> A | None:
        """Offer writes. Return a future of whether they were taken and stored, or None if they cannot be offered."""
        with self._lock:
            if not operation.is_alone:
                return None
            taken = new()
            operation.writes, operation.taken = writes, taken
            waiting, operation.waiting = operation.waiting, []
        for one in waiting:
            one.set_result(True)
        return taken

    def _is_over(self, on: Key, began_s: float) -> bool:
        """Return whether an offer must end: the writes' own checkpoint is stored, or does not come.

        Before that checkpoint is stored, the writes cannot be attached to it.
        """
        with self._lock:
            comes = on not in self._seen and time.monotonic() - began_s < _COMES_S
            return not (comes or any(put.carrier is None for put in self._by_key.get(on, ())))

    def _withdrawn(self, operation: UnderWay) -> bool:
        with self._lock:
            return self._withdraw(operation)

    @staticmethod
    def _withdraw(operation: UnderWay) -> bool:
        """End an offer, and return whether there was one. The caller holds the lock."""
        was_there, operation.writes = operation.writes is not None, None
        return was_there

    def _pending(
        self, operation: UnderWay, taking: Taking | None, by: UnderWay | None, new: Callable[[], A]
    ) -> A | None:
        """Return a future to wait for before the next look, or None if this is stored or was taken."""
        with self._lock:
            if operation.is_done or (by is not None and operation.carrier is by):
                return None
            if taking is not None and operation.writes is not None:
                taking.add(operation, operation.writes)
                operation.writes, operation.will_carry = None, False
                return None
            pending = new()
            operation.waiting.append(pending)
            return pending

    def _others(self, key: Key) -> list[UnderWay]:
        operations = self._all(key)
        if not operations or os.getpid() != self._pid:
            return []  # after a fork these are the parent process's; the store raises for that itself
        here = _running_loop()
        return [operation for operation in operations if operation.loop is None or here is None]

    def _all(self, key: Key) -> list[UnderWay]:
        with self._lock:
            return list(self._by_key.get(key, ()))


class Taking:
    """Writes that `wait` or `await_` has taken. The end of its `with` tells their owners whether they were stored."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.held: PreparedSave | None = None  # their own checkpoint, if it must be stored too
        self._owners: list[UnderWay] = []

    def add(self, owner: UnderWay, writes: Sequence[Write]) -> None:
        self.writes += writes
        self.held = self.held or owner.held
        self._owners.append(owner)

    def __enter__(self) -> Taking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for owner in self._owners:
            if owner.taken is not None:
                owner.taken.set_result(kind is None)


class Signal:
    """A future for one waiting thread, made of one lock. It is cheaper than `Future`, which makes a lock per wait."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._value = False

    def set_result(self, value: bool) -> None:
        self._value = value
        self._lock.release()

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the result and return it. Raises TimeoutError."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        self._lock.release()  # `result` may be called again
        return self._value


Answer = Signal | Future[bool]
A = TypeVar("A", Signal, Future[bool])


def _future() -> Future[bool]:
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()  # the cancellation of a waiter must not cancel it
    return future


def _running_loop() -> asyncio.AbstractEventLoop | None:
    return asyncio._get_running_loop()  # unlike the public function, it returns None without raising
