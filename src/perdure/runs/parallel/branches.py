"""Branches of a run that go on at the same time: each with a scope of its own, numbered before any of them begins.

What threads and tasks share: how a branch ended, what their ends mean for the code around them, and how a decision
between them (who was first) is written down, so that a replay decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from perdure.runs.calls.asking import close_ask
from perdure.runs.calls.failures import line_of
from perdure.runs.journal.entries import DONE, VALUE, WAIT, Entry, unsqueeze
from perdure.runs.session.acting import Act, Parked
from perdure.runs.session.scope import Scope, Unwind
from perdure.runs.session.session import Session
from perdure.storage.program import Program

T = TypeVar("T")
FIRST = "perdure.first"


class Branch:
    """One of several calls that go on at the same time. `drop` ends what it was given if it never begins."""

    __slots__ = ("call", "drop", "ended", "error", "index", "scope", "value")

    def __init__(self, index: int, scope: Scope, call: Callable[[], Any], drop: Callable[[], object] | None) -> None:
        self.index = index
        self.scope = scope
        self.call = call
        self.drop = drop
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
        """Whether the process is being interrupted, as by Ctrl-C: the others need not go on."""
        return self.error is not None and not isinstance(self.error, Exception | Unwind)

    def result(self) -> Any:
        """What it gave, or its error; what it changed in the run's state is its maker's from now on."""
        if self.error is None or isinstance(self.error, Exception):
            self.scope.ended()
        if self.error is None:
            return self.value
        if isinstance(self.error, Exception):
            early = self.scope.session.ended_early(self.scope, f"the branch raised {line_of(self.error)}")
            if early is not None:
                raise early from self.error
        try:
            raise self.error
        finally:
            self.error = None  # its traceback leads back here: no cycle


def branches_of(scope: Scope, calls: Sequence[tuple[Callable[[], Any], Callable[[], object] | None]]) -> list[Branch]:
    return [Branch(index, scope.branch(), call, drop) for index, (call, drop) in enumerate(calls)]


def check(scope: Scope, branches: Sequence[Branch]) -> None:
    """When branches have ended: raise what must end the code around them, too. An error of the user's is not that.

    A branch that waits comes before any error: the error is raised when all have really ended.
    """
    scope.check()
    for branch in (*filter(_is_broken, branches), *filter(_is_unwound, branches)):
        branch.result()
    if any(branch.is_parked for branch in branches):
        scope.stop = Parked()
        raise scope.stop


def _is_broken(branch: Branch) -> bool:
    return branch.is_broken


def _is_unwound(branch: Branch) -> bool:
    return isinstance(branch.error, Unwind) and not branch.is_parked


def results(scope: Scope, branches: Sequence[Branch]) -> list[Any]:
    """The results, in order, when all have ended; the first error by position is raised."""
    check(scope, branches)
    for branch in branches:
        branch.scope.ended()
    return [branch.result() for branch in branches]


# --- who is first. They yield to be sent the next branch that has ended.

Hearing = Generator[None, Branch, T]


def all_of(branches: Sequence[Branch]) -> Hearing[None]:
    """Wait until all have ended."""
    for _ in branches:
        yield


def race(scope: Scope, branches: Sequence[Branch]) -> Hearing[Branch]:
    """Wait until one has succeeded. If none does it is the first by position, whose error stands for all."""
    ended: list[Branch] = []
    while len(ended) < len(branches) and not any(branch.has_won for branch in ended):
        ended.append((yield))
    winner = next((branch for branch in ended if branch.has_won), None)
    check(scope, branches if winner is None else [branch for branch in ended if branch.is_broken])
    return branches[0] if winner is None else winner


# --- decisions, as they are recorded


def decided(scope: Scope, path: str, count: int) -> int | None:
    """Which branch was recorded as the first; None if none was."""
    session = scope.session
    found = session.recorded(path, FIRST, None) if session.index.at(path) else []
    if not found:
        return None
    index = int(session.decoded(unsqueeze(found[-1].entry.value or b"-1")))  # the last word of a fork counts
    if not 0 <= index < count:
        raise session._differs(path, f"{FIRST}() of at least {index + 1}", f"{FIRST}() of {count}")
    return index


def win(scope: Scope, path: str, winner: Branch, losers: Sequence[Branch]) -> Act[None]:
    """Write down who was first; the questions of the others need no answer any more."""
    session = scope.session
    paths = open_asks(session, [loser.scope.prefix for loser in losers])
    beside = partial(close_asks, session, paths) if paths else None
    entry = Entry(path, FIRST, session.ctx.clock_us(), value=session.encoded(winner.index))
    yield from session.log.record((VALUE, entry), same_tx=beside)


def open_asks(session: Session, prefixes: Sequence[str]) -> list[str]:
    """Where branches wait for an answer, or for something else."""
    return [
        path
        for path, found in session.index.calls()
        if path.startswith(tuple(prefixes))
        and found[0].kind == WAIT
        and all(recorded.kind != DONE for recorded in found)
    ]


def close_asks(session: Session, paths: Sequence[str]) -> Program[None]:
    for path in paths:
        yield from close_ask(session, path)


def forget(scope: Scope, losers: Sequence[Branch]) -> None:
    """What losers wait for counts no more, and what they have recorded is not asked for again."""
    session = scope.session
    prefixes = tuple(loser.scope.prefix for loser in losers)
    if prefixes:
        session.beaten += prefixes
        session.index.forget(prefixes)
