"""Snapshots: the whole store at one instant, to look into, compare, and go back to."""

from perdure.snapshots.diff import SnapshotChange as SnapshotChange
from perdure.snapshots.handle import Snapshot as Snapshot
from perdure.snapshots.sandbox import Sandbox as Sandbox

__all__ = ["Sandbox", "Snapshot", "SnapshotChange"]
