"""`CallPolicy`: how the calls of an execution find their records, wait and ask for approval.

This is the policy of runs, whose code Perdure restarts from the top. `perdure.tasks` has the policy of code that
another framework restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import NotApproved
from perdure.runs.execution.matching import matched
from perdure.runs.execution.operation import Operation
from perdure.runs.journal.entries import Entry, Recorded, completion

if TYPE_CHECKING:
    from perdure.runs.calls.asks import CheckedQuestion
    from perdure.runs.execution.operation import Wait
    from perdure.runs.execution.scope import Scope
    from perdure.runs.functions.specs import StepSpec

T = TypeVar("T")


class CallPolicy:
    """The policy of a run."""

    is_run = True  # False: the journal has only the calls; the code around them belongs to another framework
    definite: tuple[type[BaseException], ...] = ()  # errors after which a body runs again, because nothing happened

    def whole(self, operation: Operation[T]) -> Operation[T]:
        """Wrap the operation of a call of user code. A subclass may add work before and after it."""
        return operation

    def path(self, scope: Scope, spec: StepSpec, args_hash: bytes, *, is_effect: bool) -> Operation[str]:
        """Return the path of the next call: its number, or in a replay the path of the recorded call it matches."""
        path = scope.take()
        if scope.execution.index.ahead:
            path = yield from matched(scope, path, spec.name, args_hash, is_effect=is_effect)
        return path

    def end(self, recorded: Sequence[Recorded]) -> Entry | None:
        """Return the recorded end of a call; None if the call must be made, or made again."""
        return completion(recorded)

    def approval(self, scope: Scope, path: str, asked: CheckedQuestion) -> Operation[Any]:
        """Ask whether an effect may run, and return the answer."""
        from perdure.runs.calls.asks import APPROVE, question_at  # imported late: it is above this module

        return question_at(scope, path, asked, APPROVE)

    def declined(self, text: str) -> NotApproved:
        """Return the error of an effect that a person did not approve."""
        return NotApproved(text)

    def wait_s(self, scope: Scope, wait: Wait) -> float | None:
        """Return how long to wait in this process, in seconds; None if the run parks instead."""
        del scope, wait
        return None
