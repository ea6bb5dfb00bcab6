"""Perdure keeps the state of AI agents: what was saved is there, whatever happens to the process.

    import perdure

    @perdure.effect
    def book(flight: str, key: perdure.IdempotencyKey) -> str: ...

    @perdure.durable
    def travel(request: str) -> str:
        return book(perdure.ask("Which flight?", options=["LH400", "UA88"]))

    store = perdure.open("agent.db")
    run = store.run(travel, "NYC tomorrow", id="trip-42")    # kill it anywhere, run the line again: it resumes
    store.thread("alice-001").save({"messages": ["hi"]})     # or keep states yourself

Everything public is named here; what is not in `__all__` may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.errors import (
    Archived,
    Conflict,
    InDoubt,
    NonDeterministic,
    NotFound,
    NotInRun,
    PerdureError,
    RunCancelled,
    RunFailed,
    RunStuck,
    RunUndone,
    Unstorable,
    UsageError,
)
from perdure.late import add_registrar, late_names

if TYPE_CHECKING:
    from perdure import agents as agents
    from perdure import encryption as encryption
    from perdure import forensics as forensics
    from perdure import memory as memory
    from perdure import ops as ops
    from perdure import regions as regions
    from perdure import snapshots as snapshots
    from perdure.agents.progress import progress
    from perdure.agents.tools import tools
    from perdure.memory.schemas import migration
    from perdure.ops.repair.repair import repair
    from perdure.ops.store import Store, restore
    from perdure.ops.store import open_store as open
    from perdure.ops.telemetry import logs, metrics
    from perdure.runs.calls import outcome
    from perdure.runs.calls.calls import (
        ask,
        continue_as_new,
        emit,
        receive,
        send,
        sleep,
        sleep_until,
        spawn,
        undo,
    )
    from perdure.runs.calls.children import Child
    from perdure.runs.calls.decorators import durable, effect, step
    from perdure.runs.calls.recorded_values import now, patched, random, uuid
    from perdure.runs.calls.state import State, state
    from perdure.runs.calls.timeouts import timeout
    from perdure.runs.engine.models import Event, Question, RunInfo, Step
    from perdure.runs.functions.keys import IdempotencyKey
    from perdure.runs.functions.keys import current_key as idempotency_key
    from perdure.runs.handle import Run
    from perdure.runs.history.replay import Replay
    from perdure.runs.journal.queues import Queue
    from perdure.runs.parallel.calls import first, gather, map
    from perdure.runs.workers.worker import Worker
    from perdure.snapshots.bundle import transfer
    from perdure.threads.autosave import AutoState
    from perdure.threads.autosave_policies import autosave
    from perdure.threads.models import Change, Checkpoint, ThreadInfo
    from perdure.threads.thread import Thread
    from perdure.values.registry import register

__version__ = "0.1.0"

# Imported when the first of them is asked for: `perdure --help` needs none.
_LATE = {
    "ask": "perdure.runs.calls.calls",
    "autosave": "perdure.threads.autosave_policies",
    "AutoState": "perdure.threads.autosave",
    "Change": "perdure.threads.models",
    "Checkpoint": "perdure.threads.models",
    "Child": "perdure.runs.calls.children",
    "continue_as_new": "perdure.runs.calls.calls",
    "durable": "perdure.runs.calls.decorators",
    "effect": "perdure.runs.calls.decorators",
    "emit": "perdure.runs.calls.calls",
    "Event": "perdure.runs.engine.models",
    "first": "perdure.runs.parallel.calls",
    "gather": "perdure.runs.parallel.calls",
    "idempotency_key": "perdure.runs.functions.keys:current_key",
    "IdempotencyKey": "perdure.runs.functions.keys",
    "logs": "perdure.ops.telemetry",
    "map": "perdure.runs.parallel.calls",
    "migration": "perdure.memory.schemas",
    "metrics": "perdure.ops.telemetry",
    "now": "perdure.runs.calls.recorded_values",
    "open": "perdure.ops.store:open_store",
    "outcome": "perdure.runs.calls",
    "patched": "perdure.runs.calls.recorded_values",
    "progress": "perdure.agents.progress",
    "Question": "perdure.runs.engine.models",
    "Queue": "perdure.runs.journal.queues",
    "random": "perdure.runs.calls.recorded_values",
    "receive": "perdure.runs.calls.calls",
    "register": "perdure.values.registry",
    "repair": "perdure.ops.repair.repair",
    "Replay": "perdure.runs.history.replay",
    "restore": "perdure.ops.store",
    "Run": "perdure.runs.handle",
    "RunInfo": "perdure.runs.engine.models",
    "send": "perdure.runs.calls.calls",
    "sleep": "perdure.runs.calls.calls",
    "sleep_until": "perdure.runs.calls.calls",
    "spawn": "perdure.runs.calls.calls",
    "State": "perdure.runs.calls.state",
    "state": "perdure.runs.calls.state",
    "step": "perdure.runs.calls.decorators",
    "Step": "perdure.runs.engine.models",
    "Store": "perdure.ops.store",
    "Thread": "perdure.threads.thread",
    "ThreadInfo": "perdure.threads.models",
    "timeout": "perdure.runs.calls.timeouts",
    "tools": "perdure.agents.tools",
    "transfer": "perdure.snapshots.bundle",
    "undo": "perdure.runs.calls.calls",
    "uuid": "perdure.runs.calls.recorded_values",
    "Worker": "perdure.runs.workers.worker",
}

__all__ = [
    "Archived",
    "AutoState",
    "Change",
    "Checkpoint",
    "Child",
    "Conflict",
    "Event",
    "PerdureError",
    "InDoubt",
    "IdempotencyKey",
    "NonDeterministic",
    "NotFound",
    "NotInRun",
    "Question",
    "Queue",
    "Replay",
    "RunUndone",
    "Run",
    "RunCancelled",
    "RunFailed",
    "RunInfo",
    "RunStuck",
    "State",
    "Step",
    "Store",
    "Thread",
    "ThreadInfo",
    "Unstorable",
    "UsageError",
    "Worker",
    "__version__",
    "ask",
    "autosave",
    "continue_as_new",
    "durable",
    "effect",
    "emit",
    "first",
    "gather",
    "idempotency_key",
    "logs",
    "map",
    "metrics",
    "migration",
    "now",
    "open",
    "outcome",
    "patched",
    "progress",
    "random",
    "receive",
    "register",
    "repair",
    "restore",
    "send",
    "sleep",
    "sleep_until",
    "spawn",
    "state",
    "step",
    "timeout",
    "tools",
    "transfer",
    "undo",
    "uuid",
]

_MODULES = (
    "agents",
    "encryption",
    "forensics",
    "memory",
    "ops",
    "regions",
    "snapshots",
)  # usable after `import perdure`, imported when first used
# A store may hold them without the adapter being imported.
add_registrar("perdure.langchain", "^msg.", "langchain_core.messages.")
_find, __dir__ = late_names(__name__, [*__all__, *_MODULES, "errors"], _LATE)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"perdure.{name}")
    if name in _LATE:
        import_module("perdure.ops.store")  # the domains register their tables
    return _find(name)
