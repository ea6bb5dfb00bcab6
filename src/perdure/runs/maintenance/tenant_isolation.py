"""Isolation of tenants: the failure of work for one tenant is logged and recorded, and does not affect the others.

The record is a row of `meta` ("problem 3"). The doctor reports it until the same work succeeds. Errors of the store
itself (a full disk, a closed store) are raised.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from perdure.errors import Busy, DiskFull, ForkedProcess, OutcomeUnknown, PerdureError, ReadOnlyStore, StoreClosed
from perdure.storage.events import event, said
from perdure.storage.program import Flow, Sql, change

T = TypeVar("T")
#: Errors that no single tenant or run causes. Unavailable is not one: a tenant's key service may not answer.
OF_THE_STORE = (Busy, DiskFull, ForkedProcess, OutcomeUnknown, ReadOnlyStore, StoreClosed)
#: Errors caused by stored values that Perdure did not write.
GARBAGE = (ValueError, TypeError, ArithmeticError, LookupError)
_log = logging.getLogger("perdure")
_RECORD = Sql(
    """INSERT INTO meta (key, value) VALUES (:key, :value)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""
)


def for_tenant(tenant: int, name: str, work: Flow[T]) -> Flow[T | None]:
    """Do work for one tenant. Return its result, or None if it failed or there was nothing to do."""
    problem = ""
    try:
        done = yield from work
        if done is None:
            return None
    except OF_THE_STORE:
        raise
    except (PerdureError, *GARBAGE) as error:
        fields = event("maintenance.failed", tenant=name, error=type(error).__name__)
        _log.warning("maintenance of tenant %r failed: %s", name, said(error), extra=fields)
        done, problem = None, said(error)
    yield from change(_RECORD(key=f"problem {tenant}", value=problem))
    return done
