"""Cancel, pause, resume, retry and undo many runs: `store.bulk`.

Runs are handled in chunks, so that no transaction is long and workers write in between. A run that cannot be changed
stops no other: the result says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import orjson

from perdure.errors import Conflict, Damaged, NotFound, RunError, UsageError
from perdure.runs.engine import flows, retrying, searching
from perdure.runs.engine.searching import RunConditions
from perdure.runs.journal import control
from perdure.runs.journal.rows import FINISHED, OPEN, TASK
from perdure.runs.run_table import RunRow
from perdure.storage.program import Flow, Program, Progress, Sql, as_subprogram, fetch, side_by_side, write
from perdure.threads.context import StoreContext

Action = Literal["cancel", "pause", "resume", "retry", "undo"]
# The statuses that an action is for, unless the caller names some.
APPLIES: dict[str, tuple[str, ...]] = {
    "cancel": OPEN,
    "pause": ("queued", "running", "waiting"),
    "resume": ("paused", "stuck"),
    "retry": ("failed",),
    "undo": ("done", "failed", "cancelled"),
}
_CHUNK = 100
_REFUSALS = (RunError, UsageError, NotFound, Conflict, Damaged)
_PARENTS = Sql(
    f"""SELECT DISTINCT parent FROM run WHERE tenant = :tenant AND parent IN {{numbers:ids}}
    AND status NOT IN ({", ".join(f"'{status}'" for status in FINISHED)})"""
)


@dataclass
class BulkResult:
    """What `store.bulk` did."""

    statuses: dict[str, int] = field(default_factory=dict)
    """How many runs got which status. A running one is changed by its process, at its next step."""
    refused: dict[str, str] = field(default_factory=dict)
    """The runs that were not changed, by id, with the reason."""

    @property
    def changed(self) -> int:
        """How many runs were changed."""
        return sum(self.statuses.values())


def bulk(
    ctx: StoreContext, action: Action, ids: Sequence[str], where: RunConditions, undo: bool, progress: Progress | None
) -> Flow[BulkResult]:
    """Change the runs with these ids, or those that meet the conditions."""
    if action not in tuple(APPLIES):
        raise UsageError(f"{action!r}: one of {', '.join(APPLIES)}")
    yield from searching.filter_of(ctx, where)
    if bool(ids) == any(where.values()):  # a condition of None selects every run: the caller's value is missing
        raise UsageError("name the runs, or the conditions that they meet: one of the two, and not None or empty")
    result = BulkResult()
    tenant = yield from ctx.tenant()
    if tenant is None:
        result.refused = {run_id: str(flows.no_run(run_id)) for run_id in ids}
        return result
    work = _BulkWork(ctx, tenant, action, "end" if action == "cancel" and not undo else action, result)
    if ids:
        rows = yield from _named(ctx, ids, result)
        for at in range(0, len(rows), _CHUNK):
            yield from work.change(rows[at : at + _CHUNK])
            _report(progress, at + _CHUNK, len(rows))
        return result
    conditions: RunConditions = {**where, "statuses": where.get("statuses") or APPLIES[action]}
    total = 0 if progress is None else (yield from searching.count_runs(ctx, conditions, "status", 2**61)).total
    done, before = 0, None
    while rows := (yield from searching.find_runs(ctx, conditions, before, _CHUNK)):
        before = f"{rows[-1].created_at}.{rows[-1].run}"
        yield from work.change([row for row in rows if not row.function.startswith(TASK)])
        done += len(rows)
        _report(progress, done, total)
    return result


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(min(done, total), total)


def _named(ctx: StoreContext, ids: Sequence[str], result: BulkResult) -> Flow[list[RunRow]]:
    rows = []
    for run_id in dict.fromkeys(ids):
        try:
            _, row = yield from flows.locate(ctx, run_id)
            flows.check_no_task(row)
            rows.append(row)
        except _REFUSALS as error:
            result.refused[run_id] = str(error)
    return rows


class _BulkWork:
    """The work of one `store.bulk`, chunk by chunk. It adds what it did to the result."""

    def __init__(self, ctx: StoreContext, tenant: int, action: Action, wish: str, result: BulkResult) -> None:
        self._ctx, self._tenant, self._action, self._wish, self._result = ctx, tenant, action, wish, result

    def change(self, rows: list[RunRow]) -> Flow[None]:
        """Change some runs: those that need no more than their own row in one transaction, others one by one."""
        alone = rows
        if self._action in ("cancel", "pause", "resume"):
            with_children = (yield from self._with_children(rows)) if self._action == "cancel" else set()
            if self._action == "cancel":  # members of teams are refused there
                with_children |= {row.run for row in rows if row.turn is not None}
            together = sorted(row for row in rows if row.run not in with_children)
            alone = [row for row in rows if row.run in with_children]
            answers = (yield from write(partial(self._together, together))) if together else []
            for row, answer in zip(together, answers, strict=True):
                self._note(row, answer)
        for row in alone:
            try:
                self._note(row, (yield from self._alone(row)))
            except _REFUSALS as error:
                self._note(row, error)

    def _alone(self, row: RunRow) -> Flow[str]:
        if self._action == "retry":
            return (yield from retrying.retry(self._ctx, row.id))
        return (yield from flows.request(self._ctx, row.id, self._wish))

    def _with_children(self, rows: list[RunRow]) -> Flow[set[int]]:
        ids = orjson.dumps([row.run for row in rows]).decode()
        return {parent for (parent,) in (yield from fetch(_PARENTS, tenant=self._tenant, ids=ids))}

    def _together(self, rows: list[RunRow]) -> Program[list[Any]]:
        # In the order of their numbers: two bulk operations on the same runs cannot deadlock.
        return (yield from side_by_side([self._one(row) for row in rows]))

    def _one(self, row: RunRow) -> Program[Any]:
        now = self._ctx.clock_us()
        try:
            status = yield from as_subprogram(control.ask_for(self._tenant, row.run, self._wish, now))
            if status == "queued" and self._action == "cancel":
                status = yield from as_subprogram(control.end_cancelled(self._tenant, row.run, now))
        except _REFUSALS as error:
            return error
        return status

    def _note(self, row: RunRow, answer: str | Exception) -> None:
        # A worker carries out the request of a queued run, its process that of a running one.
        is_requested = answer == "running" or (answer == "queued" and self._action in ("cancel", "undo"))
        if isinstance(answer, Exception):
            self._result.refused[row.id] = str(answer)
        elif answer == row.status and not is_requested:
            self._result.refused[row.id] = f"it is {answer}: there is nothing to {self._action}"
        else:
            self._result.statuses[answer] = self._result.statuses.get(answer, 0) + 1
