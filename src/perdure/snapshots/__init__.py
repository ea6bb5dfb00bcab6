"""Snapshots: the whole store at one instant, to look into, compare, give away, and go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.late import late_names

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

_MODULES = {
    "perdure.runs.calls.evidence": ["record_failures"],
    "perdure.snapshots.audit": ["Audit", "AuditEntry", "audit_run", "audit_thread"],
    "perdure.snapshots.bundle": ["Bundle", "check_bundle"],
    "perdure.snapshots.dataset": ["export_dataset"],
    "perdure.snapshots.diff": ["SnapshotChange"],
    "perdure.snapshots.handle": ["Snapshot"],
    "perdure.snapshots.incidents": ["Frame", "Incident", "incident"],
    "perdure.snapshots.replication": ["Promoted", "Replicated", "promote", "replicate"],
    "perdure.snapshots.restore": ["SnapshotRestore"],
    "perdure.snapshots.sandbox": ["Sandbox"],
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

__getattr__, __dir__ = late_names(
    __name__, __all__, {name: module for module, names in _MODULES.items() for name in names}
)
