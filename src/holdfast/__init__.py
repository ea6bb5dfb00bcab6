"""Holdfast keeps the state of AI agents: what was saved is there, whatever happens to the process.

    import holdfast as hf

    @hf.effect
    def book(flight: str, key: hf.Key) -> str: ...

    @hf.durable
    def travel(request: str) -> str:
        return book(hf.ask("Which flight?", options=["LH400", "UA88"]))

    store = hf.open("agent.db")
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

from holdfast.errors import (
    AnswerRefused,
    BudgetExceeded,
    Busy,
    Conflict,
    Damaged,
    DiskFull,
    ForkedProcess,
    HoldfastError,
    InDoubt,
    JournalDamaged,
    KeyMissing,
    LeaseLost,
    NonDeterministic,
    NotApproved,
    NotEncrypted,
    NotFound,
    NotInRun,
    ObjectMissing,
    OpenError,
    OutcomeUnknown,
    Pinned,
    ReadOnlyStore,
    RolledBack,
    RunCancelled,
    RunError,
    RunFailed,
    RunMismatch,
    RunStuck,
    StepFailed,
    StoreClosed,
    StoreError,
    ThreadDeleted,
    Unavailable,
    Undecodable,
    UnknownType,
    Unstorable,
    UsageError,
    ValueProblem,
)
from holdfast.ops.store import Store
from holdfast.ops.store import open_store as open
from holdfast.runs.agents.resources import Resource, resource
from holdfast.runs.calls.calls import (
    ask,
    budget,
    continue_as_new,
    emit,
    receive,
    rollback,
    send,
    sleep,
    sleep_until,
    spawn,
    spend,
)
from holdfast.runs.calls.children import Child
from holdfast.runs.calls.decorators import durable, effect, step
from holdfast.runs.calls.doubt import Done, NotDone, Unknown
from holdfast.runs.calls.drawing import now, patched, random, uuid
from holdfast.runs.calls.state import State, state
from holdfast.runs.calls.timeouts import timeout
from holdfast.runs.engine.models import Ask, Event, RunInfo, Step
from holdfast.runs.functions.keys import Key
from holdfast.runs.functions.keys import current_key as idempotency_key
from holdfast.runs.handle import Run
from holdfast.runs.parallel.parallel import as_completed, first, gather, map
from holdfast.threads.keeping import Erased, Pin, Retention
from holdfast.threads.models import Change, Checkpoint, Problem, Pruned, Report, Stats, ThreadInfo
from holdfast.threads.thread import Thread
from holdfast.values.registry import register

if _collects:
    gc.enable()

if TYPE_CHECKING:
    from holdfast.ops.copies.copied import Backup, Exported, Imported, Restored
    from holdfast.ops.copies.restoring import arestore, restore
    from holdfast.ops.doctor.checklist import Finding
    from holdfast.ops.far.objects import Moved, ObjectsInfo
    from holdfast.ops.health import Health
    from holdfast.ops.keeping.compaction import Compacted
    from holdfast.ops.keys import KeyInfo, Rotated
    from holdfast.ops.repair.repaired import Mend, Repaired
    from holdfast.ops.repair.repairing import arepair, repair
    from holdfast.ops.telemetry import logs, metrics
    from holdfast.runs.agents.http import idempotency_headers
    from holdfast.runs.agents.progress import progress
    from holdfast.runs.agents.progress_file import Progress
    from holdfast.runs.agents.tools import Tools, tools
    from holdfast.runs.history.replaying import Replay
    from holdfast.runs.journal.queues import Queue
    from holdfast.runs.workers.worker import Worker
    from holdfast.storage.keyring import KeyFile, KeyProvider, Keys, StaticKeys
    from holdfast.storage.objects import Objects
    from holdfast.threads.autosave import AutoState
    from holdfast.threads.policies import autosave

__version__ = "0.1.0"

# What not every program needs is imported when it is first asked for: a sixth of the time that importing all takes.
_LATE = {
    "Compacted": "holdfast.ops.keeping.compaction",
    "Backup": "holdfast.ops.copies.copied",
    "Exported": "holdfast.ops.copies.copied",
    "Finding": "holdfast.ops.doctor.checklist",
    "Health": "holdfast.ops.health",
    "Imported": "holdfast.ops.copies.copied",
    "KeyFile": "holdfast.storage.keyring",
    "KeyInfo": "holdfast.ops.keys",
    "KeyProvider": "holdfast.storage.keyring",
    "Keys": "holdfast.storage.keyring",
    "Moved": "holdfast.ops.far.objects",
    "Objects": "holdfast.storage.objects",
    "ObjectsInfo": "holdfast.ops.far.objects",
    "Progress": "holdfast.runs.agents.progress_file",
    "Queue": "holdfast.runs.journal.queues",
    "Replay": "holdfast.runs.history.replaying",
    "Mend": "holdfast.ops.repair.repaired",
    "Repaired": "holdfast.ops.repair.repaired",
    "Restored": "holdfast.ops.copies.copied",
    "Rotated": "holdfast.ops.keys",
    "StaticKeys": "holdfast.storage.keyring",
    "Tools": "holdfast.runs.agents.tools",
    "Worker": "holdfast.runs.workers.worker",
    "arepair": "holdfast.ops.repair.repairing",
    "arestore": "holdfast.ops.copies.restoring",
    "AutoState": "holdfast.threads.autosave",
    "autosave": "holdfast.threads.policies",
    "idempotency_headers": "holdfast.runs.agents.http",
    "logs": "holdfast.ops.telemetry",
    "metrics": "holdfast.ops.telemetry",
    "progress": "holdfast.runs.agents.progress",
    "repair": "holdfast.ops.repair.repairing",
    "restore": "holdfast.ops.copies.restoring",
    "tools": "holdfast.runs.agents.tools",
}

__all__ = [
    "AnswerRefused",
    "Ask",
    "AutoState",
    "Backup",
    "BudgetExceeded",
    "Busy",
    "Change",
    "Checkpoint",
    "Child",
    "Compacted",
    "Conflict",
    "Damaged",
    "DiskFull",
    "Done",
    "Erased",
    "Event",
    "Exported",
    "Finding",
    "ForkedProcess",
    "Health",
    "HoldfastError",
    "Imported",
    "InDoubt",
    "JournalDamaged",
    "Key",
    "KeyFile",
    "KeyInfo",
    "KeyMissing",
    "KeyProvider",
    "Keys",
    "LeaseLost",
    "Mend",
    "Moved",
    "NonDeterministic",
    "NotApproved",
    "NotDone",
    "NotEncrypted",
    "NotFound",
    "NotInRun",
    "ObjectMissing",
    "Objects",
    "ObjectsInfo",
    "OpenError",
    "OutcomeUnknown",
    "Pin",
    "Pinned",
    "Problem",
    "Progress",
    "Pruned",
    "Queue",
    "ReadOnlyStore",
    "Replay",
    "Report",
    "Resource",
    "Repaired",
    "Restored",
    "Retention",
    "RolledBack",
    "Rotated",
    "Run",
    "RunCancelled",
    "RunError",
    "RunFailed",
    "RunInfo",
    "RunMismatch",
    "RunStuck",
    "State",
    "StaticKeys",
    "Stats",
    "Step",
    "StepFailed",
    "Store",
    "StoreClosed",
    "StoreError",
    "Thread",
    "ThreadDeleted",
    "ThreadInfo",
    "Tools",
    "Unavailable",
    "Undecodable",
    "Unknown",
    "UnknownType",
    "Unstorable",
    "UsageError",
    "ValueProblem",
    "Worker",
    "__version__",
    "arepair",
    "arestore",
    "as_completed",
    "ask",
    "autosave",
    "budget",
    "continue_as_new",
    "durable",
    "effect",
    "emit",
    "first",
    "gather",
    "idempotency_headers",
    "idempotency_key",
    "logs",
    "map",
    "metrics",
    "now",
    "open",
    "patched",
    "progress",
    "random",
    "receive",
    "register",
    "resource",
    "repair",
    "restore",
    "rollback",
    "send",
    "sleep",
    "sleep_until",
    "spawn",
    "spend",
    "state",
    "step",
    "timeout",
    "tools",
    "uuid",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
