"""How many runs a sweep would take (`retention.sweep_runs`), without taking any."""

from __future__ import annotations

from functools import partial

from perdure.runs.journal.adapter_tasks import IS_TASK
from perdure.runs.journal.rows import FINISHED
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, read

_OVER = ", ".join(f"'{status}'" for status in FINISHED)


def _until(run: str) -> str:
    """When a run's journal may go: a sweep first dates those that were cancelled."""
    return f"""CASE WHEN {run}.keep_until IS NULL AND {run}.status = 'cancelled' AND {run}.entries > 0
        THEN {run}.changed_at + CAST(:keep AS bigint) ELSE {run}.keep_until END"""


_IS_DUE = f"""({_until("r")} <= {{now}} AND r.status IN ({_OVER}) AND NOT r.{IS_TASK} AND NOT EXISTS (
    SELECT 1 FROM run o WHERE o.tenant = r.tenant AND o.root = r.root AND o.run <> r.run
    AND (o.status NOT IN ({_OVER}) OR {_until("o")} > {{now}} OR ({_until("o")} IS NULL AND o.entries > 0))))"""
_HAS_FORK = "EXISTS (SELECT 1 FROM run f WHERE f.tenant = r.tenant AND f.origin = r.run)"
_ALONE = Sql(f"SELECT count(*) FROM run r WHERE r.tenant = :tenant AND {_IS_DUE} AND NOT {_HAS_FORK}")
_RELATED = Sql(
    f"SELECT r.run, r.origin, {_IS_DUE} FROM run r WHERE r.tenant = :tenant AND (r.origin IS NOT NULL OR {_HAS_FORK})"
)
_TASKS = Sql(
    f"""SELECT count(*) FROM run r WHERE r.tenant = :tenant AND r.{IS_TASK}
    AND ((r.keep_until <= {{now}} AND r.status = 'done')
        OR NOT EXISTS (SELECT 1 FROM thread t WHERE t.tenant = r.tenant AND t.thread = r.root))"""
)


def would_sweep(tenant: int, keep_us: int | None, now: int) -> Flow[int]:
    """How many runs a sweep would remove the journals of."""
    return (yield from read(partial(_count, tenant, keep_us, now)))


def _count(tenant: int, keep_us: int | None, now: int) -> Program[int]:
    this = {"tenant": tenant, "keep": keep_us, "now": now}
    alone, related, tasks = yield Batch(_ALONE(**this), _RELATED(**this), _TASKS(tenant=tenant, now=now), last=True)
    return int(alone[0][0]) + int(tasks[0][0]) + _with_forks(related)


def _with_forks(related: Rows) -> int:
    """Of the runs that have forks, those whose forks go as well: a fork that goes frees its origin."""
    due = {run for run, _, is_due in related if is_due}
    forked = {origin for _, origin, _ in related}
    while blocked := {origin for run, origin, _ in related if run not in due} & due:
        due -= blocked
    return len(due & forked)
