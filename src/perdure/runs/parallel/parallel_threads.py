"""Branches of a sync run, on threads: plain ones, with a copy of the caller's context, none of which outlives the run.

A thread cannot be stopped. A branch that nobody waits for any more is told so at its next journal call; what its body
is doing is finished and recorded, and the run does not end before it (`join_strays`).
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from perdure.errors import LeaseLost, UsageError
from perdure.runs.parallel.branches import (
    Branch,
    Hearing,
    all_of,
    close_asks,
    decided,
    forget,
    open_asks,
    race,
    results,
    win,
)
from perdure.runs.session.acting import Parked, perform
from perdure.runs.session.requests import Abandoned, Interrupted
from perdure.runs.session.scope import Scope, Unwind, current
from perdure.runs.session.session import Session

T = TypeVar("T")
_leaving = threading.Lock()


class Team:
    """Threads that work off branches. `ended` gets each branch when it has ended."""

    def __init__(self, scope: Scope, branches: Sequence[Branch], limit: int) -> None:
        self._session = scope.session
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
            except RuntimeError:  # no more threads to be had: those that there are do all the work
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def next(self) -> Branch:
        """Wait until another branch has ended. If this thread is interrupted meanwhile, the branches are too."""
        try:
            branch = self.ended.get()
        except BaseException:
            self._session.interrupt()
            self.stop(Interrupted("the process was interrupted"))
            self.leave()
            raise
        if branch.is_broken:
            self.stop(Interrupted("another branch was interrupted"))
        return branch

    def hear(self, hearing: Hearing[T]) -> T:
        """Drive what listens to the branches as they end."""
        try:
            next(hearing)
            while True:
                hearing.send(self.next())
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def stop(self, reason: BaseException) -> None:
        """Tell the branches that have not ended; those that have not begun never do."""
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
        """Perhaps nobody waits for these branches any more; the run's end does."""
        session = self._session
        with _leaving:
            session.strays = [team for team in session.strays if team.is_alive] + [self]

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
            threading.current_thread().name = f"perdure-{self._session.row.id}-{branch.scope.prefix.rstrip('.')}"
            context.run(call, branch)
            self.ended.put(branch)


def _context(branch: Branch) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(current.set, branch.scope)
    return context


def call(branch: Branch) -> None:
    """Run a branch to its end, on this thread, in its own context."""
    try:
        value = branch.call()
        if hasattr(value, "__await__"):
            if hasattr(value, "close"):
                value.close()
            raise UsageError(
                "a branch of a sync durable function gave something to be awaited: the step is async, and so must the "
                "durable function be"
            )
    except BaseException as error:
        branch.end(error=error)
    else:
        branch.end(value)


def gather(scope: Scope, branches: Sequence[Branch], limit: int) -> list[Any]:
    team = Team(scope, branches, limit)
    team.start()
    team.hear(all_of(branches))
    return results(scope, branches)


def first(scope: Scope, path: str, branches: Sequence[Branch]) -> Any:
    recorded = decided(scope, path, len(branches))
    if recorded is not None:
        winner = branches[recorded]
        forget(scope, [branch for branch in branches if branch is not winner])
        _context(winner).run(call, winner)
        return results(scope, [winner])[0]
    team = Team(scope, branches, len(branches))
    team.start()
    winner = team.hear(race(scope, branches))
    losers = [branch for branch in branches if branch is not winner]
    team.stop(Abandoned("another branch was first"))
    team.leave()
    forget(scope, losers)
    perform(scope, win(scope, path, winner, losers))
    return winner.result()


def join_strays(session: Session, failure: BaseException | None) -> None:
    """Before a run ends: wait for threads that nobody waited for. They could write with a fence that is given back.

    When the run parks they go on to their own end first. If the process is being interrupted nobody waits for them:
    once the run is given back, their writes are refused.
    """
    if not session.strays:
        return
    parks = session.stop is None and isinstance(session.root.stop, Parked)
    is_interrupted = failure is not None and not isinstance(failure, Exception | Unwind)
    hurries = is_interrupted or isinstance(session.stop, LeaseLost | Interrupted)
    for team in session.strays:
        if not parks:
            team.stop(Abandoned("the run has come to its end"))
    if hurries:
        return
    for team in session.strays:
        team.join()
    paths = open_asks(session, session.beaten)
    if paths:  # one that lost may have been about to ask
        perform(session.root, session.log.write_fenced(partial(close_asks, session, paths)))
