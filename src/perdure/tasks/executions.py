"""The executions of tasks in this process, and how their runs end.

A task that needs a person to settle an effect cannot be finished, even if its code handled the error. Otherwise a model
that reads of an unknown outcome would repeat the booking.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import InDoubt, LeaseLost, RunStuck
from perdure.log.turns import Turn
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.thread_answers import GRAPH
from perdure.storage.events import event
from perdure.storage.program import Statement
from perdure.tasks import rows
from perdure.threads import line_saves
from perdure.threads.context import StoreContext

if TYPE_CHECKING:
    from perdure.tasks.policy import TaskPolicy

_log = logging.getLogger("perdure")
_EXECUTIONS_MAX = 4096  # beyond this number, the oldest executions that never ended are dropped

lock = threading.Lock()
_executions: OrderedDict[int, TaskPolicy] = OrderedDict()  # by the id() of `TaskPolicy.alive`
_threads: dict[tuple[int, str, str], list[TaskPolicy]] = {}  # by database, tenant and thread, the newest last


def find_or_add(alive: Any, make: Callable[[], TaskPolicy]) -> TaskPolicy:
    """Return the policy of the execution that the object `alive` identifies; create it on the first call."""
    with lock:
        known = _executions.get(id(alive))
    if known is not None:
        return known
    policy = make()
    with lock:
        known = _executions.setdefault(id(alive), policy)
        if known is policy:
            beside = _threads.setdefault(policy.place, [])
            for other in [other for other in beside if other.task.id == policy.task.id]:
                other.unsettled = None  # the task runs again, and will itself raise what must be settled
                if other.is_finished:
                    _forget(other)
            _threads.setdefault(policy.place, beside).append(policy)
        while len(_executions) > _EXECUTIONS_MAX:
            _forget(next(iter(_executions.values())))
        return known


def _forget(policy: TaskPolicy) -> None:
    """Drop an execution. The caller holds the lock."""
    _executions.pop(id(policy.alive), None)
    beside = _threads.get(policy.place, [])
    if policy in beside:
        beside.remove(policy)
    if not beside:
        _threads.pop(policy.place, None)


def _in_thread(ctx: StoreContext, thread: str) -> list[TaskPolicy]:
    with lock:
        return list(_threads.get((id(ctx.driver), ctx.tenant_name, thread), ()))


def is_busy_elsewhere(policy: TaskPolicy) -> bool:
    """Return whether another execution of the same task is in the middle of a call, in this process."""
    beside = _in_thread(policy.task.ctx, policy.task.thread)
    return any(other is not policy and other.busy and other.task.id == policy.task.id for other in beside)


def is_any_busy(ctx: StoreContext, thread: str) -> bool:
    """Return whether a task of a thread is in the middle of a call, in this process."""
    return any(policy.busy for policy in _in_thread(ctx, thread))


def is_busy_on(ctx: StoreContext, thread: str, checkpoint: tuple[str, str]) -> bool:
    """Return whether a task of this checkpoint (namespace and id), or one nested in it, is in the middle of a call."""
    return any(policy.busy and checkpoint in policy.task.checkpoints for policy in _in_thread(ctx, thread))


def unsettled_in(
    ctx: StoreContext, thread: str, checkpoint: tuple[str, str] | None = None
) -> InDoubt | RunStuck | None:
    """Return the error that keeps a thread from continuing; None if there is none.

    With a `checkpoint` (namespace and id), only its tasks are considered.
    """
    for policy in _in_thread(ctx, thread) if _threads else ():
        if policy.unsettled is not None and checkpoint in (None, policy.task.checkpoints[-1]):
            return policy.unsettled
    return None


class TaskEnding(NamedTuple):
    """The end of a task's run, committed with the task's writes. If there is an `error`, they must not be stored."""

    policy: TaskPolicy
    statement: Statement
    error: InDoubt | RunStuck | None = None

    def finish(self) -> None:
        """Mark the execution, whose writes are stored, as finished. Drop it unless a person must settle something."""
        with lock:
            if self.policy.unsettled is None:
                _forget(self.policy)
            self.policy.is_finished = True


def ending(ctx: StoreContext, thread: str, task: str, is_over: bool) -> TaskEnding | None:
    """Return the end of a task whose writes are about to be stored; None if it has called no step or effect.

    Also None if the task is finished or in the middle of a call. `is_over` is False if it failed or stopped to ask.
    """
    policy = next((one for one in reversed(_in_thread(ctx, thread)) if one.task.id == task), None)
    if policy is None or policy.is_finished or not policy.has_run or policy.busy:
        return None
    execution = policy.scope.execution
    for recorded in policy.forgotten() if is_over and not execution.waits else ():
        _log.warning(
            "run %s: an earlier run of this task called %s with other arguments (step %s, key %s), and this one did "
            "not: make a step of what decides them, else it may be done twice",
            execution.row.id,
            recorded.entry.name,
            recorded.entry.path,
            (recorded.entry.extra or {}).get("key"),
            extra=event("effect.forgotten", run=execution.row.id, step=recorded.entry.path),
        )
    waiting = None
    if execution.waits or not is_over:
        waiting = (execution.waits[-1].what if execution.waits else policy.asks_for or GRAPH).as_text()
    statement = rows.end(
        execution.token,
        execution.index.total(),
        done=waiting is None,
        waiting=waiting,
        now=ctx.clock_us(),
    )
    return TaskEnding(policy, statement, policy.unsettled if is_over else None)


class TaskTurns:
    """Single-writer ownership of a thread whose tasks run effects: one process at a time extends it."""

    def of(self, ctx: StoreContext, gone: str = "") -> Turn:
        return rows.turn_of(runtime_of(ctx).owner.known, gone)

    def is_dead(self, ctx: StoreContext, owner: str) -> bool:
        return runtime_of(ctx).owner.is_dead(owner)

    def refuse(self, ctx: StoreContext, name: str) -> LeaseLost:
        return runs_elsewhere(ctx, name)


def runs_elsewhere(ctx: StoreContext, name: str) -> LeaseLost:
    """Return the error for a run that begins while another run is at a step or an effect of the thread."""
    return LeaseLost(
        f"thread {name!r} is being run by another process, or another thread of this one, which is at a step or an "
        "effect: nothing was done; run it again when that has ended. If it hangs, or was killed, the thread is free "
        f"{runtime_of(ctx).lease_us / 1e6:g} seconds (lease_s) after the first step or effect of its node"
    )


line_saves.turns = TaskTurns()
