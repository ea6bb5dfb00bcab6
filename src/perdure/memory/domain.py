"""The declaration of memory as a domain (`storage/domains.py`)."""

from __future__ import annotations

from perdure.memory.tables import TABLES
from perdure.storage.domains import Domain

DOMAIN = Domain("memory", TABLES)
