"""Large values (`perdure.External`) of an execution: stored, with their uses, before the entry that refers to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.errors import PerdureError
from perdure.runs.execution.operation import Operation, Pause
from perdure.runs.journal.values import OF_JOURNAL, refer
from perdure.threads.externals import referring
from perdure.values.external import External, keys_of

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution


def keep(execution: Execution, values: Sequence[External[Any]], keys: Sequence[bytes] = ()) -> Operation[None]:
    """Store values, and write that the run's journal refers to them and to those of `keys`.

    A body may have run by now. So a cancelled task continues, and is cancelled again at its next transaction, which
    records the end. If values cannot be stored, the run stops as if the entry could not be written.
    """
    if not (values or keys) or not (every := {*keys_of(values), *keys} - execution.kept_values):
        return
    is_cancelled, now = False, execution.ctx.clock_us()
    uses = partial(refer, execution.tenant, execution.row.run, OF_JOURNAL, sorted(every), now)
    while True:
        try:
            yield from referring(execution.ctx, values, partial(execution.journal.write_fenced, uses), every)
            yield Pause(0)  # here a cancellation during the last transaction arrives
            break
        except PerdureError as error:
            execution.halt(error)
            raise
        except BaseException as error:
            if not _is_cancellation(execution, error):
                raise
            is_cancelled = True
    execution.kept_values |= every
    if is_cancelled:
        _cancel_again()


def _is_cancellation(execution: Execution, error: BaseException) -> bool:
    if not execution.is_async:
        return False
    import asyncio

    return isinstance(error, asyncio.CancelledError)


def _cancel_again() -> None:
    import asyncio

    task = asyncio.current_task()
    assert task is not None
    task.uncancel()  # the count stays: timeouts and task groups compare it
    task.cancel()
