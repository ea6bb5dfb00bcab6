"""Threads and the log as a domain (`storage/domains.py`)."""

from __future__ import annotations

from perdure.log.removals import noticing_removals
from perdure.log.tables import TABLES
from perdure.storage.domains import Domain

DOMAIN = Domain("threads", TABLES, (noticing_removals("thread"),))
