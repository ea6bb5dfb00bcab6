"""The health of the store: the doctor's findings, size and growth, backups, retention, and what operators did.

The doctor looks at every part of the store: it runs when a person opens the page, not each time the store changes.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.inspector import values
from perdure.inspector.values import pick
from perdure.inspector.view import PageView

_ACTIONS_MAX = 50
_RULES = ("threads", "checkpoints", "checkpoint_age", "runs", "memory", "memory_history", "snapshots")
_FIGURES = (
    "bytes free_bytes wal_bytes disk_free_bytes growth_bytes_per_day disk_full_at last_save_at last_backup_at "
    "last_restored_at threads"
)
_ORDER = ("problem", "warning", "note", "ok")
_PAGES = {"run": "runs", "thread": "threads"}


async def health(view: PageView) -> dict[str, Any]:
    """Return findings and figures of the store, and a page of the operators' actions."""
    ops, subject = view.store.ops, view.query.get("subject") or None
    findings = [] if view.part else await ops.adoctor()
    figures, rules, actions = await asyncio.gather(
        ops.ahealth(),
        ops.aretention(),
        ops.aactions(limit=_ACTIONS_MAX + 1, before=view.query.get("before") or None, subject=subject),
    )
    oldest = {name: getattr(figures, name) for name in ("oldest_waiting", "oldest_stuck")}
    return {
        "findings": [
            pick(one, "check level message hint") for one in sorted(findings, key=lambda one: _ORDER.index(one.level))
        ],
        "examined_at": datetime.now(UTC),
        "figures": pick(figures, _FIGURES)
        | {name: None if run is None else pick(run, "id since") for name, run in oldest.items()},
        "retention": {name: _shown(getattr(rules, name)) for name in _RULES},
        "subject": subject,
        "actions": [
            pick(one, "at who action subject") | {"page": _page(one.subject), "details": view.value(one.details)}
            for one in actions[:_ACTIONS_MAX]
        ],
        "next": actions[_ACTIONS_MAX - 1].cursor if len(actions) > _ACTIONS_MAX else None,
    }


def _shown(rule: timedelta | int | None) -> str:
    if isinstance(rule, timedelta):
        return values.lasted(rule.total_seconds())
    return "for ever" if rule is None else f"the newest {rule:,}"


def _page(subject: str) -> list[str]:
    """Return where a subject such as "run trip-42" is shown."""
    kind, _, name = subject.partition(" ")
    return [_PAGES[kind], name] if kind in _PAGES and name else []
