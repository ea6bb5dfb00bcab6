"""Work for one tenant among many: what goes wrong there is logged, and the others are served.

What is not the tenant's fault (a full disk, a store that was closed) is not caught.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from perdure.errors import Busy, DiskFull, ForkedProcess, OutcomeUnknown, PerdureError, ReadOnlyStore, StoreClosed
from perdure.storage.events import event, said
from perdure.storage.program import Flow

T = TypeVar("T")
#: Not the fault of one tenant or run. Unavailable may be: a key service that does not answer for it.
OF_THE_STORE = (Busy, DiskFull, ForkedProcess, OutcomeUnknown, ReadOnlyStore, StoreClosed)
#: What values that no code of ours has written lead to.
GARBAGE = (ValueError, TypeError, ArithmeticError, LookupError)
_log = logging.getLogger("perdure")


def for_tenant(name: str, work: Flow[T]) -> Flow[T | None]:
    """Do something for one tenant of many. None: it failed; or there was nothing to do."""
    try:
        return (yield from work)
    except OF_THE_STORE:
        raise
    except (PerdureError, *GARBAGE) as error:
        found = event("upkeep.failed", tenant=name, error=type(error).__name__)
        _log.warning("upkeep of tenant %r failed: %s", name, said(error), extra=found)
        return None
