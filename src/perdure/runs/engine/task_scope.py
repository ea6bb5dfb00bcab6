"""Steps and effects inside a task of another framework: its thread, its checkpoints and its id stand for the run.

A task's id follows from its checkpoints, so a task that runs again after a crash finds what it has recorded. That holds
only for checkpoints that are stored: the first step or effect of a task waits until they are. Nothing parks: a short
wait is waited for, and a doubt that a person must settle is raised as `InDoubt`. Calls are told apart by name and
arguments, not by order, because frameworks run tools in parallel.

An adapter finds the scope of a task by its execution (`scope_of`), and finishes its run with what the task wrote
(`ending`). A task that left a person something to settle cannot be finished, whatever its code made of the
error: else a model that reads of an unknown outcome would book again.

Must never happen here: an effect that runs under an identity which the next run of the task would not have.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import orjson

from perdure.errors import InDoubt, LeaseLost, PerdureError, RunStuck, UsageError
from perdure.log.label_ids import pack_id
from perdure.log.labels import find_named, is_newest, second_writer
from perdure.log.thread_table import try_thread
from perdure.log.turns import Turn
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.execution.execution import LEASE_US, Execution
from perdure.runs.execution.operation import Operation, Pause
from perdure.runs.execution.scope import Asking, Questions, Scope
from perdure.runs.journal import adapter_tasks
from perdure.runs.journal.entries import INTENT, Recorded
from perdure.runs.journal.index import JournalIndex
from perdure.runs.journal.journal import read_with_sum
from perdure.runs.journal.rows import TASK, FenceToken, NewRun, RunRow
from perdure.storage.events import event
from perdure.storage.program import Batch, Program, Rows, Statement, read
from perdure.threads import line_saves
from perdure.threads.context import StoreContext

_log = logging.getLogger("perdure")
_LOOK_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
_STORED_S = 30.0  # how long a checkpoint may take to be stored
_BUSY_S = 10.0  # how long calls that an earlier execution of the task has left behind may take
_EXECUTIONS_MAX = 4096  # only those that never came to an end are left behind
_NOT_YET = RunRow._make([None] * len(RunRow._fields))
TaskExecution = tuple[int, int]  # what identifies one execution of a task in this process


class Task(NamedTuple):
    """A task of another framework's graph or workflow."""

    ctx: StoreContext
    thread: str
    id: str
    name: str  # of the node or function
    run_id: str
    checkpoints: tuple[tuple[str, str], ...]  # those that its id follows from: namespace and id, the outermost first
    free: frozenset[str]  # those that may be continued though they are not the newest
    refusal: Callable[[], PerdureError | None]  # why its checkpoint will never be stored
    definite: tuple[type[BaseException], ...] = ()  # what ends a body that runs again from its top
    questions: Questions | None = None  # how its framework asks people


class TaskTurns:
    """Which process may extend a thread whose tasks run effects: one at a time."""

    def of(self, ctx: StoreContext, gone: str = "") -> Turn:
        return adapter_tasks.turn_of(runtime_of(ctx).owner.known, gone)

    def is_dead(self, ctx: StoreContext, owner: str) -> bool:
        return runtime_of(ctx).owner.is_dead(owner)

    def refuse(self, name: str) -> LeaseLost:
        return is_run_elsewhere(name)


def is_run_elsewhere(name: str) -> LeaseLost:
    """What a run gets that begins while another one is at a step or an effect of the thread."""
    return LeaseLost(
        f"thread {name!r} is being run by another process, or another thread of this one, which is at a step or an "
        "effect: nothing was done; run it again when that has ended. If it hangs, the thread is free "
        f"{LEASE_US // 1_000_000} seconds after its last step, or when its effect's time is over"
    )


