"""Snapshots: the whole store at one instant, to look into, compare, give away, and go back to."""

from perdure.snapshots.bundle import Bundle as Bundle
from perdure.snapshots.bundle import check_bundle as check_bundle
from perdure.snapshots.diff import SnapshotChange as SnapshotChange
from perdure.snapshots.handle import Snapshot as Snapshot
from perdure.snapshots.restore import SnapshotRestore as SnapshotRestore
from perdure.snapshots.sandbox import Sandbox as Sandbox

__all__ = ["Bundle", "Sandbox", "Snapshot", "SnapshotChange", "SnapshotRestore", "check_bundle"]
