"""Operating a store: retention, copies, health, repair. What `store.ops` returns is named here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.ops.copies.copied import Backup, Exported, Imported, Restored
    from perdure.ops.doctor.checklist import Finding
    from perdure.ops.health import Health
    from perdure.ops.keys import KeyInfo, Rotated
    from perdure.ops.maintenance.compaction import Compacted
    from perdure.ops.repair.report import Mend, Repaired
    from perdure.threads.models import Problem, Pruned, Report, Stats
    from perdure.threads.retention import Erased, Pin, Retention

# Imported when first used: importing perdure stays quick.
_LATE = {
    "Backup": "perdure.ops.copies.copied",
    "Compacted": "perdure.ops.maintenance.compaction",
    "Erased": "perdure.threads.retention",
    "Exported": "perdure.ops.copies.copied",
    "Finding": "perdure.ops.doctor.checklist",
    "Health": "perdure.ops.health",
    "Imported": "perdure.ops.copies.copied",
    "KeyInfo": "perdure.ops.keys",
    "Mend": "perdure.ops.repair.report",
    "Pin": "perdure.threads.retention",
    "Problem": "perdure.threads.models",
    "Pruned": "perdure.threads.models",
    "Repaired": "perdure.ops.repair.report",
    "Report": "perdure.threads.models",
    "Restored": "perdure.ops.copies.copied",
    "Retention": "perdure.threads.retention",
    "Rotated": "perdure.ops.keys",
    "Stats": "perdure.threads.models",
}

__all__ = [
    "Backup",
    "Compacted",
    "Erased",
    "Exported",
    "Finding",
    "Health",
    "Imported",
    "KeyInfo",
    "Mend",
    "Pin",
    "Problem",
    "Pruned",
    "Repaired",
    "Report",
    "Restored",
    "Retention",
    "Rotated",
    "Stats",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'perdure.ops' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
