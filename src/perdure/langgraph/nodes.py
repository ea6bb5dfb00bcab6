"""Steps and effects inside a LangGraph node: the thread, the checkpoint and the task stand for the run.

A task's id follows from its checkpoint, so that a node which runs again after a crash finds what it had written down.
That holds only for a checkpoint that is stored: the first step or effect of a task waits until it is. A node's code is
LangGraph's to run again, also after an error, so that a failure is no end here. Nothing parks: a short wait is waited
for, and a doubt that a person must settle is raised as `InDoubt`. Calls are told apart by name and arguments, not by
order, because a `ToolNode` runs its tools in parallel.

Must never happen here: an effect that runs under an identity which the next run of the node would not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from functools import partial
from time import monotonic
from typing import Any

from perdure.errors import NotInRun, UsageError
from perdure.langgraph import flows, tasks
from perdure.langgraph.saver import PerdureSaver
from perdure.langgraph.tasks import LOOK_S, NodeScope, Task
from perdure.log.branches import try_thread
from perdure.log.label_ids import pack_id
from perdure.log.labels import find_label, find_space, is_newest, second_writer
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal import graph_tasks
from perdure.runs.journal.journal import read_with_sum
from perdure.runs.journal.rows import TASK, NewRun
from perdure.runs.session import ambient
from perdure.runs.session.acting import Act, Pause
from perdure.runs.session.scope import Scope
from perdure.runs.session.session import LEASE_US
from perdure.storage.program import Batch, Program, Rows, read

_STORED_S = 30.0  # how long a checkpoint may take to be stored
_BUSY_S = 10.0  # how long calls that an earlier execution of the task has left behind may take


def scope_of_node(spec: StepSpec) -> Scope | None:
    """The scope of the node that is running, if it is a node of a graph with a Perdure saver. Raises where an effect
    would not be found again after a crash; a step is a plain call there."""
    from langgraph.config import get_config

    try:
        config = get_config()
    except RuntimeError:  # not inside a graph
        return None
    configurable: Mapping[str, Any] = config.get("configurable", {})
    scratchpad = configurable.get("__pregel_scratchpad")
    if configurable.get("__pregel_task_id") is None or scratchpad is None:
        return None
    problem = _problem(configurable, blocks=not spec.is_async and _is_on_its_loop(config.get("callbacks")))
    if problem is not None:
        if spec.kind != "effect":
            return None
        raise type(problem)(f"effect {spec.name!r}: {problem}; or say {spec.name}.direct(…) if you mean it")
    # The scratchpad is the task's; an attempt of LangGraph's own retries counts its calls anew.
    info = getattr(configurable.get("__pregel_runtime"), "execution_info", None)
    execution = (id(scratchpad), int(getattr(info, "node_attempt", 1)))
    scope = tasks.find(execution)
    if scope is None:
        scope = tasks.add(execution, NodeScope(_task(configurable), scratchpad, _take))
    return scope


def _problem(configurable: Mapping[str, Any], *, blocks: bool) -> Exception | None:
    """Why what is written down here would not be found again. `blocks`: it is a blocking call on the graph's loop."""
    saver = configurable.get("__pregel_checkpointer")
    if not isinstance(saver, PerdureSaver):
        kept = "no checkpointer" if saver is None else f"a {type(saver).__name__} as its checkpointer"
        return NotInRun(
            f"this graph has {kept}, so nothing would be written down: compile it with checkpointer=PerdureSaver(…)"
        )
    if configurable.get("__pregel_durability") == "exit":
        return UsageError(
            'with durability="exit" LangGraph stores no checkpoint before the graph ends, so that after a crash nobody '
            'could tell that this is the same call: use durability="async" (its default) or "sync"'
        )
    if blocks and configurable.get("__pregel_durability") != "sync":
        return UsageError(
            "a blocking call in an async node keeps LangGraph from storing the checkpoint that this call belongs to: "
            'make it an async function, or call it in a thread (await asyncio.to_thread(…)), or use durability="sync"'
        )
    thread = str(configurable.get("thread_id"))
    for space, _ in _checkpoints(configurable):
        if not saver._lines.has(thread, space):
            return UsageError(
                f"subgraph {space.rpartition('|')[2].partition(':')[0]!r} keeps no checkpoints (checkpointer=False), "
                "so that after a crash nobody could tell that this is the same call: leave checkpointer= out there"
            )
    return None


