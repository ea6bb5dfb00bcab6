"""Operating a store: retention, copies, health, repair. What `store.ops` returns is named here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.late import late_names

if TYPE_CHECKING:
    from perdure.ops.doctor.findings import Finding
    from perdure.ops.health import Health
    from perdure.ops.keys import KeyInfo, Rotated
    from perdure.ops.maintenance.compaction import Compacted
    from perdure.ops.repair.repair import Repaired, RepairNote
    from perdure.ops.store import open_bundle
    from perdure.runs.history.code_check import CodeFinding
    from perdure.runs.maintenance.deployments import Deployment
    from perdure.threads.models import Problem, Pruned, Report, Stats
    from perdure.threads.retention import Erased, Pin, Retention
    from perdure.transfers.archive import Archive
    from perdure.transfers.catalogue import Backup, Restored
    from perdure.transfers.transfer import TransferReport

# Imported when first used: importing perdure stays quick.
_LATE = {
    "Archive": "perdure.transfers.archive",
    "Backup": "perdure.transfers.catalogue",
    "CodeFinding": "perdure.runs.history.code_check",
    "Compacted": "perdure.ops.maintenance.compaction",
    "Deployment": "perdure.runs.maintenance.deployments",
    "Erased": "perdure.threads.retention",
    "Finding": "perdure.ops.doctor.findings",
    "Health": "perdure.ops.health",
    "KeyInfo": "perdure.ops.keys",
    "Pin": "perdure.threads.retention",
    "Problem": "perdure.threads.models",
    "Pruned": "perdure.threads.models",
    "Repaired": "perdure.ops.repair.repair",
    "RepairNote": "perdure.ops.repair.repair",
    "Report": "perdure.threads.models",
    "Restored": "perdure.transfers.catalogue",
    "Retention": "perdure.threads.retention",
    "Rotated": "perdure.ops.keys",
    "Stats": "perdure.threads.models",
    "TransferReport": "perdure.transfers.transfer",
    "open_bundle": "perdure.ops.store",
}

__all__ = [
    "Archive",
    "Backup",
    "CodeFinding",
    "Compacted",
    "Deployment",
    "Erased",
    "Finding",
    "Health",
    "KeyInfo",
    "Pin",
    "Problem",
    "Pruned",
    "Repaired",
    "RepairNote",
    "Report",
    "Restored",
    "Retention",
    "Rotated",
    "Stats",
    "TransferReport",
    "open_bundle",
]

__getattr__, __dir__ = late_names(__name__, __all__, _LATE)
