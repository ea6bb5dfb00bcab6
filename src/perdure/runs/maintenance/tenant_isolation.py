"""Work for one tenant among many: what goes wrong there is logged and recorded, and the others are served.

The record is a row of `meta` ("problem 3"), which the doctor reports until the same work succeeds. What is not the
tenant's fault (a full disk, a store that was closed) is not caught.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

from perdure.errors import Busy, DiskFull, ForkedProcess, OutcomeUnknown, PerdureError, ReadOnlyStore, StoreClosed
from perdure.storage.events import event, said
from perdure.storage.program import Batch, Flow, Program, Sql, write

T = TypeVar("T")
#: Not the fault of one tenant or run. Unavailable may be: a key service that does not answer for it.
OF_THE_STORE = (Busy, DiskFull, ForkedProcess, OutcomeUnknown, ReadOnlyStore, StoreClosed)
#: What values that no code of ours has written lead to.
GARBAGE = (ValueError, TypeError, ArithmeticError, LookupError)
_log = logging.getLogger("perdure")
_RECORD = Sql(
    """INSERT INTO meta (key, value) VALUES (:key, :value)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""
)


def for_tenant(tenant: int, name: str, work: Flow[T]) -> Flow[T | None]:
    """Do something for one tenant of many. None: it failed; or there was nothing to do."""
    problem = ""
    try:
        done = yield from work
        if done is None:
            return None
    except OF_THE_STORE:
        raise
    except (PerdureError, *GARBAGE) as error:
        found = event("maintenance.failed", tenant=name, error=type(error).__name__)
        _log.warning("maintenance of tenant %r failed: %s", name, said(error), extra=found)
        done, problem = None, said(error)
    yield from write(partial(_record, tenant, problem))
    return done


def _record(tenant: int, problem: str) -> Program[None]:
    yield Batch(_RECORD(key=f"problem {tenant}", value=problem), last=True)
