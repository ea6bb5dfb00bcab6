"""Matching of calls with recorded calls, and whether a new effect may begin.

A call matches the recorded call at its path. In an async run a call may move between tasks, as among workers of one
queue. Then it matches a recorded call of the same branch, name and arguments that no other task comes to
(`Scope.take_recorded`).

No new effect begins while a recorded one lies ahead. Other branches may still come to the recorded one, so the call
waits until each of them has ended or waits too. A recorded effect that is still ahead then was passed by, and the call
raises NonDeterministic before any body runs.

Must never happen here: an intent under a new key while the effect that it repeats is in the journal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakSet

from perdure.runs.execution import unwinds
from perdure.runs.execution.operation import Await, Operation, Pause
from perdure.runs.execution.scope import Scope
from perdure.runs.journal.entries import Recorded
from perdure.runs.journal.index import end_of
from perdure.runs.journal.kinds import kind_of

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution
    from perdure.runs.execution.supervisor import Supervisor

T = TypeVar("T")
TIMED_OUT = "perdure.timeout"  # the name of an entry in place of a call that a deadline ended
_LOOK_S = 0.002
_AFTER_ALL = 1 << 62


class BranchBacklog(Protocol):
    """A pool of a sync run's branches, some of which may not have begun."""

    def work_one(self) -> bool:
        """Run a branch that has not begun to its end, on this thread. Return False if there is none."""


