# The public names: see `perdure/__init__.pyi`.

from perdure.snapshots.bundle import Bundle as Bundle
from perdure.snapshots.bundle import check_bundle as check_bundle
from perdure.snapshots.diff import SnapshotChange as SnapshotChange
from perdure.snapshots.handle import Snapshot as Snapshot
from perdure.snapshots.instants import Instant as Instant
from perdure.snapshots.restore import RestoreChange as RestoreChange
from perdure.snapshots.restore import SnapshotRestore as SnapshotRestore
