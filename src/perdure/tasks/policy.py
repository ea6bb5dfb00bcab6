"""`TaskPolicy`: calls of steps and effects in a task of another framework.

A task's id follows from its stored checkpoints, so a task that runs again after a crash finds its records. The first
call of a task waits until they are stored: no effect may run under an identity that a rerun would not have. Nothing
parks: short waits block, and a doubt that a person must settle raises `InDoubt`. Calls are identified by name and
arguments, not by order, because frameworks run tools in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from perdure.errors import InDoubt, NotApproved, PerdureError, RunStuck, RunUndone, UsageError
from perdure.log.label_ids import pack_id
from perdure.log.labels import find_named, is_newest, second_writer
from perdure.log.thread_table import try_thread
from perdure.runs.calls import saga
from perdure.runs.calls.asks import CheckedQuestion
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.thread_answers import TASKS_QUEUE
from perdure.runs.engine.waiting import how_to_answer, how_to_resolve
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, Pause, Wait
from perdure.runs.execution.policy import CallPolicy
from perdure.runs.execution.scope import Scope
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal.entries import INTENT, Entry, Recorded, completion
from perdure.runs.journal.index import JournalIndex
from perdure.runs.journal.journal import read_with_sum
from perdure.runs.journal.rows import TASK, FenceToken, NewRun
from perdure.runs.run_table import RunRow, Waiting
from perdure.storage.program import Batch, Program, Rows, read
from perdure.tasks import rows
from perdure.tasks.approvals import Approvals, Questions
from perdure.tasks.executions import (
    find_or_add,
    is_busy_elsewhere,
    lock,
    runs_elsewhere,
    unsettled_in,
)
from perdure.threads.context import StoreContext

_LOOK_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
_STORED_S = 30.0  # how long a checkpoint may take to be stored
_BUSY_S = 10.0  # how long to wait for calls that an earlier execution of the task left running
_NOT_YET = RunRow._make([None] * len(RunRow._fields))


class Task(NamedTuple):
    """A task of another framework's graph or workflow."""

    ctx: StoreContext
    thread: str
    id: str
    name: str  # of the node or function
    run_id: str
    checkpoints: tuple[tuple[str, str], ...]  # its id follows from these pairs of namespace and id, the outermost first
    free: frozenset[str]  # ids of checkpoints that may be continued even if they are not the newest
    refusal: Callable[[], PerdureError | None]  # returns why its checkpoint will never be stored, or None
    definite: tuple[type[BaseException], ...] = ()  # errors that end a task which then runs again from its start
    questions: Questions | None = None  # how its framework asks people
    declined: Callable[[str], NotApproved] = NotApproved  # makes the error of an effect that was not approved


def scope_of(alive: Any, describe: Callable[[], Task]) -> Scope:
    """Return the scope of the execution that the object `alive` identifies; create it on the first call."""
    return find_or_add(alive, lambda: TaskPolicy(describe(), alive)).scope


class TaskPolicy(CallPolicy):
    """The policy of the calls in one execution of a task. A path is a name, a hash of the arguments and a count."""

    is_run = False

    def __init__(self, task: Task, alive: Any) -> None:
        lease_us = runtime_of(task.ctx).lease_us
        self.scope = Scope(Execution(task.ctx, 0, _NOT_YET, is_async=False, lease_us=lease_us), is_async=False)
        self.scope.execution.policy = self
        self.task, self.definite = task, task.definite
        self.place = (id(task.ctx.driver), task.ctx.tenant_name, task.thread)
        self.alive = alive  # its id() identifies the execution, so it must not be freed
        self.busy = 0  # calls under way
        self.unsettled: InDoubt | RunStuck | None = None
        self.has_run = self.is_finished = False
        self._approvals = None if task.questions is None else Approvals(task.questions, task.definite)
        self._counts: dict[str, int] = {}
        self._is_opening = self._is_asking = False

    @property
    def asks_for(self) -> Waiting | None:
        """The approval that the task has stopped for, as the run's row shows it; None if there is none."""
        return None if self._approvals is None else self._approvals.asks_for

    def whole(self, operation: Operation[Any]) -> Operation[Any]:
        with lock:
            self.busy += 1
        try:
            yield from self._open()
            return (yield from operation)
        except (InDoubt, RunStuck) as error:
            if self.scope.execution.waits:
                self.unsettled = error
            raise
        finally:
            with lock:
                self.busy -= 1

    def path(self, scope: Scope, spec: StepSpec, args_hash: bytes, *, is_effect: bool) -> Operation[str]:
        call = f"{spec.name}-{args_hash.hex()}"
        with lock:
            number = self._counts[call] = self._counts.get(call, 0) + 1
        path = f"{call}-{number}"
        if spec.approve and self._approvals is not None:
            yield from self._approvals.passed(scope.execution, f"{path}~approve")
        return path

    def end(self, recorded: Sequence[Recorded]) -> Entry | None:
        # The framework runs the code again after an error. So an error is no end, except InDoubt by on_doubt="fail".
        ended = completion(recorded)
        extra = (ended.extra or {}) if ended is not None else {}
        return None if "error" in extra and not extra.get("doubt") else ended

    def approval(self, scope: Scope, path: str, asked: CheckedQuestion) -> Operation[Any]:
        if self._approvals is None:
            return (yield from super().approval(scope, path, asked))
        while True:  # one at a time, because the framework returns answers in order
            with lock:
                is_ours, self._is_asking = not self._is_asking, True
            if is_ours:
                break
            yield Pause(_LOOK_S[0])
        try:
            return (yield from self._approvals.approval(scope, path, asked))
        finally:
            self._is_asking = False

    def declined(self, text: str) -> NotApproved:
        return self.task.declined(text)

    def wait_s(self, scope: Scope, wait: Wait) -> float:
        return seconds_to_wait(scope, wait, "run the graph again")

    def forgotten(self) -> list[Recorded]:
        """Return the effects that an earlier execution began and this one did not call."""
        taken = {f"{call}-{number + 1}" for call, count in self._counts.items() for number in range(count)}
        begun = (recorded[0] for path, recorded in self.scope.execution.index.calls() if path not in taken)
        return [recorded for recorded in begun if recorded.kind == INTENT]

    def _open(self) -> Operation[None]:
        """Take the run once. Of simultaneous calls, one takes it and the others wait."""
        pauses = iter(_LOOK_S)
        while not self.has_run:
            with lock:
                is_ours = not self._is_opening
                self._is_opening = True
            if not is_ours:
                yield Pause(next(pauses, _LOOK_S[-1]))
                continue
            try:
                yield from _take(self)
                self.has_run = True
            finally:
                self._is_opening = False

    def adopt(self, tenant: int, row: RunRow) -> None:
        """Let this execution use the run that represents the task."""
        execution = self.scope.execution
        execution.tenant, execution.row, execution.token = tenant, row, FenceToken(tenant, row.run, row.fence)
        execution.index = JournalIndex()
        execution.set_clock()