class TaskScope(Scope):
    """One execution of a task: paths are names and arguments, with a count for equal calls."""

    __slots__ = ("_alone", "_counts", "_is_open", "_opening", "alive", "asking", "busy", "definite", "identity",
                 "is_finished", "place", "task", "unsettled")  # fmt: skip

    def __init__(self, identity: TaskExecution, task: Task, alive: Any) -> None:
        execution = Execution(task.ctx, 0, _NOT_YET, is_async=False)
        execution.can_park = False
        super().__init__(execution, is_async=False)
        self.identity, self.task = identity, task
        self.place = (id(task.ctx.driver), task.ctx.tenant_name, task.thread)
        self.definite = task.definite
        self.asking = None if task.questions is None else Asking(task.questions)
        self.alive = alive  # an object whose identity is the execution's: it must not be freed
        self.busy = 0  # calls under way
        self.unsettled: InDoubt | RunStuck | None = None
        self._counts: dict[str, int] = {}
        self._opening = self._alone = self._is_open = self.is_finished = False

    def take_for(self, name: str, args_hash: bytes) -> str:
        call = f"{name}-{args_hash.hex()}"
        with _lock:
            number = self._counts[call] = self._counts.get(call, 0) + 1
        return f"{call}-{number}"

    def around(self, operation: Operation[Any]) -> Operation[Any]:
        with _lock:
            self.busy += 1
        try:
            yield from self._open()
            return (yield from operation)
        except (InDoubt, RunStuck) as error:
            if self.execution.waits:
                self.unsettled = error
            raise
        finally:
            with _lock:
                self.busy -= 1

    def alone(self, operation: Operation[Any]) -> Operation[Any]:
        while True:
            with _lock:
                is_ours, self._alone = not self._alone, True
            if is_ours:
                break
            yield Pause(_LOOK_S[0])
        try:
            return (yield from operation)
        finally:
            self._alone = False

    def _open(self) -> Operation[None]:
        """Take the run, once: of calls that come at the same time one does it, and the others wait."""
        pauses = iter(_LOOK_S)
        while not self._is_open:
            with _lock:
                is_ours = not self._opening
                self._opening = True
            if not is_ours:
                yield Pause(next(pauses, _LOOK_S[-1]))
                continue
            try:
                yield from _take(self)
                self._is_open = True
            finally:
                self._opening = False

    def adopt(self, tenant: int, row: RunRow) -> None:
        """The run that stands for the task is ours from here on."""
        execution = self.execution
        execution.tenant, execution.row, execution.token = tenant, row, FenceToken(tenant, row.run, row.fence)
        execution.index = JournalIndex()
        execution.set_clock()

    @property
    def has_run(self) -> bool:
        return self._is_open

    def forgotten(self) -> list[Recorded]:
        """Effects that an earlier execution has begun, and that this one did not ask for."""
        taken = {f"{call}-{number + 1}" for call, count in self._counts.items() for number in range(count)}
        begun = (found[0] for path, found in self.execution.index.calls() if path not in taken)
        return [recorded for recorded in begun if recorded.kind == INTENT]


class TaskEnding(NamedTuple):
    """What becomes of a task's run when its writes are stored; `error`: they must not be."""

    scope: TaskScope
    statement: Statement
    error: InDoubt | RunStuck | None = None

    def finish(self) -> None:
        """The task's writes are stored: its scope is not needed any more, unless a person must settle something."""
        with _lock:
            if self.scope.unsettled is None:
                _forget(self.scope)
            self.scope.is_finished = True


_lock = threading.Lock()
_scopes: OrderedDict[TaskExecution, TaskScope] = OrderedDict()
_threads: dict[tuple[int, str, str], list[TaskScope]] = {}  # by database, tenant and thread, the newest last


def _in_thread(ctx: StoreContext, thread: str) -> list[TaskScope]:
    with _lock:
        return list(_threads.get((id(ctx.driver), ctx.tenant_name, thread), ()))


def scope_of(execution: TaskExecution, describe: Callable[[], Task], alive: Any) -> TaskScope:
    """The scope of an execution, which `alive` identifies; made by its first call."""
    with _lock:
        found = _scopes.get(execution)
    if found is not None:
        return found
    scope = TaskScope(execution, describe(), alive)
    with _lock:
        found = _scopes.setdefault(execution, scope)
        if found is scope:
            beside = _threads.setdefault(scope.place, [])
            for other in [other for other in beside if other.task.id == scope.task.id]:
                other.unsettled = None  # the task runs again, and says itself what is to be settled
                if other.is_finished:
                    _forget(other)
            _threads.setdefault(scope.place, beside).append(scope)
        while len(_scopes) > _EXECUTIONS_MAX:
            _forget(next(iter(_scopes.values())))
        return found


def _forget(scope: TaskScope) -> None:
    """With the lock held."""
    _scopes.pop(scope.identity, None)
    beside = _threads.get(scope.place, [])
    if scope in beside:
        beside.remove(scope)
    if not beside:
        _threads.pop(scope.place, None)


def is_busy_elsewhere(scope: TaskScope) -> bool:
    """Whether another execution of the same task is in the middle of a call, in this process."""
    beside = _in_thread(scope.task.ctx, scope.task.thread)
    return any(other is not scope and other.busy and other.task.id == scope.task.id for other in beside)


def is_busy_on(ctx: StoreContext, thread: str, checkpoint: tuple[str, str]) -> bool:
    """Whether a task of this checkpoint (namespace and id), or one nested in it, is in the middle of a call."""
    return any(scope.busy and checkpoint in scope.task.checkpoints for scope in _in_thread(ctx, thread))


