"""Repair of runs: remove rows that belong to no run, and report every damaged run.

Damaged runs are not changed or marked. A process that resumes one finds the same problem as `verify`, and the run gets
stuck.
"""

from __future__ import annotations

from functools import partial

from perdure.log.repair import RepairReport, drop_row
from perdure.runs.maintenance.verify import PARTS, bad_blobs, verify_runs
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, check, write

_ORPHANED = "NOT EXISTS (SELECT 1 FROM run r WHERE r.tenant = o.tenant AND r.run = o.run)"


def repair_runs(tenant: int, progress: Progress | None = None) -> Flow[RepairReport]:
    """Remove a tenant's rows that belong to no run, and check every run. A note has a run's id; "" is the store."""
    report = RepairReport()
    report.lost += yield from write(partial(_drop_orphans, tenant))
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key in [key for key, runs in bad if not runs]:
            yield from write(partial(_drop_blob, tenant, key))
            report.repaired.append(("", None, f"the large result {key.hex()}, which no run needs, was removed"))
    found = yield from verify_runs(tenant, progress)
    report.lost += [(run or "", None, what) for run, what in found.problems]
    return report


def _drop_orphans(tenant: int) -> Program[list[tuple[str, None, str]]]:
    notes: list[tuple[str, None, str]] = []
    for table in PARTS:
        drop = Sql(f"DELETE FROM {table.name} AS o WHERE tenant = :tenant AND {_ORPHANED} RETURNING 1")
        [rows] = yield Batch(drop(tenant=tenant))
        if rows:
            notes.append(("", None, f"{len(rows)} rows of {table.name} belong to runs that are not there"))
    return notes


def _drop_blob(tenant: int, key: bytes) -> Program[None]:
    yield Batch(drop_row(tenant, "blob", (key,)))