def _checkpoints(configurable: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The checkpoints that a task's id follows from: of the graphs around it, the outermost first."""
    known: Mapping[str, str] = configurable.get("checkpoint_map") or {}
    parts = str(configurable.get("checkpoint_ns") or "").split("|")
    found: dict[str, str] = {}
    for count in range(len(parts)):
        space = "|".join(parts[:count])
        if space in known:
            found.setdefault(known[space], space)  # a task that a task calls stands on the same checkpoint
    return tuple((space, id_) for id_, space in found.items())


def _task(configurable: Mapping[str, Any]) -> Task:
    saver: PerdureSaver = configurable["__pregel_checkpointer"]
    thread, checkpoints = str(configurable.get("thread_id")), _checkpoints(configurable)
    return Task(
        saver.store._context,
        thread,
        str(configurable.get("checkpoint_ns")),
        str(configurable["__pregel_task_id"]),
        checkpoints,
        frozenset(id_ for space, _ in checkpoints for id_ in saver._travels.allowed(thread, space)),
        saver._travels.current(),
    )


def _take(scope: NodeScope) -> Act[None]:
    """Wait until the task's checkpoint is stored, then take the run that stands for it, and read what it has."""
    task = scope.task
    ctx = task.ctx
    tenant = yield from ctx.ensure_tenant()
    thread = yield from _stored(scope, tenant)
    runtime = runtime_of(ctx)

    def is_dead(owner: str) -> bool:
        # Our own process has run the node before; it is done with it, unless a call of it is under way right now.
        return not tasks.is_busy_elsewhere(scope) if runtime.owns(owner) else runtime.owner.is_dead(owner)

    # A tool that failed ends its node while the others that ran beside it are not done yet.
    until, pauses = monotonic() + _BUSY_S, iter(LOOK_S)
    while tasks.is_busy_elsewhere(scope) and monotonic() < until:
        yield Pause(next(pauses, LOOK_S[-1]))
    function = f"{TASK}{task.node}"
    new = NewRun(task.run_id, function, "any", b"{}", b"", ctx.entropy(16), graph_tasks.QUEUE, root=thread)
    row = yield from graph_tasks.take(
        graph_tasks.NewTask(tenant, thread, new, partial(_check_newest, tenant, thread, task)),
        owner=runtime.owner.text,
        lease_us=LEASE_US,
        clock_us=ctx.clock_us,
        is_dead=is_dead,
    )
    if row is None:
        raise flows.is_run_elsewhere(task.thread)
    scope.adopt(tenant, row)
    scope.session.index.load(*(yield from read(partial(read_with_sum, tenant, row))))


def _check_newest(tenant: int, thread: int, task: Task, head: int | None) -> Generator[Batch, list[Rows], None]:
    """Raise if the thread was continued from a task's checkpoint already: then the task is another one there."""
    for space, id_ in task.checkpoints:
        packed = pack_id(id_)
        if packed not in task.asked and not (yield from is_newest(tenant, thread, head, space, packed)):
            raise second_writer(task.thread, space)


def _stored(scope: NodeScope, tenant: int) -> Act[int]:
    """Wait until the checkpoints that a task's id follows from are stored. The thread's number."""
    task = scope.task
    until = monotonic() + _STORED_S
    pauses = iter(LOOK_S)
    while True:
        thread = yield from read(partial(_find, tenant, task))
        if thread is not None:
            return int(thread)
        if (error := tasks.unsettled_in(task.ctx, task.thread)) is not None:
            raise error  # a task before it cannot be finished, so that this one's checkpoint will never be stored
        if (refusal := task.journey.refusal()) is not None:
            raise refusal
        if monotonic() > until:
            raise UsageError(
                f"the checkpoint of this task of thread {task.thread!r} is not stored after {_STORED_S:.0f} seconds: "
                "was the thread deleted, is the database away, or does a blocking call hold up the event loop?"
            )
        yield Pause(next(pauses, LOOK_S[-1]))


def _find(tenant: int, task: Task) -> Program[int | None]:
    row = yield from try_thread(tenant, task.thread)
    if row is None:
        return None
    for name, id_ in task.checkpoints:
        space = yield from find_space(tenant, row.thread, name)
        if space is None or (yield from find_label(tenant, row.thread, space[0], pack_id(id_))) is None:
            return None
    return row.thread


def _is_on_its_loop(callbacks: Any) -> bool:
    """Whether this thread runs the event loop that an async graph lives on. A blocking graph may be run on one too, in
    a notebook, and stores its checkpoints elsewhere."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return bool(getattr(callbacks, "is_async", True))


ambient.add_provider(scope_of_node)
