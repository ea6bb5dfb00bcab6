"""The tasks of graphs that run in this process and have called a step or an effect.

A node finds its scope here by its execution, and the saver by the task whose writes it is given: with them the run that
stands for the task ends. A task that left a person something to settle cannot be finished, whatever its code made of
the error: else a model that is told "nobody knows" would book again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson
from langgraph.errors import GraphBubbleUp

from perdure.errors import InDoubt, RunStuck
from perdure.langgraph.travels import Journey
from perdure.runs.journal import graph_tasks
from perdure.runs.journal.entries import INTENT, Recorded
from perdure.runs.journal.index import JournalIndex
from perdure.runs.journal.rows import Hold, RunRow
from perdure.runs.session.acting import Act, Pause
from perdure.runs.session.scope import Scope
from perdure.runs.session.session import Session
from perdure.storage.events import event
from perdure.storage.program import Flow, Statement, write
from perdure.threads.context import Context

_log = logging.getLogger("perdure")
LOOK_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
_ID_MAX = 400
_EXECUTIONS_MAX = 4096  # only those that never came to an end are left behind
_LINES_MAX = 65_536
_UNFINISHED = ("__error__", "__interrupt__")
_NOT_YET = RunRow._make([None] * len(RunRow._fields))
Execution = tuple[int, int]  # a task's scratchpad, and which attempt of LangGraph's own retries it is


class Task(NamedTuple):
    """A task of a graph."""

    ctx: Context
    thread: str
    space: str  # the task's namespace: its graph's, its node and its id
    id: str
    checkpoints: tuple[tuple[str, str], ...]  # those that its id follows from: namespace and id, the outermost first
    asked: frozenset[bytes]  # those that its graph was told to go back to
    journey: Journey

    @property
    def node(self) -> str:
        return self.space.rpartition("|")[2].partition(":")[0]

    @property
    def run_id(self) -> str:
        run_id = f"langgraph/{self.thread}/{self.space}"
        if len(run_id) <= _ID_MAX:
            return run_id
        from blake3 import blake3

        return f"langgraph/{blake3(run_id.encode()).hexdigest()}"


class NodeScope(Scope):
    """One execution of a node: paths are names and arguments, with a count for equal calls."""

    __slots__ = ("_counts", "_is_open", "_opener", "_opening", "busy", "scratchpad", "task", "unsettled")
    definite = (GraphBubbleUp,)  # interrupt(): the body runs again from its top when the graph is resumed

    def __init__(self, task: Task, scratchpad: Any, opener: Callable[[NodeScope], Act[None]]) -> None:
        session = Session(task.ctx, 0, _NOT_YET, is_async=False)
        session.can_park = False
        super().__init__(session, is_async=False)
        self.task = task
        self.scratchpad = scratchpad  # kept alive: its identity is the execution's
        self.busy = 0  # calls under way
        self.unsettled: InDoubt | RunStuck | None = None
        self._counts: dict[str, int] = {}
        self._opener = opener
        self._opening = self._is_open = False

    def take_for(self, name: str, wanted: bytes) -> str:
        call = f"{name}-{wanted.hex()}"
        with _lock:
            number = self._counts[call] = self._counts.get(call, 0) + 1
        return f"{call}-{number}"

    def around(self, act: Act[Any]) -> Act[Any]:
        with _lock:
            self.busy += 1
        try:
            yield from self._open()
            return (yield from act)
        except (InDoubt, RunStuck) as error:
            if self.session.waits:
                self.unsettled = error
                _leave_unsettled(self)
            raise
        finally:
            with _lock:
                self.busy -= 1

    def _open(self) -> Act[None]:
        """Take the run, if nobody has: of the calls that come at once one does it, and the others wait."""
        pauses = iter(LOOK_S)
        while not self._is_open:
            with _lock:
                is_ours = not self._opening
                self._opening = True
            if not is_ours:
                yield Pause(next(pauses, LOOK_S[-1]))
                continue
            try:
                yield from self._opener(self)
                self._is_open = True
            finally:
                self._opening = False

    def adopt(self, tenant: int, row: RunRow) -> None:
        """The run that stands for the task is ours from here on."""
        session = self.session
        session.tenant, session.row, session.hold = tenant, row, Hold(tenant, row.run, row.fence)
        session.index = JournalIndex()

    @property
    def has_run(self) -> bool:
        return self._is_open

    def forgotten(self) -> list[Recorded]:
        """Effects that an earlier execution has begun, and that this one did not ask for."""
        taken = {f"{call}-{number + 1}" for call, count in self._counts.items() for number in range(count)}
        begun = (found[0] for path, found in self.session.index.calls() if path not in taken)
        return [recorded for recorded in begun if recorded.kind == INTENT]


class Ending(NamedTuple):
    """What becomes of a task's run when its writes are stored; `error`: they must not be."""

    scope: NodeScope
    statement: Statement
    error: InDoubt | RunStuck | None = None


