"""Perdure keeps the state of AI agents: what was saved is there, whatever happens to the process.

    import perdure

    @perdure.effect
    def book(flight: str, key: perdure.IdempotencyKey) -> str: ...

    @perdure.durable
    def travel(request: str) -> str:
        return book(perdure.ask("Which flight?", options=["LH400", "UA88"]))

    store = perdure.open("agent.db")
    run = store.run(travel, "NYC tomorrow", id="trip-42")    # kill it anywhere, run the line again: it goes on
    store.thread("alice-001").save({"messages": ["hi"]})     # or keep states yourself

Everything public is named here; what is not in `__all__` may change.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

_collects = gc.isenabled()
gc.disable()  # what an import makes stays: collecting meanwhile takes a tenth of its time and frees nothing

from perdure.errors import (
    Conflict,
    InDoubt,
    NonDeterministic,
    NotFound,
    NotInRun,
    PerdureError,
    RolledBack,
    RunCancelled,
    RunFailed,
    RunStuck,
    Unstorable,
    UsageError,
)
from perdure.ops.store import Store
from perdure.ops.store import open_store as open
from perdure.runs.calls import outcome
from perdure.runs.calls.calls import (
    ask,
    continue_as_new,
    emit,
    receive,
    rollback,
    send,
    sleep,
    sleep_until,
    spawn,
)
from perdure.runs.calls.children import Child
from perdure.runs.calls.decorators import durable, effect, step
from perdure.runs.calls.state import State, state
from perdure.runs.calls.timeouts import timeout
from perdure.runs.calls.values import now, patched, random, uuid
from perdure.runs.engine.models import Ask, Event, RunInfo, Step
from perdure.runs.functions.keys import IdempotencyKey
from perdure.runs.functions.keys import current_key as idempotency_key
from perdure.runs.handle import Run
from perdure.runs.parallel.calls import first, gather, map
from perdure.threads.models import Change, Checkpoint, ThreadInfo
from perdure.threads.thread import Thread
from perdure.values.registry import register

if _collects:
    gc.enable()

if TYPE_CHECKING:
    from perdure.agents.progress import progress
    from perdure.agents.tools import tools
    from perdure.encryption.keys import KeyFile, KeyProvider, Keys, StaticKeys
    from perdure.ops.copies.restoring import restore
    from perdure.ops.repair.repair import repair
    from perdure.ops.telemetry import logs, metrics
    from perdure.runs.history.replay import Replay
    from perdure.runs.journal.queues import Queue
    from perdure.runs.workers.worker import Worker
    from perdure.threads.autosave import AutoState
    from perdure.threads.autosave_policies import autosave

__version__ = "0.1.0"

# What not every program needs is imported when it is first asked for: a sixth of the time that importing all takes.
_LATE = {
    "KeyFile": "perdure.encryption.keys",
    "KeyProvider": "perdure.encryption.keys",
    "Keys": "perdure.encryption.keys",
    "Queue": "perdure.runs.journal.queues",
    "Replay": "perdure.runs.history.replay",
    "StaticKeys": "perdure.encryption.keys",
    "Worker": "perdure.runs.workers.worker",
    "AutoState": "perdure.threads.autosave",
    "autosave": "perdure.threads.autosave_policies",
    "logs": "perdure.ops.telemetry",
    "metrics": "perdure.ops.telemetry",
    "progress": "perdure.agents.progress",
    "repair": "perdure.ops.repair.repair",
    "restore": "perdure.ops.copies.restoring",
    "tools": "perdure.agents.tools",
}

__all__ = [
    "Ask",
    "AutoState",
    "Change",
    "Checkpoint",
    "Child",
    "Conflict",
    "Event",
    "PerdureError",
    "InDoubt",
    "IdempotencyKey",
    "KeyFile",
    "KeyProvider",
    "Keys",
    "NonDeterministic",
    "NotFound",
    "NotInRun",
    "Queue",
    "Replay",
    "RolledBack",
    "Run",
    "RunCancelled",
    "RunFailed",
    "RunInfo",
    "RunStuck",
    "State",
    "StaticKeys",
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
    "rollback",
    "send",
    "sleep",
    "sleep_until",
    "spawn",
    "state",
    "step",
    "timeout",
    "tools",
    "uuid",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
