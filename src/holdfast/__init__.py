"""Holdfast keeps the state of AI agents: what was saved is there, whatever happens to the process.

    import holdfast

    store = holdfast.open("agent.db")
    thread = store.thread("alice-001")
    thread.save({"messages": ["hi"]})
    thread.load().state

Everything public is named here; what is not in `__all__` may change.
"""

from __future__ import annotations

from holdfast.errors import (
    Busy,
    Conflict,
    Damaged,
    DiskFull,
    ForkedProcess,
    HoldfastError,
    NotFound,
    OpenError,
    OutcomeUnknown,
    ReadOnlyStore,
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
from holdfast.threads.models import Change, Checkpoint, Problem, Pruned, Report, Stats, ThreadInfo
from holdfast.threads.store import Store
from holdfast.threads.store import open_store as open
from holdfast.threads.thread import Thread
from holdfast.values.registry import register

__version__ = "0.1.0"

__all__ = [
    "Busy",
    "Change",
    "Checkpoint",
    "Conflict",
    "Damaged",
    "DiskFull",
    "ForkedProcess",
    "HoldfastError",
    "NotFound",
    "OpenError",
    "OutcomeUnknown",
    "Problem",
    "Pruned",
    "ReadOnlyStore",
    "Report",
    "Stats",
    "Store",
    "StoreClosed",
    "StoreError",
    "Thread",
    "ThreadDeleted",
    "ThreadInfo",
    "Unavailable",
    "Undecodable",
    "UnknownType",
    "Unstorable",
    "UsageError",
    "ValueProblem",
    "__version__",
    "open",
    "register",
]
