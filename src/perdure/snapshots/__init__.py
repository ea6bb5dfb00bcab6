"""Snapshots: the whole store at one instant, to read, compare, export and restore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.late import late_names

if TYPE_CHECKING:
    from perdure.snapshots.bundle import Bundle, check_bundle
    from perdure.snapshots.diff import SnapshotChange
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.restore import SnapshotRestore

_MODULES = {
    "perdure.snapshots.bundle": ["Bundle", "check_bundle"],
    "perdure.snapshots.diff": ["SnapshotChange"],
    "perdure.snapshots.handle": ["Snapshot"],
    "perdure.snapshots.restore": ["SnapshotRestore"],
}

__all__ = [
    "Bundle",
    "Snapshot",
    "SnapshotChange",
    "SnapshotRestore",
    "check_bundle",
]

__getattr__, __dir__ = late_names(
    __name__, __all__, {name: module for module, names in _MODULES.items() for name in names}
)
