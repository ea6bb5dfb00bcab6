"""Parallel branches of a run: each has a scope of its own, numbered before any of them begins.

What threads and tasks share: how a branch ended, what its end means for the code around it, and how the winner of a
race is recorded, so that a replay decides the same.
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
    """One of several parallel calls. `work` is a function without arguments, or something to await."""

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
        """Whether it waits for something outside, whatever its code made of that."""
        return isinstance(self.scope.stop, Parked)

    @property
    def has_won(self) -> bool:
        return self.ended and self.error is None and self.scope.stop is None

    @property
    def is_broken(self) -> bool:
        """Whether the process is being interrupted, as by Ctrl-C: the others need not continue."""
        return self.error is not None and not isinstance(self.error, Exception | Unwind)

    def result(self) -> Any:
        """What it returned; raises its error."""
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
            self.error = None  # its traceback leads back here: no cycle


def branches_of(scope: Scope, calls: Iterable[Any]) -> list[Branch]:
    return [Branch(index, scope.branch(), work) for index, work in enumerate(calls)]


def drop(work: Any) -> None:
    """A coroutine that will not be awaited is closed, so that Python does not warn; a task is cancelled."""
    if hasattr(work, "__await__"):
        end = getattr(work, "close", None) or getattr(work, "cancel", None)
        if end is not None:
            end()


def check(scope: Scope, branches: Sequence[Branch]) -> None:
    """When branches have ended: raise what must end the code around them, too. An error of the user's is not that.

    A branch that waits comes before any error: the error is raised when all have really ended.
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
    """Works off branches, so many at a time: on threads, or (then it is awaited) as tasks."""

    def start(self) -> None: ...

    def next(self) -> Any:
        """Wait until another branch has ended, and give it."""

    def abandon(self, reason: BaseException) -> Any:
        """End the branches that have not ended; those that have not begun never do."""


def gather_operation(scope: Scope, branches: Sequence[Branch], pool: Pool) -> Operation[list[Any]]:
    """Run branches to their end. The results, in order; the first error by position is raised."""
    yield from scope.execution.journal.flush()  # once, not by each branch
    pool.start()
    for _ in branches:
        yield Body(pool.next, scope.is_async)
    check(scope, branches)
    return [branch.result() for branch in branches]


def first_operation(
    scope: Scope, path: str, branches: Sequence[Branch], pool_of: Callable[[Scope, Sequence[Branch], int], Pool]
) -> Operation[Any]:
    """Run branches until one has succeeded: the recorded one, or the first now. If none does it is the first by
    position, whose error stands for all."""
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


# --- decisions, as they are recorded


def _recorded_winner(scope: Scope, path: str, count: int) -> int | None:
    """Which branch was recorded as the first; None if none was."""
    execution = scope.execution
    found = execution.recorded(path, FIRST, None) if execution.index.at(path) else []
    if not found:
        return None
    index = int(execution.decoded(decompress(found[-1].entry.value or b"-1")))  # the last word of a fork counts
    if not 0 <= index < count:
        raise execution._differs(path, f"{FIRST}() of at least {index + 1}", f"{FIRST}() of {count}")
    return index


def _record_winner(scope: Scope, path: str, winner: Branch, losers: Sequence[Branch]) -> Operation[None]:
    """Record which branch was first, and close the questions of the others."""
    execution = scope.execution
    paths = open_asks(execution, [loser.scope.prefix for loser in losers])
    draft = VALUE, Entry(path, FIRST, execution.ctx.clock_us(), value=execution.encoded(winner.index))
    if paths:
        yield from execution.journal.commit(partial(close_asks, execution, paths), draft)
    else:
        yield from execution.journal.record(draft)


def open_asks(execution: Execution, prefixes: Sequence[str]) -> list[str]:
    """Where branches wait for an answer, or for something else."""
    return [
        path
        for path, found in execution.index.calls()
        if path.startswith(tuple(prefixes))
        and found[0].kind == WAIT
        and all(recorded.kind != DONE for recorded in found)
    ]


def close_asks(execution: Execution, paths: Sequence[str]) -> Program[None]:
    for path in paths:
        yield from close_ask(execution, path)


def _forget(scope: Scope, losers: Sequence[Branch]) -> None:
    """What losers wait for counts no more, and what they have recorded is not asked for again."""
    execution = scope.execution
    prefixes = tuple(loser.scope.prefix for loser in losers)
    if prefixes:
        execution.lost_prefixes += prefixes
        execution.index.forget(prefixes)
