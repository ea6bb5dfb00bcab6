"""Parallel branches of a sync run, on threads with a copy of the caller's context. None outlives the run.

A thread cannot be stopped. A branch that lost a race is stopped at its next journal call; the body that it runs is
finished and recorded, and the run does not end before it (`join_strays`).
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from perdure.errors import LeaseLost, UsageError
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Parked, run_operation
from perdure.runs.execution.scope import Scope, Unwind, current
from perdure.runs.execution.unwinds import Abandoned, Interrupted
from perdure.runs.parallel.branches import (
    Branch,
    close_asks,
    drop,
    forget,
    is_decided,
    open_asks,
    record_winner,
    recorded_winner,
    results,
    winner_of,
)

_leaving = threading.Lock()


class ThreadPool:
    """Threads that work off branches. `ended` gets each branch when it has ended."""

    def __init__(self, scope: Scope, branches: Sequence[Branch], limit: int) -> None:
        run_operation(scope, scope.execution.log.flush())  # once, not by each branch
        self._execution = scope.execution
        self._limit = limit
        self._todo = deque((branch, _context(branch)) for branch in branches)
        self._threads: list[threading.Thread] = []
        self.branches = branches
        self.ended: SimpleQueue[Branch] = SimpleQueue()

    def start(self) -> None:
        for _ in range(min(self._limit, len(self._todo))):
            thread = threading.Thread(target=self._work, name="perdure-branch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: those that there are do all the work
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def next(self) -> Branch:
        """Wait until another branch has ended. If this thread is interrupted meanwhile, the branches are too."""
        try:
            branch = self.ended.get()
        except BaseException:
            self._execution.interrupt()
            self.stop(Interrupted("the process was interrupted"))
            self.leave()
            raise
        if branch.is_broken:
            self.stop(Interrupted("another branch was interrupted"))
        return branch

    def stop(self, reason: BaseException) -> None:
        """Stop the branches that have not ended at their next journal call; those that have not begun never do."""
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

    def leave(self) -> None:
        """The caller does not wait for these branches any more; the end of the run does."""
        execution = self._execution
        with _leaving:
            execution.strays = [pool for pool in execution.strays if pool.is_alive] + [self]

    @property
    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                branch, context = self._todo.popleft()
            except IndexError:
                return
            threading.current_thread().name = f"perdure-{self._execution.row.id}-{branch.scope.prefix.rstrip('.')}"
            context.run(call, branch)
            self.ended.put(branch)


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


def gather(scope: Scope, branches: Sequence[Branch], limit: int) -> list[Any]:
    if limit == 1:  # one after the other: on the caller's thread. One that waits does not keep the others waiting
        for branch in branches:
            _context(branch).run(call, branch)
            if branch.is_broken:
                break
        return results(scope, branches)
    pool = ThreadPool(scope, branches, limit)
    pool.start()
    for _ in branches:
        pool.next()
    return results(scope, branches)


def first(scope: Scope, path: str, branches: Sequence[Branch]) -> Any:
    recorded = recorded_winner(scope, path, len(branches))
    if recorded is not None:
        winner = branches[recorded]
        forget(scope, [branch for branch in branches if branch is not winner])
        _context(winner).run(call, winner)
        return results(scope, [winner])[0]
    pool = ThreadPool(scope, branches, len(branches))
    pool.start()
    ended: list[Branch] = []
    while not is_decided(branches, ended):
        ended.append(pool.next())
    winner = winner_of(scope, branches, ended)
    losers = [branch for branch in branches if branch is not winner]
    pool.stop(Abandoned("another branch was first"))
    pool.leave()
    forget(scope, losers)
    run_operation(scope, record_winner(scope, path, winner, losers))
    return winner.result()


def join_strays(execution: Execution, failure: BaseException | None) -> None:
    """Before a run ends: wait for the threads that lost a race. They could write with a fence that was given back.

    When the run parks they come to their own end first. If the process is being interrupted they are not waited for:
    once the run is given back, their writes are refused.
    """
    if not execution.strays:
        return
    parks = execution.stop is None and isinstance(execution.root.stop, Parked)
    is_interrupted = failure is not None and not isinstance(failure, Exception | Unwind)
    hurries = is_interrupted or isinstance(execution.stop, LeaseLost | Interrupted)
    for pool in execution.strays:
        if not parks:
            pool.stop(Abandoned("the run has come to its end"))
    if hurries:
        return
    for pool in execution.strays:
        pool.join()
    paths = open_asks(execution, execution.beaten)
    if paths:  # one that lost may have been about to ask
        run_operation(execution.root, execution.log.write_fenced(partial(close_asks, execution, paths)))
