"""The schedules: when each starts its next runs, what it started last, and what it skipped."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure import Schedule, UsageError
from perdure.inspector import values
from perdure.inspector.actions import Action, Confirmation, Fields
from perdure.inspector.pages.runs import time_in
from perdure.inspector.view import PageView

_SCHEDULES_MAX = 500
_VERBS = {
    "pause": ("Pause", "No more runs start until it is resumed. Open runs continue."),
    "resume": ("Resume", "It continues with the next instant. Those that passed meanwhile start nothing."),
    "trigger": ("Start now", "A run starts now, as if an instant had come."),
}


async def schedules(view: PageView) -> dict[str, Any]:
    """Return the schedules by name, each with its next instants."""
    listed = await view.store.aschedules(limit=_SCHEDULES_MAX)
    return {"schedules": [_row(one) for one in listed], "is_cut": len(listed) == _SCHEDULES_MAX}


def _row(one: Schedule) -> dict[str, Any]:
    names = (
        "name",
        "function",
        "version",
        "timezone",
        "queue",
        "priority",
        "overlap",
        "catch_up",
        "jitter_s",
        "paused",
    )
    when = one.cron if one.every is None else f"every {values.span(one.every)}"
    more = {"upcoming": list(one.upcoming), "last_run": one.last_run, "skipped": one.skipped}
    return {name: getattr(one, name) for name in names} | {"when": when or ""} | more


async def _ask(view: PageView, fields: Fields) -> Confirmation:
    one, verb = await view.store.aget_schedule(fields["schedule"]), _verb(fields)
    label, text = _VERBS[verb]
    command = view.command(f"schedule {verb}", one.name, who=view.who)
    return Confirmation(f"{label}: {one.name}?", text, label, (command,))


async def _do(view: PageView, fields: Fields) -> str:
    one, verb = await view.store.aget_schedule(fields["schedule"]), _verb(fields)
    if verb == "trigger":
        return f"{(await one.atrigger(who=view.who)).id} is queued: a worker will run it."
    await getattr(one, f"a{verb}")(who=view.who)
    return f"{one.name} is paused." if verb == "pause" else f"{one.name} continues."


def _verb(fields: Fields) -> str:
    if fields["verb"] not in _VERBS:
        raise UsageError(f"{fields['verb']!r} is nothing that can be asked of a schedule")
    return fields["verb"]


async def _ask_backfill(view: PageView, fields: Fields) -> Confirmation:
    one, (since, until) = await view.store.aget_schedule(fields["schedule"]), _span(fields)
    spoken = " until ".join(values.exact(at) for at in (since, until))
    text = f"Each instant from {spoken} that has no run gets one. They neither skip nor cancel others."
    command = view.command("schedule backfill", one.name, since.isoformat(), until.isoformat(), who=view.who)
    return Confirmation(f"Backfill {one.name}?", text, "Backfill", (command,))


async def _backfill(view: PageView, fields: Fields) -> str:
    one, (since, until) = await view.store.aget_schedule(fields["schedule"]), _span(fields)
    runs = await one.abackfill(since, until, who=view.who)
    return f"{len(runs):,} {'run' if len(runs) == 1 else 'runs'} queued."


def _span(fields: Fields) -> tuple[datetime, datetime]:
    if not fields.get("since").strip():
        raise UsageError("say since when: 3d, or a date such as 2026-11-18")
    now = datetime.now(UTC)
    until = fields.get("until").strip()
    since, end = time_in("since", fields["since"].strip()), time_in("until", until) if until else now
    return since, min(end, now - timedelta(microseconds=1))


ACTIONS = (Action("schedule", _ask, _do), Action("backfill", _ask_backfill, _backfill))
