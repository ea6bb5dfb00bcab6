"""`hf.timeout`: a deadline for a part of a run, checked at each journal call; that it passed is recorded.

A body that is running is not interrupted: give the step its own `timeout_s` for that. On replay the same call raises
again, whatever the clock says then.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.runs.entries import VALUE, Entry
from holdfast.runs.scope import Scope, need_scope

if TYPE_CHECKING:
    from holdfast.runs.acting import Act

NAME = "hf.timeout"


class TimedOut(TimeoutError):
    """The time that `hf.timeout` gave a part of a run is over."""


class timeout:
    """`with hf.timeout(60): …`, and `async with`: the journal calls inside raise TimeoutError once it is over."""

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"hf.timeout({seconds!r}): a number of seconds from 0 on")
        self._seconds = seconds
        self._outer: tuple[tuple[str, int], ...] = ()
        self._scope: Scope | None = None

    def __enter__(self) -> Self:
        scope = self._scope = need_scope("hf.timeout()")
        self._outer = scope.deadlines
        path = scope.take()
        session = scope.session
        found = session.recorded(path, NAME, None) if path in session.index or session.replay else []
        if found:
            due = int((found[0].entry.more or {})["due"])
        else:
            due = session.ctx.clock_us() + int(self._seconds * 1e6)
            session.later(VALUE, Entry(path, NAME, session.ctx.clock_us(), more={"due": due}))
        scope.deadlines = (*self._outer, (path, due))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._scope is not None
        self._scope.deadlines = self._outer

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def check_deadline(scope: Scope, path: str) -> Act[None]:
    """Raise TimedOut if a deadline of this branch has passed at this call, now or when it was first made."""
    if not scope.deadlines:
        return
    session = scope.session
    found = session.index.get(path)
    if found:
        if found[0].entry.name == NAME:
            session.unread.discard(path)
            raise TimedOut(f"the time that hf.timeout gave is over (at step {path})")
        return
    now = yield from session.now_us()
    if any(due <= now for _, due in scope.deadlines):
        yield from session.record((VALUE, Entry(path, NAME, now)))
        raise TimedOut(f"the time that hf.timeout gave is over (at step {path})")


def nearest(scope: Scope) -> int | None:
    """When the first deadline of this branch passes."""
    return min((due for _, due in scope.deadlines), default=None)
