"""Work for one tenant or one run among many: what goes wrong there is recorded there, and the others are served.

A tenant's trouble is a row of `meta` ("trouble 3"), which the doctor shows until the same work succeeds. A run's is the
run itself: it is stuck, and says why (`claiming.stick`). What is not theirs (a full disk, a store that was closed) is
not caught.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

import orjson

from perdure.errors import Busy, DiskFull, ForkedProcess, OutcomeUnknown, PerdureError, ReadOnlyStore, StoreClosed
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Sql, read, write

T = TypeVar("T")
#: Not the fault of one tenant or run. Unavailable may be: a key service that does not answer for it.
OF_THE_STORE = (Busy, DiskFull, ForkedProcess, OutcomeUnknown, ReadOnlyStore, StoreClosed)
#: What values that no code of ours has written lead to.
GARBAGE = (ValueError, TypeError, ArithmeticError, LookupError)
_log = logging.getLogger("perdure")
_TEXT_MAX = 500
_RECORD = Sql(
    """INSERT INTO meta (key, value) VALUES (:key, :value)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""
)
_FIND = Sql("SELECT 1 FROM meta WHERE key = :key")
_CLEAR = Sql("DELETE FROM meta WHERE key = :key")


def for_tenant(tenant: int, name: str, work: Flow[T], now: int) -> Flow[T | None]:
    """Do something for one tenant of many. None: it failed, which is recorded; or there was nothing to do."""
    try:
        done = yield from work
    except OF_THE_STORE:
        raise
    except (PerdureError, *GARBAGE) as error:
        said = f"{type(error).__name__}: {error}"[:_TEXT_MAX]
        _log.warning(
            "upkeep of tenant %r failed: %s", name, said, extra=event("upkeep.failed", tenant=name, error=said)
        )
        value = orjson.dumps({"at": now, "error": said}).decode()
        yield from write(partial(_one, _RECORD, tenant, value=value))
        return None
    if done is not None:
        yield from succeeded(tenant)
    return done


def succeeded(tenant: int) -> Flow[None]:
    """The work was done: an earlier failure of it is no trouble any more."""
    if (yield from read(partial(_one, _FIND, tenant))):
        yield from write(partial(_one, _CLEAR, tenant))


def _one(sql: Sql, tenant: int, **params: str) -> Program[bool]:
    [rows] = yield Batch(sql(tenant=tenant, key=f"trouble {tenant}", **params), last=True)
    return bool(rows)
