"""The health of the store: the doctor's findings, size and growth, backups, retention, and what operators did."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from perdure.inspector import values
from perdure.inspector.view import PageView
from perdure.ops import Health

_ACTIONS_MAX = 50
_RULES = ("threads", "checkpoints", "checkpoint_age", "runs", "memory", "memory_history", "snapshots")
_ORDER = ("problem", "warning", "note", "ok")
_PAGES = {"run": "runs", "thread": "threads"}


async def health(view: PageView) -> dict[str, Any]:
    """Return findings and figures of the store, and a page of the operators' actions."""
    ops = view.store.ops
    subject = view.query.get("subject") or None
    findings, figures, rules, actions = await asyncio.gather(
        ops.adoctor(),
        ops.ahealth(),
        ops.aretention(),
        ops.aactions(limit=_ACTIONS_MAX + 1, before=view.query.get("before") or None, subject=subject),
    )
    page = actions[:_ACTIONS_MAX]
    return {
        "findings": [
            {"check": one.check, "level": one.level, "message": one.message, "hint": one.hint}
            for one in sorted(findings, key=lambda one: _ORDER.index(one.level))
        ],
        "figures": _figures(figures),
        "retention": {name: _shown(getattr(rules, name)) for name in _RULES},
        "subject": subject,
        "actions": [
            {
                "at": one.at,
                "who": one.who,
                "action": one.action,
                "subject": one.subject,
                "page": _page(one.subject),
                "details": view.value(one.details),
            }
            for one in page
        ],
        "next": page[-1].cursor if len(actions) > len(page) else None,
    }


def _figures(one: Health) -> dict[str, Any]:
    sizes = ("bytes", "free_bytes", "wal_bytes", "disk_free_bytes", "growth_bytes_per_day", "disk_full_at")
    names = (*sizes, "last_save_at", "last_backup_at", "last_restored_at", "threads")
    oldest = {
        name: None if run is None else {"id": run.id, "since": run.since}
        for name, run in (("oldest_waiting", one.oldest_waiting), ("oldest_stuck", one.oldest_stuck))
    }
    return {name: getattr(one, name) for name in names} | oldest


def _shown(rule: timedelta | int | None) -> str:
    if isinstance(rule, timedelta):
        return values.span(rule)
    return "for ever" if rule is None else f"the newest {rule:,}"


def _page(subject: str) -> list[str]:
    """Return where a subject such as "run trip-42" is shown."""
    kind, _, name = subject.partition(" ")
    return [_PAGES[kind], name] if kind in _PAGES and name else []
