"""Parallel branches of a sync run, on threads with a copy of the caller's context. None outlives the run.

A thread cannot be stopped, so a branch that lost a race stops at its next journal call. The body that it is in finishes
and is recorded, and the run waits for it before it ends (`join_orphans`).
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from perdure.errors import LeaseLost, UsageError
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.matching import EndedBranches
from perdure.runs.execution.operation import Parked, run_operation
from perdure.runs.execution.scope import Scope, Unwind, current
from perdure.runs.execution.unwinds import Abandoned, Interrupted, wait_in_rounds
from perdure.runs.parallel.branches import Branch, close_asks, drop, open_asks
from perdure.storage.store_threads import threads_of

_leaving = threading.Lock()


class ThreadPool:
    """Runs branches on threads of the store, at most `limit` at a time.

    With a limit of 1, or if the store has no free thread, the caller's own thread runs them. So nested branches never
    deadlock. `ended` receives each branch when it has ended."""

    def __init__(self, scope: Scope, branches: Sequence[Branch], limit: int) -> None:
        self._execution = scope.execution
        self._limit = min(limit, len(branches))
        self._todo = deque((branch, _context(branch)) for branch in branches)
        self._helpers: list[threading.Event] = []  # one per thread of the store; set when that thread is done
        self.branches = branches
        self.ended: EndedBranches[Branch] = EndedBranches(self._execution.threads)

    def start(self) -> None:
        """Start the threads. If this thread is interrupted meanwhile, interrupt the branches."""
        try:
            self._start()
        except BaseException:
            self._interrupt()
            raise

    def _start(self) -> None:
        self._execution.threads.add(self)
        threads = threads_of(self._execution.ctx.driver)
        for _ in range(self._limit if self._limit > 1 else 0):
            ended = threading.Event()
            self._execution.threads.begin()
            if not threads.try_run(partial(self._work, ended)):  # the threads so far run all branches
                self._execution.threads.end()
                break
            self._helpers.append(ended)
        if not self._helpers:
            self._limit = 1

    def next(self) -> Branch:
        """Wait for the next branch to end and return it. If this thread is interrupted, interrupt the branches."""
        try:
            if self._limit == 1:
                self.work_one()
            branch = self.ended.get()
        except BaseException:
            self._interrupt()
            raise
        if branch.is_broken:
            self.stop(Interrupted("another branch was interrupted"))
        return branch

    def _interrupt(self) -> None:
        self._execution.interrupt()
        self.abandon(Interrupted("the process was interrupted"))

    def stop(self, reason: BaseException) -> None:
        """Stop the branches at their next journal call. Those that have not begun never begin."""
        while self._todo:
            try:
                branch, _ = self._todo.popleft()
            except IndexError:
                break
            branch.end(error=reason)
            self.ended.put(branch)
        for branch in self.branches:
            if not branch.ended and branch.scope.stop is None:
                branch.scope.stop = reason

    def abandon(self, reason: BaseException) -> None:
        """Stop the branches without waiting for them. The end of the run waits."""
        self.stop(reason)
        execution = self._execution
        with _leaving:
            execution.orphans = [pool for pool in execution.orphans if pool.is_alive] + [self]

    @property
    def is_alive(self) -> bool:
        return not all(helper.is_set() for helper in self._helpers)

    def join(self) -> None:
        for helper in self._helpers:
            wait_in_rounds(helper)

    def _work(self, ended: threading.Event) -> None:
        try:
            while self.work_one():
                pass
        finally:
            self._execution.threads.end()
            ended.set()

    def work_one(self) -> bool:
        """Run a branch that has not begun on this thread. Return False if there is none."""
        try:
            branch, context = self._todo.popleft()
        except IndexError:
            return False
        if self._limit > 1:
            threading.current_thread().name = f"perdure-{self._execution.row.id}-{branch.scope.prefix.rstrip('.')}"
        context.run(call, branch)
        self.ended.put(branch)
        return True


def _context(branch: Branch) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(current.set, branch.scope)
    return context


def call(branch: Branch) -> None:
    """Run a branch to its end, on this thread, in its own context."""
    try:
        value = branch.work()
        if hasattr(value, "__await__"):
            drop(value)
            raise UsageError(
                "a branch of a sync durable function gave something to be awaited: the step is async, and so must the "
                "durable function be"
            )
    except BaseException as error:
        branch.end(error=error)
    else:
        branch.end(value)


def join_orphans(execution: Execution, failure: BaseException | None) -> None:
    """Wait, before a run ends, for the threads that lost a race. Else they could write with a fence that was released.

    If the run parks, they are not stopped but run to their own end. If the process is being interrupted, do not wait:
    once the run is released, their writes are refused.
    """
    if not execution.orphans:
        return
    parks = execution.stop is None and isinstance(execution.root.stop, Parked)
    is_interrupted = failure is not None and not isinstance(failure, Exception | Unwind)
    hurries = is_interrupted or isinstance(execution.stop, LeaseLost | Interrupted)
    for pool in execution.orphans:
        if not parks:
            pool.stop(Abandoned("the run has come to its end"))
    if hurries:
        return
    for pool in execution.orphans:
        pool.join()
    paths = open_asks(execution, execution.lost_prefixes)
    if paths:  # a loser may have asked a question meanwhile
        run_operation(execution.root, execution.journal.write_fenced(partial(close_asks, execution, paths)))
