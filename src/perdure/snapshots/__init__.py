"""Snapshots: the whole store at one instant, to look into, compare, give away, and go back to."""

from perdure.snapshots.bundle import Bundle as Bundle
from perdure.snapshots.bundle import check_bundle as check_bundle
from perdure.snapshots.diff import SnapshotChange as SnapshotChange
from perdure.snapshots.handle import Snapshot as Snapshot
from perdure.snapshots.replication import Promoted as Promoted
from perdure.snapshots.replication import Replicated as Replicated
from perdure.snapshots.replication import promote as promote
from perdure.snapshots.replication import replicate as replicate
from perdure.snapshots.restore import SnapshotRestore as SnapshotRestore
from perdure.snapshots.sandbox import Sandbox as Sandbox

__all__ = [
    *("Bundle", "Promoted", "Replicated", "Sandbox", "Snapshot", "SnapshotChange", "SnapshotRestore"),
    *("check_bundle", "promote", "replicate"),
]