def unsettled_in(
    ctx: StoreContext, thread: str, checkpoint: tuple[str, str] | None = None
) -> InDoubt | RunStuck | None:
    """What keeps a thread from continuing: of the tasks of one checkpoint (namespace and id), or of all of it."""
    for scope in _in_thread(ctx, thread) if _threads else ():
        if scope.unsettled is not None and checkpoint in (None, scope.task.checkpoints[-1]):
            return scope.unsettled
    return None


def ending(ctx: StoreContext, thread: str, task: str, is_over: bool, keep_us: int | None) -> TaskEnding | None:
    """The end of a task whose writes are about to be stored; None if it has called no step or effect. `is_over`: it
    has neither failed nor stopped for an answer."""
    scope = next((one for one in reversed(_in_thread(ctx, thread)) if one.task.id == task), None)
    if scope is None or scope.is_finished or not scope.has_run or scope.busy:
        return None
    waits = scope.execution.waits
    for recorded in scope.forgotten() if is_over and not waits else ():
        _log.warning(
            "run %s: an earlier run of this task called %s with other arguments (step %s, key %s), and this one did "
            "not: make a step of what decides them, else it may be done twice",
            scope.execution.row.id,
            recorded.entry.name,
            recorded.entry.path,
            (recorded.entry.extra or {}).get("key"),
            extra=event("effect.forgotten", run=scope.execution.row.id, step=recorded.entry.path),
        )
    waiting = None
    if waits or not is_over:
        asked = scope.asking.what if scope.asking is not None else None
        waiting = orjson.dumps(waits[-1].what if waits else asked or {"for": "graph"}).decode()
    statement = adapter_tasks.end(
        scope.execution.token,
        scope.execution.index.total(),
        done=waiting is None,
        waiting=waiting,
        keep_us=keep_us,
        now=ctx.clock_us(),
    )
    return TaskEnding(scope, statement, scope.unsettled if is_over else None)


# --- taking the run of a task


def _take(scope: TaskScope) -> Operation[None]:
    """Wait until the task's checkpoint is stored, then take the run that stands for it, and read what it has."""
    task = scope.task
    ctx = task.ctx
    tenant = yield from ctx.ensure_tenant()
    thread = yield from _stored(scope, tenant)
    runtime = runtime_of(ctx)

    def is_dead(owner: str) -> bool:
        # Our own process has run the task before; it is done with it, unless a call of it is under way right now.
        return not is_busy_elsewhere(scope) if runtime.owns(owner) else runtime.owner.is_dead(owner)

    # A tool that failed ends its task while the others that ran in parallel are not done yet.
    until, pauses = monotonic() + _BUSY_S, iter(_LOOK_S)
    while is_busy_elsewhere(scope) and monotonic() < until:
        yield Pause(next(pauses, _LOOK_S[-1]))
    function = f"{TASK}{task.name}"
    new = NewRun(task.run_id, function, "any", b"{}", b"", ctx.entropy(16), adapter_tasks.QUEUE, root=thread)
    row = yield from adapter_tasks.take(
        adapter_tasks.NewTask(tenant, thread, new, partial(_check_newest, tenant, thread, task)),
        owner=runtime.owner.text,
        lease_us=LEASE_US,
        clock_us=ctx.clock_us,
        is_dead=is_dead,
    )
    if row is None:
        raise is_run_elsewhere(task.thread)
    scope.adopt(tenant, row)
    scope.execution.index.load(*(yield from read(partial(read_with_sum, tenant, row))))


def _check_newest(tenant: int, thread: int, task: Task, head: int | None) -> Generator[Batch, list[Rows], None]:
    """Raise if the thread was continued from a task's checkpoint already: then the task is another one there."""
    for namespace, id_ in task.checkpoints:
        if id_ not in task.free and not (yield from is_newest(tenant, thread, head, namespace, pack_id(id_))):
            raise second_writer(task.thread, namespace)


def _stored(scope: TaskScope, tenant: int) -> Operation[int]:
    """Wait until the checkpoints that a task's id follows from are stored. The thread's number."""
    task = scope.task
    until = monotonic() + _STORED_S
    pauses = iter(_LOOK_S)
    while True:
        thread = yield from read(partial(_find, tenant, task))
        if thread is not None:
            return int(thread)
        if (error := unsettled_in(task.ctx, task.thread)) is not None:
            raise error  # a task before it cannot be finished, so that this one's checkpoint will never be stored
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


line_saves.turns = TaskTurns()
