"""Branches of a run that go on at the same time: each with a scope of its own, numbered before any of them begins.

What threads and tasks share: how a branch ended, what their ends mean for the code around them, and how a decision
between them (who was first, in which order) is written down, so that a replay decides the same.
"""

from __future__ import annotations

from collections import deque
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
AS_COMPLETED = "perdure.as_completed"


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


# --- who is first, and in which order. They yield to be sent the next branch that has ended.

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


class Completion:
    """The order in which branches end: the recorded one as far as it goes, then a new one, which is recorded."""

    def __init__(self, scope: Scope, path: str, branches: Sequence[Branch], order: Sequence[int]) -> None:
        self._scope = scope
        self._path = path
        self._branches = branches
        self._order = deque(order)
        self._ready: list[Branch] = []
        self._heard = 0
        self._given = 0

    def next(self) -> Hearing[Branch | None]:
        """The next one that has ended; None: that were all."""
        scope = self._scope
        scope.check()
        branch = yield from self._recorded() if self._order else self._new()
        if branch is None:
            if self._given < len(self._branches):
                check(scope, self._branches)  # the others wait
            return None
        check(scope, [branch])
        self._given += 1
        return branch

    def _recorded(self) -> Hearing[Branch]:
        branch = self._branches[self._order.popleft()]
        while branch not in self._ready:
            yield from self._hear()
        self._ready.remove(branch)
        return branch

    def _new(self) -> Hearing[Branch | None]:
        while self._ready or self._heard < len(self._branches):
            if not self._ready:
                yield from self._hear()
            branch = self._ready.pop(0)
            if not branch.is_parked:
                check(self._scope, [branch])
                self._scope.session.later(*decision(self._scope, self._path, AS_COMPLETED, branch.index, self._given))
                return branch
        return None

    def _hear(self) -> Hearing[None]:
        branch = yield
        self._heard += 1
        self._ready.append(branch)


# --- decisions, as they are recorded


def decided(scope: Scope, path: str, name: str, count: int) -> list[int]:
    """What was recorded of a decision: the numbers of branches, in order."""
    session = scope.session
    if not session.index.at(path):
        return []
    found: dict[int, int] = {}
    for recorded in session.recorded(path, name, None):
        # A decision that was written twice is the same twice; the last word of a fork counts.
        place = int((recorded.entry.more or {}).get("place", 0))
        found[place] = int(session.decoded(unsqueeze(recorded.entry.value or b"-1")))
    order = [found[place] for place in sorted(found)]
    if any(not 0 <= index < count for index in order):
        raise session._differs(path, f"{name}() of at least {max(order) + 1}", f"{name}() of {count}")
    return order


def decision(scope: Scope, path: str, name: str, index: int, place: int = 0) -> tuple[int, Entry]:
    session = scope.session
    more = {"place": place} if place else None
    return VALUE, Entry(path, name, session.ctx.clock_us(), value=session.encoded(index), more=more)


def win(scope: Scope, path: str, winner: Branch, losers: Sequence[Branch]) -> Act[None]:
    """Write down who was first; the questions of the others need no answer any more."""
    session = scope.session
    paths = open_asks(session, [loser.scope.prefix for loser in losers])
    beside = partial(close_asks, session, paths) if paths else None
    yield from session.record(decision(scope, path, FIRST, winner.index), beside=beside)


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