_Place = tuple[int, str, str, str]  # the database, the tenant, the thread, and the task
_lock = threading.Lock()
_by_execution: OrderedDict[Execution, NodeScope] = OrderedDict()
_by_task: OrderedDict[_Place, NodeScope] = OrderedDict()  # the newest execution of each
_unsettled: OrderedDict[_Place, NodeScope] = OrderedDict()


def _place(ctx: Context, thread: str, task: str) -> _Place:
    return id(ctx.driver), ctx.tenant_name, thread, task


def find(execution: Execution) -> NodeScope | None:
    with _lock:
        return _by_execution.get(execution)


def add(execution: Execution, scope: NodeScope) -> NodeScope:
    """The scope of an execution: this one, unless another call was faster."""
    place = _place(scope.task.ctx, scope.task.thread, scope.task.id)
    with _lock:
        known = _by_execution.setdefault(execution, scope)
        if known is scope:
            _by_task[place] = scope
            _unsettled.pop(place, None)
        for table in (_by_execution, _by_task):
            while len(table) > _EXECUTIONS_MAX:
                table.popitem(last=False)
        return known


def is_busy_elsewhere(scope: NodeScope) -> bool:
    """Whether another execution of the same task is in the middle of a call, in this process."""
    place = _place(scope.task.ctx, scope.task.thread, scope.task.id)
    with _lock:
        return any(
            other is not scope and other.busy and _place(other.task.ctx, other.task.thread, other.task.id) == place
            for other in _by_execution.values()
        )


def is_busy_on(ctx: Context, thread: str, checkpoint: tuple[str, str]) -> bool:
    """Whether a task of this checkpoint (namespace and id), or of a subgraph in one, is in the middle of a call."""
    place = _place(ctx, thread, "")[:3]
    with _lock:
        return any(
            scope.busy
            and checkpoint in scope.task.checkpoints
            and _place(scope.task.ctx, scope.task.thread, "")[:3] == place
            for scope in _by_execution.values()
        )


def _leave_unsettled(scope: NodeScope) -> None:
    with _lock:
        _unsettled[_place(scope.task.ctx, scope.task.thread, scope.task.id)] = scope
        while len(_unsettled) > _EXECUTIONS_MAX:
            _unsettled.popitem(last=False)


def unsettled_in(ctx: Context, thread: str, checkpoint: tuple[str, str] | None = None) -> InDoubt | RunStuck | None:
    """What keeps a graph from going on: of the tasks of one checkpoint (namespace and id), or of all of a thread."""
    if not _unsettled:
        return None
    with _lock:
        for place, scope in _unsettled.items():
            if place[:3] == _place(ctx, thread, "")[:3] and checkpoint in (None, scope.task.checkpoints[-1]):
                return scope.unsettled
    return None


def ending(
    ctx: Context, thread: str, task: str, writes: Sequence[tuple[str, Any]], keep_us: int | None
) -> Ending | None:
    """The end of a task whose writes are about to be stored; None if it has called no step or effect."""
    with _lock:
        scope = _by_task.get(_place(ctx, thread, task))
    if scope is None or not scope.has_run or scope.busy:
        return None
    is_over = not any(channel in _UNFINISHED for channel, _ in writes)
    waits = scope.session.waits
    for recorded in scope.forgotten() if is_over and not waits else ():
        _log.warning(
            "run %s: an earlier run of this node called %s with other arguments (step %s, key %s), and this one did "
            "not: make a step of what decides them, else it may be done twice",
            scope.session.row.id,
            recorded.entry.name,
            recorded.entry.path,
            (recorded.entry.more or {}).get("key"),
            extra=event("effect.forgotten", run=scope.session.row.id, step=recorded.entry.path),
        )
    waiting = None
    if waits or not is_over:
        waiting = orjson.dumps(waits[-1].what if waits else {"for": "graph"}).decode()
    statement = graph_tasks.end(
        scope.session.hold,
        scope.session.index.total(),
        done=waiting is None,
        waiting=waiting,
        keep_us=keep_us,
        now=ctx.clock_us(),
    )
    return Ending(scope, statement, scope.unsettled if is_over else None)


def settle(ending: Ending) -> Flow[None]:
    """Write down that a task waits whose writes are refused."""
    yield from write(lambda: graph_tasks.one(ending.statement))


def over(ending: Ending) -> None:
    """The task's writes are stored: nobody asks for its scope any more."""
    scope = ending.scope
    with _lock:
        for execution in [known for known, other in _by_execution.items() if other is scope]:
            del _by_execution[execution]
        place = _place(scope.task.ctx, scope.task.thread, scope.task.id)
        if _by_task.get(place) is scope:
            del _by_task[place]


class Lines:
    """Namespaces that graphs keep checkpoints in: each asks for its newest before it runs anything. Bounded."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, thread: str, space: str) -> None:
        if not space:
            return
        with self._lock:
            self._seen[(thread, space)] = None
            self._seen.move_to_end((thread, space))
            while len(self._seen) > _LINES_MAX:
                self._seen.popitem(last=False)

    def has(self, thread: str, space: str) -> bool:
        """Whether a graph keeps checkpoints there. The outermost does."""
        return not space or (thread, space) in self._seen
