"""Snapshots: the whole store at one instant, to look into, compare, give away, and go back to."""

from perdure.runs.calls.evidence import record_failures as record_failures
from perdure.snapshots.audit import Audit as Audit
from perdure.snapshots.audit import AuditEntry as AuditEntry
from perdure.snapshots.audit import audit_run as audit_run
from perdure.snapshots.audit import audit_thread as audit_thread
from perdure.snapshots.bundle import Bundle as Bundle
from perdure.snapshots.bundle import check_bundle as check_bundle
from perdure.snapshots.dataset import export_dataset as export_dataset
from perdure.snapshots.diff import SnapshotChange as SnapshotChange
from perdure.snapshots.handle import Snapshot as Snapshot
from perdure.snapshots.incidents import Frame as Frame
from perdure.snapshots.incidents import Incident as Incident
from perdure.snapshots.incidents import incident as incident
from perdure.snapshots.replication import Promoted as Promoted
from perdure.snapshots.replication import Replicated as Replicated
from perdure.snapshots.replication import promote as promote
from perdure.snapshots.replication import replicate as replicate
from perdure.snapshots.restore import SnapshotRestore as SnapshotRestore
from perdure.snapshots.sandbox import Sandbox as Sandbox

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
