"""Looking into what happened: incidents, sandboxes, audits, datasets. Built on snapshots and journals.

Nothing below imports this package: it can be removed as a folder, with `cli/forensics.py`. What a failed run records
is `runs/calls/evidence.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.late import late_names

if TYPE_CHECKING:
    from perdure.forensics.audit import Audit, AuditEntry, audit_run, audit_thread
    from perdure.forensics.datasets import export_dataset
    from perdure.forensics.incidents import Frame, Incident, incident
    from perdure.forensics.sandboxes import Sandbox, sandbox
    from perdure.runs.calls.evidence import record_failures

_MODULES = {
    "perdure.forensics.audit": ["Audit", "AuditEntry", "audit_run", "audit_thread"],
    "perdure.forensics.datasets": ["export_dataset"],
    "perdure.forensics.incidents": ["Frame", "Incident", "incident"],
    "perdure.forensics.sandboxes": ["Sandbox", "sandbox"],
    "perdure.runs.calls.evidence": ["record_failures"],
}

__all__ = [
    "Audit",
    "AuditEntry",
    "Frame",
    "Incident",
    "Sandbox",
    "audit_run",
    "audit_thread",
    "export_dataset",
    "incident",
    "record_failures",
    "sandbox",
]

__getattr__, __dir__ = late_names(
    __name__, __all__, {name: module for module, names in _MODULES.items() for name in names}
)