class BranchThreads:
    """A count of the threads of a sync run that can still make calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.working = 1  # begins with the thread that called the function; changed under the lock
        self._waiting = 0  # those of them that wait for calls of the others
        self._pools: WeakSet[BranchBacklog] = WeakSet()

    def add(self, pool: BranchBacklog) -> None:
        with self.lock:
            self._pools.add(pool)

    def begin(self) -> None:
        self._add(1)

    def end(self) -> None:
        self._add(-1)

    def wait_for_others(self, call: Unmatched) -> Operation[None]:
        """Wait while the call is blocked and another thread may free it.

        If all threads wait, run a branch that a limit holds back on this thread. Raises the exception that ended the
        call's branch, because the end of the run may wait for this thread.
        """
        with self.lock:
            self._waiting += 1
        try:
            while call.is_blocked:
                call.scope.check()
                if not self._is_last():
                    yield Pause(_LOOK_S)
                elif not self._work_one() and self._is_last():
                    return
        finally:
            with self.lock:
                self._waiting -= 1

    def _is_last(self) -> bool:
        with self.lock:
            return self._waiting >= self.working

    def _work_one(self) -> bool:
        with self.lock:
            self._waiting -= 1
            pools = list(self._pools)
        try:
            return any(pool.work_one() for pool in pools)
        finally:
            with self.lock:
                self._waiting += 1

    def _add(self, number: int) -> None:
        with self.lock:
            self.working += number


class EndedBranches(Generic[T]):
    """A queue of ended branches for the one thread that joins them. That thread does not count while it waits.

    `put` counts the joining thread again under the same lock. If the joining thread did so itself, no thread might
    count until it wakes up, and a call that waits for it would be refused.
    """

    def __init__(self, threads: BranchThreads) -> None:
        self._threads = threads
        self._ended: SimpleQueue[T] = SimpleQueue()
        self._uncounted = 0  # 1 while the thread that joins does not count

    def put(self, branch: T) -> None:
        with self._threads.lock:
            self._ended.put(branch)
            self._threads.working += self._uncounted
            self._uncounted = 0

    def get(self) -> T:
        """Wait for the next ended branch and return it."""
        try:
            with self._threads.lock:
                if self._ended.empty():
                    self._threads.working -= 1
                    self._uncounted = 1
            while True:
                try:
                    return self._ended.get(True, unwinds.ROUND_S)
                except Empty:
                    pass
        finally:
            with self._threads.lock:  # if interrupted: otherwise `put` has counted this thread
                self._threads.working += self._uncounted
                self._uncounted = 0


@dataclass(slots=True, eq=False)
class Unmatched:
    """A call that is not recorded at its path, while recorded calls lie ahead."""

    scope: Scope
    name: str
    args_hash: bytes | None  # None: the call is not matched by its arguments
    is_effect: bool

    @property
    def _execution(self) -> Execution:
        return self.scope.execution

    @property
    def equals(self) -> list[str]:
        """The paths of the recorded calls that it may match."""
        if self.args_hash is None or not self.scope.is_async:
            return []  # calls do not move between threads
        return self._execution.index.equals_ahead(self.scope.home.prefix, self.name, self.args_hash)

    @property
    def comes_before_others(self) -> bool:
        """Whether no recorded effect ahead equals this one, and the code can still come to each of them."""
        execution = self._execution
        for path in list(execution.index.effects_ahead):
            entry = execution.index.at(path)[0].entry
            is_equal = entry.name == self.name and self.args_hash in (None, entry.args_hash)
            if is_equal or not execution.may_come_to(path):
                return False
        return True

    @property
    def is_blocked(self) -> bool:
        index = self._execution.index
        return bool(index.ahead) and bool((self.is_effect and index.effects_ahead) or self.equals)


def matched(scope: Scope, path: str, name: str, args_hash: bytes | None, *, is_effect: bool) -> Operation[str]:
    """Return the path of the recorded call that this call matches, or its own path if it is new.

    Called while recorded calls lie ahead. Raises NonDeterministic for a new effect if a recorded one was passed by.
    """
    execution = scope.execution
    call = Unmatched(scope, name, args_hash, is_effect)
    journaled = execution.index.at(path)
    if journaled:
        entry = journaled[0].entry
        if entry.name == TIMED_OUT or (entry.name == name and entry.args_hash in (None, args_hash)) or not call.equals:
            return path  # `Execution.recorded` raises if another call is recorded there
    elif execution.index.below(f"{path}."):
        return path  # `Execution.recorded` raises
    if not call.is_blocked:
        return path
    if scope.is_async:
        has_waited = yield Await(partial(execution.supervisor.order.settle, call))
    else:
        yield from execution.threads.wait_for_others(call)
        has_waited = True
    scope.check()
    equals = call.equals
    if not has_waited:
        # A blocking call on an event loop: no other task can run before it.
        equals = [other for other in equals if not execution.has_scope(other)]
        if not equals and (not is_effect or call.comes_before_others):
            return path
    if equals:
        return scope.take_recorded(path, equals[0])
    if is_effect and execution.index.effects_ahead:
        raise execution.passed_by(f"{name}() at step {path}", can_wait=bool(has_waited))
    return path


def check_passed_by(scope: Scope, path: str, name: str) -> Operation[None]:
    """Raise NonDeterministic if a call that starts a run or sends a message passes a recorded effect by."""
    if scope.execution.index.ahead and (kind := kind_of(name)) is not None and kind.reaches_out:
        yield from matched(scope, path, name, None, is_effect=True)


def in_turn(scope: Scope, journaled: Sequence[Recorded]) -> Operation[None]:
    """Wait, in an async run, until the code has received every end that was recorded before this call's."""
    if scope.is_async and (seq := end_of(journaled)) and (supervisor := scope.execution.supervisor) is not None:
        yield from _turn(scope, supervisor, seq)


def after_recorded(scope: Scope) -> Operation[None]:
    """Wait, in an async run, until the code has received every recorded end. Called before a new body."""
    if scope.is_async and (supervisor := scope.execution.supervisor) is not None:
        yield from _turn(scope, supervisor, _AFTER_ALL)


def _turn(scope: Scope, supervisor: Supervisor, seq: int) -> Operation[None]:
    if supervisor.order.matters:
        yield Await(partial(supervisor.order.in_turn, seq))
        scope.check()
