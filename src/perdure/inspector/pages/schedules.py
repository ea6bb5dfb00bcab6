"""The schedules: when each starts its next runs, what it started last, and what it skipped."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure import Schedule, UsageError
from perdure.inspector import values
from perdure.inspector.actions import Confirmation, Fields, count
from perdure.inspector.pages.runs import time_in
from perdure.inspector.view import PageView

_SCHEDULES_MAX = 500
_SHOWN = "name function version timezone queue priority overlap catch_up jitter_s paused upcoming last_run skipped"
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
    when = one.cron if one.every is None else f"every {values.lasted(one.every.total_seconds())}"
    return values.pick(one, _SHOWN) | {"when": when or ""}


async def change_schedule(view: PageView, fields: Fields) -> Confirmation:
    """Pause or resume a schedule, or start a run of it now."""
    verb = fields.one_of("verb", _VERBS, "schedule")
    (label, text), one = _VERBS[verb], await view.store.aget_schedule(fields["schedule"])

    async def do() -> str:
        if verb == "trigger":
            return f"{(await one.atrigger(who=view.who)).id} is queued: a worker will run it."
        await getattr(one, f"a{verb}")(who=view.who)
        return f"{one.name} is paused." if verb == "pause" else f"{one.name} continues."

    return Confirmation(f"{label}: {one.name}?", text, label, (view.signed(f"schedule {verb}", one.name),), do)


async def backfill(view: PageView, fields: Fields) -> Confirmation:
    """Start the runs of instants that passed."""
    if not fields.get("since"):
        raise UsageError("say since when: 3d, or a date such as 2026-11-18")
    one, now = await view.store.aget_schedule(fields["schedule"]), datetime.now(UTC)
    since, end = time_in("since", fields.get("since")), fields.get("until")
    until = min(time_in("until", end) if end else now, now - timedelta(microseconds=1))

    async def do() -> str:
        return f"{count(len(await one.abackfill(since, until, who=view.who)), 'run')} queued."

    spoken = f"{values.exact(since)} until {values.exact(until)}"
    text = f"Each instant from {spoken} that has no run gets one. They neither skip nor cancel others."
    command = view.signed("schedule backfill", one.name, since.isoformat(), until.isoformat())
    return Confirmation(f"Backfill {one.name}?", text, "Backfill", (command,), do)


ACTIONS = (change_schedule, backfill)
