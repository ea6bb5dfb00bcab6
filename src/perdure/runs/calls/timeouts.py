"""`perdure.timeout`: a deadline for a part of a run, checked at its journal calls and recorded when it passes.

A call that begins after the deadline raises, and one that waits (for an answer, a message, a child, time, its next
attempt) is woken by it. A running body is not interrupted: use the step's own `timeout_s` for that. An effect whose
outcome is in doubt is not given up either. On replay the same call raises again, whatever the clock says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from perdure.errors import UsageError
from perdure.runs.calls.failures import describe_error
from perdure.runs.execution.matching import TIMED_OUT as NAME
from perdure.runs.execution.matching import check_passed_by, in_turn
from perdure.runs.execution.operation import Pause, Wait
from perdure.runs.execution.scope import Scope, need_scope
from perdure.runs.journal.entries import DONE, FAILED, INTENT, VALUE, Entry, Recorded, completion
from perdure.runs.journal.kinds import RETRY, CallKind, declare
from perdure.values.safe_repr import shown

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution
    from perdure.runs.execution.operation import Operation

T = TypeVar("T")
SECONDS_MAX = 100 * 366 * 86_400
declare(CallKind(NAME, is_changeable=False))


def check_seconds(seconds: Any, subject: str) -> float:
    """Return `seconds` if it is a number within a hundred years; a negative one is over at once. Raises UsageError."""
    if isinstance(seconds, int | float) and abs(seconds) <= SECONDS_MAX:
        return seconds
    raise UsageError(
        f"{subject}: {shown(seconds)} is no number of seconds up to {SECONDS_MAX:,} (a hundred years); to wait for "
        "ever, give no time"
    )


class TimedOut(TimeoutError):
    """The deadline that `perdure.timeout` set for a part of a run has passed."""


class timeout:
    """A deadline for a block: after `seconds`, the journal calls inside it raise TimeoutError.

    Use it as `with perdure.timeout(60):` or with `async with`.
    """

    def __init__(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise UsageError(f"perdure.timeout({shown(seconds)}): a number of seconds from 0 on")
        self._seconds = check_seconds(seconds, "perdure.timeout()")
        self._entered: list[tuple[Scope, tuple[tuple[str, int], ...]]] = []

    def __enter__(self) -> Self:
        scope = need_scope("perdure.timeout()")
        scope.check()
        execution, path = scope.execution, scope.take()
        recorded = execution.recorded(path, NAME, None)
        if recorded:
            due = int((recorded[0].entry.extra or {})["due"])
        else:
            due = execution.shared_clock_us() + int(self._seconds * 1e6)
            execution.journal.buffer(VALUE, Entry(path, NAME, execution.ctx.clock_us(), extra={"due": due}))
        self._entered.append((scope, scope.deadlines))
        scope.deadlines = (*scope.deadlines, (path, due))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scope, before = self._entered.pop()
        scope.deadlines = before

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def check_deadline(scope: Scope, path: str) -> Operation[None]:
    """Raise TimedOut if a deadline of this branch has passed, now or when the call was first made."""
    if not scope.deadlines:
        return
    execution = scope.execution
    recorded = execution.index.at(path)
    if recorded:
        if recorded[0].entry.name == NAME:
            execution.index.read(path)
            raise _over(path)
        return
    if execution.index.at(f"{path}~approve"):
        return  # an effect that waits for its approval had begun before the deadline
    if _nearest(scope) <= execution.shared_clock_us():
        yield from execution.journal.record((VALUE, Entry(path, NAME, execution.ctx.clock_us())))
        raise _over(path)


def recorded_call(
    scope: Scope, path: str, name: str, args_hash: bytes | None = None
) -> Operation[tuple[Sequence[Recorded], Entry | None]]:
    """Return the entries of a call that begins, and its end or None. Raises the error that has ended its branch."""
    scope.check()
    yield from check_deadline(scope, path)
    yield from check_passed_by(scope, path, name)
    recorded = scope.execution.recorded(path, name, args_hash)
    yield from in_turn(scope, recorded)
    return recorded, completion(recorded)


def is_over(scope: Scope) -> bool:
    return bool(scope.deadlines) and _nearest(scope) <= scope.execution.shared_clock_us()


def check_again(scope: Scope, path: str) -> Operation[None]:
    """Raise TimedOut if a deadline has passed before the next attempt of a call that has failed for certain."""
    if is_over(scope):
        over = yield from _give_up(scope, Wait(path, RETRY.waiting(path), kind=RETRY))
        assert over is not None  # only a question can be answered in between
        raise over


def limited(scope: Scope, operation: Operation[T]) -> Operation[T]:
    """Return the operation with its waits limited by the deadlines of its branch."""
    return _limited(scope, operation) if scope.deadlines else operation


def _limited(scope: Scope, operation: Operation[T]) -> Operation[T]:
    execution = scope.execution
    try:
        want = next(operation)
        while True:
            wait = want if type(want) is Wait else want.instead_of if type(want) is Pause else None
            if wait is not None and _may_end(execution, wait):
                limit = _nearest(scope)
                left = limit - execution.shared_clock_us()
                if left <= 0:
                    over = yield from _give_up(scope, wait)
                    if over is None:  # its question was answered after all: let it look again
                        want = operation.send(None)
                        continue
                    operation.close()
                    raise over
                if type(want) is Pause:
                    want = Pause(min(want.seconds, left / 1e6))
                else:
                    want = Pause(left / 1e6) if left <= execution.ctx.linger_s * 1e6 else _until(wait, limit)
            try:
                answer = yield want
            except BaseException as error:
                want = operation.throw(error)
            else:
                want = operation.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _may_end(execution: Execution, wait: Wait) -> bool:
    """Return whether a deadline ends this wait.

    It does not end the wait of an effect under way, whose outcome must still be settled. An effect that has failed for
    certain and waits for its next attempt is not under way.
    """
    if wait.kind is None or not wait.kind.ends_at_deadline:
        return False
    rows = execution.index.at(wait.path)
    return all(recorded.kind != INTENT for recorded in rows) or rows[-1].kind == FAILED


def _until(wait: Wait, limit: int) -> Wait:
    return Wait(wait.path, wait.what, limit if wait.wake_at is None else min(limit, wait.wake_at), wait.kind)


def _give_up(scope: Scope, wait: Wait) -> Operation[TimedOut | None]:
    """Record that a deadline has ended a waiting call, for good and also on replay, and return the error.

    Return None, and record nothing, if the call's question was answered meanwhile.
    """
    from perdure.runs.calls.asks import Answered, give_up_ask

    execution, path, kind = scope.execution, wait.path, wait.kind
    assert kind is not None
    recorded = execution.index.at(path)
    first = recorded[0].entry if recorded else Entry(path, kind.name, 0)
    error = _over(path)
    extra: dict[str, Any] = {"error": describe_error(error, execution.ctx.codec)}
    entry = Entry(path, first.name, execution.ctx.clock_us(), first.args_hash, first.attempt, extra=extra)
    if kind.settled_by != "answer":
        yield from execution.journal.record((DONE, entry))
        return error
    try:
        yield from execution.journal.commit(partial(give_up_ask, execution, path), (DONE, entry))
    except Answered:
        return None
    return error


def _nearest(scope: Scope) -> int:
    """Return the time at which the first deadline of a branch passes."""
    return min(due for _, due in scope.deadlines)


def _over(path: str) -> TimedOut:
    return TimedOut(f"the time that perdure.timeout gave is over (at step {path})")
