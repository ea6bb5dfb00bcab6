"""The queues with their limits and what is due, the processes that run something, and the runs of the last hour."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.inspector.values import pick
from perdure.inspector.view import PageView

_MINUTES = 60
_QUEUE = "name statuses concurrency tenant_concurrency rate due oldest_due_at"


async def workers(view: PageView) -> dict[str, Any]:
    """Return the queues, the owners of runs, and how many runs began and ended in each of the last 60 minutes."""
    ops = view.store.ops
    queues, owners, activity = await asyncio.gather(ops.aqueues(), ops.aworkers(), ops.aactivity(intervals=_MINUTES))
    minutes: list[dict[str, Any]] = [
        {
            "at": one.at,
            "started": sum(one.runs.values()),
            "done": one.ended.get("done", 0),
            "failed": sum(one.ended.values()) - one.ended.get("done", 0),
        }
        for one in activity
    ]
    return {
        "queues": [pick(one, _QUEUE) for one in queues],
        "workers": [pick(one, "owner runs since lease_until") for one in owners],
        "minutes": minutes,
        "hour": {name: sum(one[name] for one in minutes) for name in ("started", "done", "failed")},
        "most": max((one["done"] + one["failed"] for one in minutes), default=0),
    }
