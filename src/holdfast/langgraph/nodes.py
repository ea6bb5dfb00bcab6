"""Steps and effects inside a LangGraph node: the thread, the checkpoint and the task stand for the run.

A task's id follows from its checkpoint, so that a node which runs again after a crash finds what it had written down. A
node's code is LangGraph's to run again, also after an error, so that a failure is no end here. Nothing parks: a short
wait is waited for, and a doubt that a person must settle is raised as `InDoubt`. Calls are told apart by name and
arguments, not by order, because a `ToolNode` runs its tools in parallel.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Any

from holdfast.errors import LeaseLost
from holdfast.langgraph.saver import HoldfastSaver
from holdfast.runs import ambient, flows, rows
from holdfast.runs.journal import read_journal
from holdfast.runs.rows import NewRun, RunRow
from holdfast.runs.runtime import Runtime, runtime_of
from holdfast.runs.scope import Scope
from holdfast.runs.session import LEASE_US, Session
from holdfast.storage.program import Flow, Program, Transaction, drive, read, write
from holdfast.threads.context import Context

_ID_MAX = 400
_SCOPES_MAX = 1024
# By the identity of the task's scratchpad, which is kept alive by it, and the attempt.
_scopes: OrderedDict[tuple[int, int], tuple[Any, NodeScope]] = OrderedDict()
_lock = threading.Lock()


class NodeScope(Scope):
    """The scope of one execution of a node: paths are names and arguments, with a count for equal calls."""

    __slots__ = ("_counts",)

    def __init__(self, session: Session) -> None:
        super().__init__(session, is_async=False)
        self._counts: dict[str, int] = {}

    def take_for(self, name: str, wanted: bytes) -> str:
        call = f"{name}-{wanted.hex()}"
        with _lock:
            number = self._counts[call] = self._counts.get(call, 0) + 1
        return f"{call}-{number}"


def scope_of_node() -> Scope | None:
    """The scope of the node that is running, if it is a node of a graph with a Holdfast saver."""
    from langgraph.config import get_config

    try:
        configurable = get_config().get("configurable", {})
    except RuntimeError:  # not inside a graph
        return None
    saver = configurable.get("__pregel_checkpointer")
    task, scratchpad = configurable.get("__pregel_task_id"), configurable.get("__pregel_scratchpad")
    if not isinstance(saver, HoldfastSaver) or task is None or scratchpad is None:
        return None
    # The scratchpad lives as long as the task; an attempt of LangGraph's own retries counts its calls anew.
    info = getattr(configurable.get("__pregel_runtime"), "execution_info", None)
    key = (id(scratchpad), int(getattr(info, "node_attempt", 1)))
    with _lock:
        known = _scopes.get(key)
    if known is not None:
        return known[1]
    thread, space = str(configurable.get("thread_id")), str(configurable.get("checkpoint_ns") or task)
    made = NodeScope(_session(saver.store._context, thread, space))
    with _lock:
        _, scope = _scopes.setdefault(key, (scratchpad, made))
        while len(_scopes) > _SCOPES_MAX:
            _scopes.popitem(last=False)
        return scope


def _session(ctx: Context, thread: str, space: str) -> Session:
    runtime = runtime_of(ctx)
    run_id = f"langgraph/{thread}/{space}"
    if len(run_id) > _ID_MAX:
        from blake3 import blake3

        run_id = f"langgraph/{blake3(run_id.encode()).hexdigest()}"
    tenant, row = drive(ctx.driver, _take(ctx, runtime, run_id, space))
    session = Session(ctx, tenant, row, is_async=False)
    session.can_park = False
    if row.fence > 1:
        session.load(ctx.driver.run(Transaction(lambda: read_journal(tenant, row))))
    return session


def _take(ctx: Context, runtime: Runtime, run_id: str, space: str) -> Flow[tuple[int, RunRow]]:
    """The run that stands for a task: made, or taken over from whoever ran the node before."""
    node = space.rpartition("|")[2].partition(":")[0]
    new = NewRun(run_id, f"langgraph:{node}", "any", b"{}", b"", ctx.entropy(16))
    tenant, row, made = yield from flows.begin(ctx, new, owner=runtime.owner.text, lease_us=LEASE_US)
    if made:
        return tenant, row
    for _ in range(10):
        claimed = yield from _claim(ctx, tenant, row, runtime)
        if claimed is not None:
            return tenant, claimed
        row = yield from read(partial(_again, tenant, run_id))
    raise LeaseLost(
        f"another process is running this task of the graph (run {run_id!r}); it is given up "
        f"{LEASE_US // 1_000_000} seconds after its last step"
    )


def _claim(ctx: Context, tenant: int, row: RunRow, runtime: Runtime) -> Flow[RunRow | None]:
    # Our own process has run the node before and is done with it: LangGraph runs a task once at a time.
    dead = runtime.owns(row.owner) or (row.owner is not None and runtime.owner.is_dead(row.owner))
    op = partial(
        rows.claim,
        tenant,
        row.run,
        fence=row.fence,
        owner=runtime.owner.text,
        lease=LEASE_US,
        now=ctx.clock_us(),
        early=True,
        dead=dead,
    )
    return (yield from write(op))


def _again(tenant: int, run_id: str) -> Program[RunRow]:
    row = yield from rows.find(tenant, run_id)
    assert row is not None
    return row


ambient.add_provider(scope_of_node)
