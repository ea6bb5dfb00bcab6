"""Parallel branches of a run. Each has its own scope, which is numbered before any branch begins.

This module holds what threads and tasks share: how a branch ended, what that means for the calling code, and how the
winner of a race is recorded. A replay uses the recorded winner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from perdure.runs.calls.asks import close_ask
from perdure.runs.calls.failures import line_of
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Body, Operation, Parked
from perdure.runs.execution.scope import Scope, Unwind
from perdure.runs.execution.unwinds import Abandoned
from perdure.runs.journal.entries import DONE, VALUE, WAIT, Entry, decompress
from perdure.storage.program import Program

FIRST = "perdure.first"


class Branch:
    """One of several parallel calls. `work` is a function without arguments, or an awaitable."""

    __slots__ = ("ended", "error", "index", "scope", "value", "work")

    def __init__(self, index: int, scope: Scope, work: Any) -> None:
        self.index = index
        self.scope = scope
        self.work = work
        self.ended = False
        self.value: Any = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Branch {self.scope.prefix}>"

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value, self.error, self.ended = value, error, True

    @property
    def is_parked(self) -> bool:
        """Whether it waits for an external event, even if its code caught the unwind."""
        return isinstance(self.scope.stop, Parked)

    @property
    def has_won(self) -> bool:
        return self.ended and self.error is None and self.scope.stop is None

    @property
    def is_broken(self) -> bool:
        """Whether an interrupt such as Ctrl-C ended it. The other branches are then stopped."""
        return self.error is not None and not isinstance(self.error, Exception | Unwind)

    def result(self) -> Any:
        """Return its value, or raise its error."""
        if self.error is None or isinstance(self.error, Exception):
            self.scope.ended()
        if self.error is None:
            return self.value
        if isinstance(self.error, Exception):
            early = self.scope.execution.ended_early(self.scope, f"the branch raised {line_of(self.error)}")
            if early is not None:
                raise early from self.error
        try:
            raise self.error
        finally:
            self.error = None  # avoids a cycle: its traceback refers to this frame


def branches_of(scope: Scope, calls: Iterable[Any]) -> list[Branch]:
    return [Branch(index, scope.branch(), work) for index, work in enumerate(calls)]


def drop(work: Any) -> None:
    """Discard work that will not be awaited: close a coroutine, so that Python does not warn, or cancel a task."""
    if hasattr(work, "__await__"):
        end = getattr(work, "close", None) or getattr(work, "cancel", None)
        if end is not None:
            end()


def check(scope: Scope, branches: Sequence[Branch]) -> None:
    """Raise, after branches have ended, what must also end the calling code. Errors of user code are not raised here.

    If a branch is parked, park the caller even if another branch failed. That error is raised when all have ended.
    """
    scope.check()
    for branch in branches:
        if branch.is_broken:
            branch.result()
    for branch in branches:
        if isinstance(branch.error, Unwind) and not branch.is_parked:
            branch.result()
    if any(branch.is_parked for branch in branches):
        scope.stop = Parked()
        raise scope.stop


class Pool(Protocol):
    """Runs a limited number of branches at a time, on threads or as tasks. With tasks, its methods are awaited."""

    def start(self) -> None: ...

    def next(self) -> Any:
        """Wait for the next branch to end and return it."""

    def abandon(self, reason: BaseException) -> Any:
        """End the branches that have not ended. Those that have not begun never begin."""


def gather_operation(scope: Scope, branches: Sequence[Branch], pool: Pool) -> Operation[list[Any]]:
    """Run branches to their end and return the results in order. Raise the first error by position."""
    yield from scope.execution.journal.flush()  # once here, instead of in each branch
    pool.start()
    for _ in branches:
        yield Body(pool.next, scope.is_async)
    check(scope, branches)
    return [branch.result() for branch in branches]


def first_operation(
    scope: Scope, path: str, branches: Sequence[Branch], pool_of: Callable[[Scope, Sequence[Branch], int], Pool]
) -> Operation[Any]:
    """Run branches until one succeeds, and return its result. A replay runs only the recorded winner.

    If all fail, the first branch by position is the winner, and its error is raised."""
    try:
        recorded = _recorded_winner(scope, path, len(branches))
    except BaseException:
        for branch in branches:
            drop(branch.work)
        raise
    if recorded is not None:
        winner = branches[recorded]
        losers = [branch for branch in branches if branch is not winner]
        for loser in losers:
            drop(loser.work)
        _forget(scope, losers)
        return (yield from gather_operation(scope, [winner], pool_of(scope, [winner], 1)))[0]
    yield from scope.execution.journal.flush()
    pool = pool_of(scope, branches, len(branches))
    pool.start()
    ended: list[Branch] = []
    while len(ended) < len(branches) and not any(branch.has_won for branch in ended):
        ended.append((yield Body(pool.next, scope.is_async)))
    won = next((branch for branch in ended if branch.has_won), None)
    check(scope, branches if won is None else [branch for branch in ended if branch.is_broken])
    winner = won or branches[0]
    losers = [branch for branch in branches if branch is not winner]
    yield Body(partial(pool.abandon, Abandoned("another branch was first")), scope.is_async)
    _forget(scope, losers)
    yield from _record_winner(scope, path, winner, losers)
    return winner.result()


# --- the recorded winner


def _recorded_winner(scope: Scope, path: str, count: int) -> int | None:
    execution = scope.execution
    recorded = execution.recorded(path, FIRST, None) if execution.index.at(path) else []
    if not recorded:
        return None
    index = int(execution.decoded(decompress(recorded[-1].entry.value or b"-1")))  # a fork may have changed it
    if not 0 <= index < count:
        raise execution._differs(path, f"{FIRST}() of at least {index + 1}", f"{FIRST}() of {count}")
    return index


def _record_winner(scope: Scope, path: str, winner: Branch, losers: Sequence[Branch]) -> Operation[None]:
    """Record the winner, and close the questions of the losers."""
    execution = scope.execution
    paths = open_asks(execution, [loser.scope.prefix for loser in losers])
    draft = VALUE, Entry(path, FIRST, execution.ctx.clock_us(), value=execution.encoded(winner.index))
    if paths:
        yield from execution.journal.commit(partial(close_asks, execution, paths), draft)
    else:
        yield from execution.journal.record(draft)


def open_asks(execution: Execution, prefixes: Sequence[str]) -> list[str]:
    """Return the paths of the open waits below these prefixes."""
    return [
        path
        for path, rows in execution.index.calls()
        if path.startswith(tuple(prefixes)) and rows[0].kind == WAIT and all(recorded.kind != DONE for recorded in rows)
    ]


def close_asks(execution: Execution, paths: Sequence[str]) -> Program[None]:
    for path in paths:
        yield from close_ask(execution, path)


def _forget(scope: Scope, losers: Sequence[Branch]) -> None:
    """Ignore the waits of losers, and do not expect their recorded calls to be replayed."""
    execution = scope.execution
    prefixes = tuple(loser.scope.prefix for loser in losers)
    if prefixes:
        execution.lost_prefixes += prefixes
        execution.index.forget(prefixes)
