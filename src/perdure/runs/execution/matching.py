"""Which recorded call a call is, and whether a new effect may begin.

A call is the one that the journal has at its path. In an async run it may have moved: a task took over what another
did, as workers of one queue do. Then it is a recorded call of the same name and arguments, of the same branch, that
nothing else comes to (`Scope.take_recorded`).

No new effect begins while a recorded one lies ahead. Other branches may still come to that one, so the call waits until
each of them has ended or waits too. What lies ahead then was passed by: NonDeterministic, before any body runs.

Must never happen here: an intent under a new key while the effect that it repeats is in the journal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakSet

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
    """Branches of a sync run, of which some may not have begun."""

    def work_one(self) -> bool:
        """Run one that has not begun on this thread, to its end. Return False if there is none."""


class BranchThreads:
    """Counts the threads of a sync run that can still do something."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.working = 1  # the one that called the function; changed while the lock is held
        self._waiting = 0  # of those: threads that wait for what the others come to
        self._pools: WeakSet[BranchBacklog] = WeakSet()

    def add(self, pool: BranchBacklog) -> None:
        with self.lock:
            self._pools.add(pool)

    def begin(self) -> None:
        self._add(1)

    def end(self) -> None:
        self._add(-1)

    def wait_for_others(self, call: Unmatched) -> Operation[None]:
        """Wait while the call is blocked and another thread may free it. If all wait, run a branch that a limit holds
        back, on this thread. Raises what ended its branch: the run may wait for this thread before it ends."""
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
    """A queue of ended branches for the one thread that joins them, which does not count while it waits for one.

    The thread that puts a branch counts the joining one again in the same step. If the joining thread did so itself,
    none might count until it wakes up, and a call that waits for it would be refused.
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
        """Wait for the next one."""
        try:
            with self._threads.lock:
                if self._ended.empty():
                    self._threads.working -= 1
                    self._uncounted = 1
            return self._ended.get()
        finally:
            with self._threads.lock:  # it was interrupted, or was counted by `put`
                self._threads.working += self._uncounted
                self._uncounted = 0


@dataclass(slots=True, eq=False)
class Unmatched:
    """A call that the journal does not have at its path, while it has others that the code has not come to."""

    scope: Scope
    name: str
    args_hash: bytes | None  # None: it is not matched by its arguments
    is_effect: bool

    @property
    def _execution(self) -> Execution:
        return self.scope.execution

    @property
    def equals(self) -> list[str]:
        """The recorded calls that it may be."""
        if self.args_hash is None or not self.scope.is_async:
            return []  # threads do not take over from each other
        return self._execution.index.equals_ahead(self.scope.home.prefix, self.name, self.args_hash)

    @property
    def comes_before_others(self) -> bool:
        """Whether no recorded effect ahead is equal to this one, and the code can still come to each of them."""
        execution = self._execution
        for path in execution.index.effects_ahead():
            entry = execution.index.at(path)[0].entry
            is_equal = entry.name == self.name and self.args_hash in (None, entry.args_hash)
            if is_equal or not execution.may_come_to(path):
                return False
        return True

    @property
    def is_blocked(self) -> bool:
        index = self._execution.index
        return bool(index.ahead) and bool((self.is_effect and index.effects_ahead()) or self.equals)


def matched(scope: Scope, path: str, name: str, args_hash: bytes | None, *, is_effect: bool) -> Operation[str]:
    """Return the path of the recorded call that this call is, or its own if it is a new one.

    Called while recorded calls lie ahead. Raises NonDeterministic for a new effect if a recorded one was passed by.
    """
    execution = scope.execution
    call = Unmatched(scope, name, args_hash, is_effect)
    found = execution.index.at(path)
    if found:
        entry = found[0].entry
        if entry.name == TIMED_OUT or (entry.name == name and entry.args_hash in (None, args_hash)) or not call.equals:
            return path  # `Execution.recorded` refuses it if it is another call
    elif execution.index.is_branch(path):
        return path  # refused there, too
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
        # A blocking call on a loop: no other task can run before it.
        equals = [other for other in equals if not execution.has_made(other)]
        if not equals and (not is_effect or call.comes_before_others):
            return path
    if equals:
        return scope.take_recorded(path, equals[0])
    if is_effect and execution.index.effects_ahead():
        raise execution.passed_by(f"{name}() at step {path}", can_wait=bool(has_waited))
    return path


def check_passed_by(scope: Scope, path: str, name: str) -> Operation[None]:
    """Raise NonDeterministic if a call that starts a run or sends a message passes a recorded effect by."""
    if scope.execution.index.ahead and (kind := kind_of(name)) is not None and kind.reaches_out:
        yield from matched(scope, path, name, None, is_effect=True)


def in_turn(scope: Scope, found: Sequence[Recorded]) -> Operation[None]:
    """In an async run, wait until the code was given the ends that were recorded before this one."""
    if scope.is_async and (seq := end_of(found)) and (supervisor := scope.execution.supervisor) is not None:
        yield from _turn(scope, supervisor, seq)


def after_recorded(scope: Scope) -> Operation[None]:
    """In an async run, wait before a new body until the code was given every recorded end."""
    if scope.is_async and (supervisor := scope.execution.supervisor) is not None:
        yield from _turn(scope, supervisor, _AFTER_ALL)


def _turn(scope: Scope, supervisor: Supervisor, seq: int) -> Operation[None]:
    if supervisor.order.matters:
        yield Await(partial(supervisor.order.in_turn, seq))
        scope.check()
