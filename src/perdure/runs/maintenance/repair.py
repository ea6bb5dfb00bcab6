"""Repairing runs: rows that belong to no run are set aside, and every run in which something is wrong is named.

Nothing is guessed, and a damaged run needs no mark: the process that resumes it finds what `verify` finds, and the run
gets stuck.
"""

from __future__ import annotations

from functools import partial

from perdure.log.quarantine import set_aside
from perdure.log.repair import RepairReport
from perdure.runs.maintenance.verify import PARTS, bad_blobs, verify_runs
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, check, write

_PAGE = 200
_ORPHANS = {
    table.name: Sql(
        f"SELECT {', '.join(table.key)} FROM {table.name} o WHERE tenant = :tenant AND NOT EXISTS"
        " (SELECT 1 FROM run r WHERE r.tenant = o.tenant AND r.run = o.run) LIMIT :limit"
    )
    for table in PARTS
}


def repair_runs(tenant: int, progress: Progress | None = None) -> Flow[RepairReport]:
    """Set aside what belongs to no run of a tenant, and look at every run. Notes have a run's id ("": the store)."""
    report = RepairReport()
    for table, sql in _ORPHANS.items():
        count = 0
        while some := (yield from write(partial(_drop_some, tenant, table, sql))):
            count += some
        if count:
            report.lost.append(("", None, f"{count} rows of {table} belong to runs that are not there: set aside"))
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key in [key for key, runs in bad if not runs]:
            yield from write(partial(_drop_blob, tenant, key))
            report.repaired.append(("", None, f"the large result {key.hex()}, which no run needs, was set aside"))
    found = yield from verify_runs(tenant, progress)
    report.lost += [(run or "", None, what) for run, what in found.problems]
    return report


def _drop_some(tenant: int, table: str, sql: Sql) -> Program[int]:
    [rows] = yield Batch(sql(tenant=tenant, limit=_PAGE))
    for row in rows:
        yield from set_aside(tenant, table, row, "it belongs to no run", drop=True)
    return len(rows)


def _drop_blob(tenant: int, key: bytes) -> Program[None]:
    yield from set_aside(tenant, "blob", (key,), "it is missing or damaged, and no run needs it", drop=True)
