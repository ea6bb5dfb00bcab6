"""The declaration of memory as a domain (`storage/domains.py`)."""

from __future__ import annotations

from perdure.log.removals import noticing_removals
from perdure.memory.tables import TABLES
from perdure.storage.domains import Domain

# A version was current until another one took its place. A deletion that is forgotten hides nothing.
_REMOVED = noticing_removals(
    "memory_item", "coalesce({row}.ended_at, {now})", "({row}.gone IS NULL OR {row}.ended_at IS NOT NULL)"
)
DOMAIN = Domain("memory", TABLES, (_REMOVED,))
