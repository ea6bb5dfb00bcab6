"""Snapshots: the whole store at one instant, to look into, compare, give away, and go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.runs.calls.evidence import record_failures
    from perdure.snapshots.audit import Audit, AuditEntry, audit_run, audit_thread
    from perdure.snapshots.bundle import Bundle, check_bundle
    from perdure.snapshots.dataset import export_dataset
    from perdure.snapshots.diff import SnapshotChange
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.incidents import Frame, Incident, incident
    from perdure.snapshots.replication import Promoted, Replicated, promote, replicate
    from perdure.snapshots.restore import SnapshotRestore
    from perdure.snapshots.sandbox import Sandbox

# Imported when first used: a store needs none of them.
_LATE = {
    "Audit": "perdure.snapshots.audit",
    "AuditEntry": "perdure.snapshots.audit",
    "Bundle": "perdure.snapshots.bundle",
    "Frame": "perdure.snapshots.incidents",
    "Incident": "perdure.snapshots.incidents",
    "Promoted": "perdure.snapshots.replication",
    "Replicated": "perdure.snapshots.replication",
    "Sandbox": "perdure.snapshots.sandbox",
    "Snapshot": "perdure.snapshots.handle",
    "SnapshotChange": "perdure.snapshots.diff",
    "SnapshotRestore": "perdure.snapshots.restore",
    "audit_run": "perdure.snapshots.audit",
    "audit_thread": "perdure.snapshots.audit",
    "check_bundle": "perdure.snapshots.bundle",
    "export_dataset": "perdure.snapshots.dataset",
    "incident": "perdure.snapshots.incidents",
    "promote": "perdure.snapshots.replication",
    "record_failures": "perdure.runs.calls.evidence",
    "replicate": "perdure.snapshots.replication",
}

__all__ = [
    "Audit",
    "AuditEntry",
    "Bundle",
    "Frame",
    "Incident",
    "Promoted",
    "Replicated",
    "Sandbox",
    "Snapshot",
    "SnapshotChange",
    "SnapshotRestore",
    "audit_run",
    "audit_thread",
    "check_bundle",
    "export_dataset",
    "incident",
    "promote",
    "record_failures",
    "replicate",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'perdure.snapshots' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
