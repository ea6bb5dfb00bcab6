"""Snapshots: the whole store at one instant, to look into, compare, give away, and go back to."""

from perdure.runs.calls.evidence import record_failures as record_failures
from perdure.snapshots.bundle import Bundle as Bundle
from perdure.snapshots.bundle import check_bundle as check_bundle
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
    "Bundle",
    "Frame",
    "Incident",
    "Promoted",
    "Replicated",
    "Sandbox",
    "Snapshot",
    "SnapshotChange",
    "SnapshotRestore",
    "check_bundle",
    "incident",
    "promote",
    "record_failures",
    "replicate",
]
