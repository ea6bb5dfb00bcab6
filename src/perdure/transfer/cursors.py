"""Transfers that are not finished: one row of the target per unit (a tree of threads, a family of runs, everything).

It names what the unit has copied so far, so that the next call can drop that.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import orjson

from perdure.storage.program import Batch, Rows, Sql, Statement

WHOLE_STORE = 0  # in column tenant
_READ = Sql("SELECT state FROM transfer WHERE tenant = :tenant AND unit = :unit")
_SAVE = Sql(
    """INSERT INTO transfer (tenant, unit, state) VALUES (:tenant, :unit, :state)
    ON CONFLICT (tenant, unit) DO UPDATE SET state = excluded.state"""
)
_DROP = Sql("DELETE FROM transfer WHERE tenant = :tenant AND unit = :unit")


def read_cursor(tenant: int, unit: str) -> Generator[Batch, list[Rows], dict[str, Any] | None]:
    """The state of a transfer that was begun; None: there is none."""
    [rows] = yield Batch(_READ(tenant=tenant, unit=unit))
    return orjson.loads(rows[0][0]) if rows else None


def save_cursor(tenant: int, unit: str, state: dict[str, Any]) -> Statement:
    return _SAVE(tenant=tenant, unit=unit, state=orjson.dumps(state).decode())


def drop_cursor(tenant: int, unit: str) -> Statement:
    return _DROP(tenant=tenant, unit=unit)
