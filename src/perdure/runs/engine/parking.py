"""Giving a claimed run back: to wait, to be queued again, or to stay with a person."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perdure.runs.calls import saga
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation
from perdure.runs.journal import rows
from perdure.runs.run_table import Waiting
from perdure.storage.program import Statement, read


def reached(execution: Execution, status: str) -> Operation[str | None]:
    """Return the status if a COMMIT whose answer was lost has set it, else None."""
    row = yield from read(partial(rows.numbered, execution.tenant, execution.row.run))
    return status if row is not None and (row.status, row.fence) == (status, execution.token.fence) else None


def give_back(
    execution: Execution, status: str, wake_at: int, what: Waiting, also: Sequence[Statement] = ()
) -> Operation[str]:
    yield from execution.journal.flush()
    if hooks.hook is not None:
        hooks.fault_point("park", "", execution.row.function, 1, "before")
    op = partial(
        rows.park,
        total=execution.index.total(),
        status=status,
        wake_at=wake_at,
        waiting=what.as_text(),
        now=execution.ctx.clock_us(),
        known=execution.row.request,
        undoing=saga.ending(execution) is not None,
        also=also,
    )
    parked = yield from execution.journal.commit_with_retry(op, partial(reached, execution, status))
    if hooks.hook is not None:
        hooks.fault_point("park", "", execution.row.function, 1, "after")
    return status if parked is not None else "lost"