def seconds_to_wait(scope: Scope, wait: Wait, then: str) -> float:
    """Return how many seconds to wait in this process. Raises InDoubt or RunStuck if a person is needed.

    `then` is what to do after the person has answered.
    """
    execution = scope.execution
    if wait.wake_at is not None and not wait.what.settled_by:
        return max(0.0, (wait.wake_at - execution.shared_clock_us()) / 1e6)
    execution.waits.append(wait)
    driver, run, step = execution.ctx.driver, execution.row.id, wait.what.step or wait.path
    if wait.what.settled_by != "resolve":
        raise RunStuck(f"{wait.what.text} There is no answer yet: {how_to_answer(driver, run, wait.path)}; then {then}")
    raise InDoubt(
        f"it is not known whether {wait.what.name} happened (step {step} of {run!r}, key "
        f"{wait.what.key}). Look at the receiver, then say which: {how_to_resolve(driver, run, step)}; then {then}",
        run=run,
        step=step,
        key=wait.what.key,
    )


# --- taking the run of a task


def _take(policy: TaskPolicy) -> Operation[None]:
    """Wait until the task's checkpoint is stored, then take the run that represents the task and read its journal."""
    task = policy.task
    ctx = task.ctx
    tenant = yield from ctx.ensure_tenant()
    thread = yield from _stored(policy, tenant)
    runtime = runtime_of(ctx)

    def is_dead(owner: str) -> bool:
        # This process has run the task before, and is done with it unless one of its calls is still under way.
        return not is_busy_elsewhere(policy) if runtime.owns(owner) else runtime.owner.is_dead(owner)

    # A tool that fails ends its task while other tools of the task may still run.
    until, pauses = monotonic() + _BUSY_S, iter(_LOOK_S)
    while is_busy_elsewhere(policy) and monotonic() < until:
        yield Pause(next(pauses, _LOOK_S[-1]))
    function = f"{TASK}{task.name}"
    new = NewRun(task.run_id, function, "any", b"{}", b"", ctx.entropy(16), TASKS_QUEUE, root=thread)
    row = yield from rows.take(
        rows.NewTask(tenant, thread, new, partial(_check_newest, tenant, thread, task)),
        owner=runtime.owner.text,
        lease_us=policy.scope.execution.lease_us,
        clock_us=ctx.clock_us,
        is_dead=is_dead,
    )
    if row is None:
        raise runs_elsewhere(ctx, task.thread)
    policy.adopt(tenant, row)
    policy.scope.execution.index.load(*(yield from read(partial(read_with_sum, tenant, row))))
    if saga.ending(policy.scope.execution) is not None:
        raise RunUndone(
            f"the effects of thread {task.thread!r} were undone, or an undo was broken off: undo it to the end, then "
            "invoke the graph with a new input"
        )


def _check_newest(tenant: int, thread: int, task: Task, head: int | None) -> Generator[Batch, list[Rows], None]:
    """Raise if the thread was already continued from one of the task's checkpoints: the task is outdated then."""
    for namespace, id_ in task.checkpoints:
        if id_ not in task.free and not (yield from is_newest(tenant, thread, head, namespace, pack_id(id_))):
            raise second_writer(task.thread, namespace)


def _stored(policy: TaskPolicy, tenant: int) -> Operation[int]:
    """Wait until the checkpoints that a task's id follows from are stored. Return the thread's number."""
    task = policy.task
    until = monotonic() + _STORED_S
    pauses = iter(_LOOK_S)
    while True:
        thread = yield from read(partial(_find, tenant, task))
        if thread is not None:
            return int(thread)
        if (error := unsettled_in(task.ctx, task.thread)) is not None:
            raise error  # an earlier task cannot be finished, so this one's checkpoint will never be stored
        if (refusal := task.refusal()) is not None:
            raise refusal
        if monotonic() > until:
            raise UsageError(
                f"the checkpoint of this task of thread {task.thread!r} is not stored after {_STORED_S:.0f} seconds: "
                "was the thread deleted, is the database away, or does a blocking call hold up the event loop?"
            )
        yield Pause(next(pauses, _LOOK_S[-1]))


def _find(tenant: int, task: Task) -> Program[int | None]:
    row = yield from try_thread(tenant, task.thread)
    if row is None:
        return None
    for name, id_ in task.checkpoints:
        if (yield from find_named(tenant, row.thread, name, pack_id(id_))) is None:
            return None
    return row.thread
