"""Replay: run a run's code and answer every call from its journal. No body runs, nothing is written or claimed.

The replay ends at the first call that is not recorded, and reports its path. Code outside of steps really runs: a
durable function with side effects of its own has them in a replay too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from perdure.errors import NonDeterministic, PerdureError, UsageError
from perdure.runs.calls import saga
from perdure.runs.calls.failures import line_of
from perdure.runs.engine.execute import _main as call_function
from perdure.runs.engine.execute import prepare
from perdure.runs.engine.local import LocalExecution
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Body, Operation, Parked
from perdure.runs.execution.replay_order import REFUSAL_S
from perdure.runs.execution.unwinds import ContinueAsNew, Undo
from perdure.runs.functions.specs import DurableSpec, find_durable
from perdure.runs.journal.rows import ENDS
from perdure.runs.run_table import RunRow
from perdure.threads.context import StoreContext

_GRACE_S = 1.0  # how long other branches of an async run may continue after one reached an unrecorded call
_TICK_S = 0.05


class Replay(msgspec.Struct, frozen=True):
    """How far a replay came. `result` and `error` are those of the function, if it ended."""

    run: str
    status: str  # "complete", or "stopped at step 5 (book)"
    answered: int  # how many calls were answered from the journal
    result: Any = None
    error: BaseException | None = None
    path: str | None = None  # of the first call that is not recorded, or None
    name: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.path is None


def spec_for(row: RunRow, fn: Callable[..., Any] | None) -> DurableSpec:
    """Return the code to replay with: `fn`, or the function that this process knows by the name in the run."""
    if fn is not None:
        spec = getattr(fn, "perdure_durable", None)
        return spec if isinstance(spec, DurableSpec) else DurableSpec(fn, row.function)
    known = find_durable(row.function)
    if known is None:
        raise UsageError(
            f"run {row.id!r} is a run of {row.function}, which this process does not know: import its module, or pass "
            "the function: replay(run, fn)"
        )
    return known


class ReplayRunner(LocalExecution[Replay]):
    """One replay. Raises NonDeterministic if the code diverges from its journal."""

    def __init__(
        self, ctx: StoreContext, tenant: int, row: RunRow, spec: DurableSpec, *, as_resumed: bool = False
    ) -> None:
        context = ctx.seen_from(spec.fn.__module__)
        super().__init__(Execution(context, tenant, row, is_async=spec.is_async, replay=True), spec)
        self._as_resumed = as_resumed  # like a worker, do not call the function of a run that is being undone
        self.execution.on_replay_end = self._arm
        self._gave_up = False  # True: unrecorded work was still under way, which may have led to recorded calls

    def _operation(self) -> Operation[Replay]:
        execution, spec = self.execution, self.spec
        arguments = yield from prepare(execution, None)
        args, kwargs = spec.binder.restore(arguments)
        if self._as_resumed and (saga.ending(execution) is not None or execution.row.request in ENDS):
            return Replay(execution.row.id, "being undone", 0)
        result: Any = None
        failure: BaseException | None = None
        try:
            result = yield Body(partial(call_function, execution, spec, args, kwargs), is_async=spec.is_async)
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
        return self._verdict(result, failure)

    def _verdict(self, result: Any, failure: BaseException | None) -> Replay:
        execution = self.execution
        run, answered, end = execution.row.id, execution.index.answered, execution.replay_end
        for error in (execution.stop, failure):
            if isinstance(error, NonDeterministic):
                raise error
        if end is not None:
            if execution.index.effects_ahead and not self._gave_up:
                raise execution.passed_by(f"{end.name}() at step {end.path}", can_wait=True)
            return Replay(run, f"stopped at step {end.path} ({end.name})", answered, path=end.path, name=end.name)
        if isinstance(execution.stop, PerdureError):
            raise execution.stop
        if isinstance(execution.stop, ContinueAsNew | Undo):
            return Replay(run, "complete", answered)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        # Only calls outside of branches: a branch that lost a race is not replayed.
        left = [path for path in execution.index.below("") if "." not in path]
        if left:
            name = execution.index.at(left[0])[0].entry.name
            how = "the function ends" if failure is None else f"the function raises {line_of(failure)}"
            raise execution._differs(left[0], f"{name}()", how)
        return Replay(run, "complete", answered, result, failure)

    # --- async: the code may wait forever for a branch that ended at an unrecorded call

    def _arm(self) -> None:
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        loop.call_later(_GRACE_S, self._give_up, loop, loop.time())

    def _give_up(self, loop: Any, since: float) -> None:
        execution = self.execution
        if not execution.alive:
            return
        if execution.index.effects_ahead and execution.stop is None:
            self._gave_up = not execution.supervisor.is_idle(execution.supervisor.order.waiting)
            if self._gave_up and loop.time() - since < REFUSAL_S:
                loop.call_later(_TICK_S, self._give_up, loop, since)
                return
        execution.stop = execution.stop or Parked()
        if execution.on_stop is not None:
            execution.on_stop()
        loop.call_later(_TICK_S, self._give_up, loop, since)
