"""The queues with their limits and what is due, the processes that run something, and the runs of the last hour."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.inspector.view import PageView
from perdure.ops import Activity

_MINUTES = 60
_ENDED_WELL, _ENDED_BADLY = ("done",), ("failed", "stuck", "cancelled", "undone")


async def workers(view: PageView) -> dict[str, Any]:
    """Return the queues, the owners of runs, and the runs that were started in each of the last 60 minutes."""
    ops = view.store.ops
    queues, owners, activity = await asyncio.gather(ops.aqueues(), ops.aworkers(), ops.aactivity(intervals=_MINUTES))
    return {
        "queues": [
            {
                "name": one.name,
                "statuses": one.statuses,
                "concurrency": one.concurrency,
                "tenant_concurrency": one.tenant_concurrency,
                "rate": one.rate,
                "due": one.due,
                "oldest_due_at": one.oldest_due_at,
            }
            for one in queues
        ],
        "workers": [
            {"owner": one.owner, "runs": one.runs, "since": one.since, "lease_until": one.lease_until} for one in owners
        ],
        "minutes": [_minute(one) for one in activity],
    }


def _minute(one: Activity) -> dict[str, Any]:
    good = sum(one.runs.get(status, 0) for status in _ENDED_WELL)
    bad = sum(one.runs.get(status, 0) for status in _ENDED_BADLY)
    return {"at": one.at, "done": good, "failed": bad, "open": sum(one.runs.values()) - good - bad}
