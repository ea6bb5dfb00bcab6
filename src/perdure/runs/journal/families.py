"""Families of runs: a run with all its descendants, read in pages because there may be many."""

from __future__ import annotations

from typing import Final

from perdure.runs.journal.rows import COLUMNS, FINISHED, RUN_ENCRYPTED
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Program, Sql

NEWEST: Final = 2**62  # above the number of every run
PAGE = 200


def _family(where: str, order: str = "run") -> Sql:
    text = f"""SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND root = :root AND {where}
    ORDER BY {order} LIMIT {PAGE}"""
    return Sql(text, opens=RUN_ENCRYPTED)


WHOLE = _family("run > :edge")
OPEN = _family(f"run > :edge AND status NOT IN {FINISHED}")
PARKED = _family("run > :edge AND status IN ('waiting', 'paused', 'stuck')")
# Due, or running in any process; the newest first.
DUE = _family(
    """run < :edge AND status IN ('queued', 'waiting', 'running') AND (status = 'running' OR wake_at <= {now})""",
    "run DESC",
)


def family(which: Sql, tenant: int, root: int, edge: int, now: int = 0) -> Program[list[RunRow]]:
    """Return a page of the runs of a family with numbers above `edge`; for DUE, below it."""
    [rows] = yield Batch(which(tenant=tenant, root=root, edge=edge, now=now), last=True)
    return [RunRow._make(row) for row in rows]
