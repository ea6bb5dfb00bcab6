"""What is being stored right now: a checkpoint that supersedes writes is stored after them, or with them.

LangGraph hands pending writes and the next checkpoint to background threads or tasks, in no order. If the checkpoint
were stored first and the process died, the finished tasks would run again (langgraph#8039).

Where one task is all that ran on a checkpoint, the next checkpoint mostly follows at once. So its writes are offered to
that for a moment, and share its commit. With a second task there is no offer: the first must not wait for the others.

A graph's input is a checkpoint whose only task, which hands the input to the first nodes, ends at once. Its put waits a
moment for the writes of that task, and leaves storing the checkpoint to them: all three then share one commit.
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

Key = tuple[str | None, ...]  # what is under way, and the thread, namespace and id of the checkpoint
_OFFER_S = 0.004  # how long writes wait for the checkpoint that follows them
_ENDS_S = 0.002  # how long the put of an input waits for the writes of its task
_COMES_S = 0.05  # how long for their own checkpoint, where LangGraph has not put it yet
_SEEN_MAX = 4096


class UnderWay:
    """Something that is being stored, until the end of its `with`."""

    __slots__ = (
        "_end", "carried", "carrier", "held", "is_alone", "is_done", "key", "loop", "taken", "waiting", "will_carry",
        "writes",
    )  # fmt: skip

    def __init__(self, key: Key, is_alone: bool, end: Callable[[UnderWay], None]) -> None:
        self.key = key
        self.loop = _running_loop()
        self.is_alone = is_alone  # none of the same key came before or with it
        self.is_done = False
        self.writes: Sequence[Write] | None = None  # that can be taken now
        self.taken: Answer | None = None  # of an offer: whether it was taken and stored; else the owner stores it
        self.waiting: list[Answer] = []  # for an offer, or the end
        self.will_carry = False  # writes that can share a commit: they would store their checkpoint too
        self.held: PreparedSave | None = None  # their checkpoint, which they have to store
        self.carried: UnderWay | None = None  # its put
        self.carrier: UnderWay | None = None  # of a put: the writes that have to store its checkpoint
        self._end = end

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.carrier is None:
            self._end(self)
        if self.carried is not None:
            self._end(self.carried)


class InFlight:
    """What is under way, by what it concerns."""

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
        """`with in_flight.doing(key):` until its end, `wait` and `await_` of the same key wait."""
        with self._lock:
            this = UnderWay(key, key not in self._seen, self._end)
            self._note(key)
            others = self._by_key.setdefault(key, [])
            withdrawn = [other for other in others if self._withdraw(other)]
            for other in others:
                other.is_alone = False
            others.append(this)
        for other in withdrawn:
            if other.taken is not None:
                other.taken.set_result(False)
        return this

    def _end(self, this: UnderWay) -> None:
        with self._lock:
            this.writes, this.is_done = None, True
            of_key = self._by_key[this.key]
            of_key.remove(this)
            if not of_key:
                del self._by_key[this.key]
        for waiting in this.waiting:
            waiting.set_result(True)

    def wait(
        self, key: Key, taking: Taking | None = None, *, task_s: float | None = None, by: UnderWay | None = None
    ) -> None:
        """Blocking. On an event loop's thread it does not wait for tasks: those of this loop could never finish, and
        those of another may be waiting for one of this. Elsewhere it waits for a task for `task_s` at most, if given:
        the loop may be blocked until the caller has ended. `by`: it does not wait for what it has to store itself."""
        for this in self._others(key):
            while (pending := self._pending(this, taking, by, Signal)) is not None:
                try:
                    pending.result(None if this.loop is None else task_s)
                except TimeoutError:
                    break

    async def await_(self, key: Key, taking: Taking | None = None) -> None:
        for this in self._all(key):
            while (pending := self._pending(this, taking, None, _future)) is not None:
                await asyncio.wrap_future(pending)

    # --- a checkpoint that is stored with the writes on it

    def offer_to_carry(self, this: UnderWay) -> None:
        """These are the writes of a task that has ended: they can store their checkpoint too."""
        with self._lock:
            this.will_carry = this.loop is None
            expected = self._expected.pop(this.key, None)
        if expected is not None:
            expected.set_result(True)

    def expect_carrier(self, key: Key) -> UnderWay | None:
        """The writes of this key that would store their checkpoint. They are waited for, for a moment."""
        with self._lock:
            found = self._carrier(key)
            if found is None:
                expected = self._expected[key] = Signal()
        if found is not None:
            return found
        with suppress(TimeoutError):
            expected.result(_ENDS_S)
        with self._lock:
            self._expected.pop(key, None)
            return self._carrier(key)

    def hand_over(self, put: UnderWay, carrier: UnderWay, held: PreparedSave) -> bool:
        """Let writes store the checkpoint of this put. False: they are being stored already, by themselves."""
        with self._lock:
            if not carrier.will_carry:
                return False
            carrier.held, carrier.carried, put.carrier = held, put, carrier
            waiting, put.waiting = put.waiting, []
        for one in waiting:
            one.set_result(True)
        return True

    def take_over(self, this: UnderWay) -> PreparedSave | None:
        """The checkpoint that these writes have to store before them. From here on they take none."""
        with self._lock:
            this.will_carry = False
            return this.held

    def _carrier(self, key: Key) -> UnderWay | None:
        of_key = self._by_key.get(key, ())
        return next((this for this in of_key if this.is_alone and this.will_carry), None)

    # --- writes that share the commit of the checkpoint that follows

    def offer(self, this: UnderWay, writes: Sequence[Write], on: Key) -> bool:
        """Offer writes for a moment after their checkpoint's put (`on`), unless that would block an event loop. True:
        they are stored."""
        if this.loop is not None or (taken := self._offer(this, writes, Signal)) is None:
            return False
        began_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                return taken.result(_OFFER_S)
            if self._is_over(on, began_s):
                return not self._withdrawn(this) and taken.result()

    async def aoffer(self, this: UnderWay, writes: Sequence[Write], on: Key) -> bool:
        """`offer`, awaited."""
        if (offered := self._offer(this, writes, _future)) is None:
            return False
        taken, began_s = asyncio.wrap_future(offered), time.monotonic()
        while not (await asyncio.wait([taken], timeout=_OFFER_S))[0]:
            if self._is_over(on, began_s):
                return not self._withdrawn(this) and await taken
        return await taken

    def note_stored(self, key: Key) -> None:
        """A checkpoint was found in the store: no put of it is to come."""
        with self._lock:
            self._note(key)

    def _offer(self, this: UnderWay, writes: Sequence[Write], new: Callable[[], A]) -> A | None:
        """Offer writes. Return what says whether they were taken and stored, or None if there is no offer."""
        with self._lock:
            if not this.is_alone:
                return None
            taken = new()
            this.writes, this.taken = writes, taken
            waiting, this.waiting = this.waiting, []
        for one in waiting:
            one.set_result(True)
        return taken

    def _is_over(self, on: Key, began_s: float) -> bool:
        """Whether an offer has to end: its checkpoint is stored, or does not come. Until it is stored, none would find
        what was written on it."""
        with self._lock:
            comes = on not in self._seen and time.monotonic() - began_s < _COMES_S
            return not (comes or any(put.carrier is None for put in self._by_key.get(on, ())))

    def _withdrawn(self, this: UnderWay) -> bool:
        with self._lock:
            return self._withdraw(this)

    @staticmethod
    def _withdraw(this: UnderWay) -> bool:
        """End an offer; whether there was one that was not taken. The lock is held."""
        was_there, this.writes = this.writes is not None, None
        return was_there

    def _pending(self, this: UnderWay, taking: Taking | None, by: UnderWay | None, new: Callable[[], A]) -> A | None:
        """Return what to wait for before this is looked at again. None: it is stored, or was taken."""
        with self._lock:
            if this.is_done or (by is not None and this.carrier is by):
                return None
            if taking is not None and this.writes is not None:
                taking.add(this, this.writes)
                this.writes, this.will_carry = None, False
                return None
            pending = new()
            this.waiting.append(pending)
            return pending

    def _others(self, key: Key) -> list[UnderWay]:
        found = self._all(key)
        if not found or os.getpid() != self._pid:
            return []  # forked: what was under way is the parent's, and the store will say so
        here = _running_loop()
        return [this for this in found if this.loop is None or here is None]

    def _all(self, key: Key) -> list[UnderWay]:
        with self._lock:
            return list(self._by_key.get(key, ()))


class Taking:
    """Writes that `wait` or `await_` has taken. At the end of its `with` their owners get to know whether they were
    stored."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.held: PreparedSave | None = None  # the checkpoint that they are on, if it has to be stored too
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
    """A future for one thread that waits: a lock. A `Future` has a condition, which makes a lock for each wait."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._value = False

    def set_result(self, value: bool) -> None:
        self._value = value
        self._lock.release()

    def result(self, timeout: float | None = None) -> bool:
        """Return the result. Raises TimeoutError."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        self._lock.release()  # it may be asked again
        return self._value


Answer = Signal | Future[bool]
A = TypeVar("A", Signal, Future[bool])


def _future() -> Future[bool]:
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it
    return future


def _running_loop() -> asyncio.AbstractEventLoop | None:
    return asyncio._get_running_loop()  # without an exception if there is none
