"""A run with its children and theirs: which of them are due, and which have not ended. In pages: there may be many."""

from __future__ import annotations

from typing import Final

from perdure.runs.journal.rows import COLUMNS, RUN_CELLS, RunRow
from perdure.storage.program import Batch, Program, Sql

PAGE: Final = 200
NEWEST: Final = 2**62  # above the number of every run
_DUE = Sql(
    f"""SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND root = :root AND run < :before
    AND status IN ('queued', 'waiting', 'running') AND (status = 'running' OR wake_at <= {{now}})
    ORDER BY run DESC LIMIT {PAGE}""",
    opens=RUN_CELLS,
)
_OPEN = Sql(
    f"""SELECT run, parent FROM run WHERE tenant = :tenant AND root = :root AND run > :after
    AND status NOT IN ('done', 'failed', 'cancelled', 'rolled_back', 'exported') ORDER BY run LIMIT {PAGE}"""
)
_PARKED = Sql(
    f"""SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND root = :root AND status IN ('waiting', 'paused', 'stuck')
    ORDER BY run LIMIT {PAGE}""",
    opens=RUN_CELLS,
)
_WHOLE = Sql(
    f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND root = :root AND run > :after ORDER BY run LIMIT {PAGE}",
    opens=RUN_CELLS,
)


def due_in_family(tenant: int, root: int, before: int, now: int) -> Program[list[RunRow]]:
    """Runs of a family that are due, or running somewhere, the youngest first: a page of those older than `before`."""
    [found] = yield Batch(_DUE(tenant=tenant, root=root, before=before, now=now), last=True)
    return [RunRow._make(row) for row in found]


def open_in_family(tenant: int, root: int, after: int) -> Program[list[tuple[int, int | None]]]:
    """Runs of a family that have not ended, each with its parent, the oldest first: a page of those after `after`."""
    [found] = yield Batch(_OPEN(tenant=tenant, root=root, after=after), last=True)
    return [(int(run), None if parent is None else int(parent)) for run, parent in found]


def parked_in_family(tenant: int, root: int) -> Program[list[RunRow]]:
    """Runs of a family that wait, are paused or stuck: the oldest, a page of them."""
    [found] = yield Batch(_PARKED(tenant=tenant, root=root), last=True)
    return [RunRow._make(row) for row in found]


def whole_family(tenant: int, root: int, after: int) -> Program[list[RunRow]]:
    """All runs of a family, the oldest first: a page of those after `after`."""
    [found] = yield Batch(_WHOLE(tenant=tenant, root=root, after=after), last=True)
    return [RunRow._make(row) for row in found]
