"""Repair of runs: remove rows that belong to no run, and report every damaged run.

Damaged runs are not changed or marked. A process that resumes one finds the same problem as `verify`, and the run gets
stuck.
"""

from __future__ import annotations

from functools import partial

from perdure.log.repair import RepairReport, drop_row
from perdure.runs.maintenance.verify import KIND, WRONG_COUNTS, bad_blobs, verify_runs
from perdure.runs.run_table import NO_TASK
from perdure.runs.tables import PARTS
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, change, check, write

_ORPHANED = "NOT EXISTS (SELECT 1 FROM run r WHERE r.tenant = o.tenant AND r.run = o.run)"
_DROP_COUNTS = Sql("DELETE FROM run_count WHERE tenant = :tenant")
_COUNT = Sql(
    f"""INSERT INTO run_count (tenant, {KIND}, shard, n) SELECT tenant, {KIND}, 0, count(*) FROM run
    WHERE tenant = :tenant AND {NO_TASK} GROUP BY tenant, {KIND}"""
)


def repair_runs(tenant: int, progress: Progress | None = None) -> Flow[RepairReport]:
    """Remove a tenant's rows that belong to no run, and check every run. A note has a run's id; "" is the store."""
    report = RepairReport()
    report.lost += yield from write(partial(_drop_orphans, tenant))
    report.repaired += yield from write(partial(_count_again, tenant))
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key in [key for key, runs in bad if not runs]:
            yield from change(drop_row(tenant, "blob", (key,)))
            report.repaired.append(("", None, f"the large result {key.hex()}, which no run needs, was removed"))
    findings = yield from verify_runs(tenant, progress)
    report.lost += [(run or "", None, problem) for run, problem in findings.problems]
    return report


def _count_again(tenant: int) -> Program[list[tuple[str, None, str]]]:
    [[(wrong,)]] = yield Batch(WRONG_COUNTS(tenant=tenant))
    if wrong:
        yield Batch(_DROP_COUNTS(tenant=tenant), _COUNT(tenant=tenant))
    return [("", None, f"run_count was wrong for {wrong} kinds of runs")] if wrong else []


def _drop_orphans(tenant: int) -> Program[list[tuple[str, None, str]]]:
    notes: list[tuple[str, None, str]] = []
    for table in PARTS:
        drop = Sql(f"DELETE FROM {table.name} AS o WHERE tenant = :tenant AND {_ORPHANED} RETURNING 1")
        [rows] = yield Batch(drop(tenant=tenant))
        if rows:
            notes.append(("", None, f"{len(rows)} rows of {table.name} belong to runs that are not there"))
    return notes
