"""Repairing runs: nothing is guessed. A run in which something is wrong stops, says why, and waits for a person.

A journal whose sum does not hold cannot be told from one that lacks an effect which happened; so such a run is never
resumed by itself. Rows that belong to no run are set aside. Each run in a transaction of its own.
"""

from __future__ import annotations

from functools import partial

import orjson

from perdure.log.quarantine import set_aside
from perdure.log.repair_threads import Notes
from perdure.runs.journal.rows import FINISHED, NEVER
from perdure.runs.maintenance.verify import PARTS, bad_blobs, check_run, page_of_runs
from perdure.storage.columns import WAITING
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, check, read, write

_PAGE = 200
_OVER = ", ".join(f"'{status}'" for status in FINISHED)
# A worker that runs it has lost it: its fence is an old one. One that an earlier repair, or a worker, has stopped for
# the same reason stays as it is.
_STICK = Sql(
    f"""UPDATE run SET status = 'stuck', owner = NULL, fence = CASE WHEN fence >= 0 THEN fence + 1 ELSE 1 END,
        lease_until = 0, wake_at = {NEVER}, wakeup_pending = 0, waiting = :waiting
    WHERE tenant = :tenant AND run = :run AND status NOT IN ('stuck', {_OVER}) RETURNING id""",
    seals={"waiting": WAITING},
)
_ORPHANS = {
    table.name: Sql(
        f"SELECT {', '.join(table.key)} FROM {table.name} o WHERE tenant = :tenant AND NOT EXISTS"
        " (SELECT 1 FROM run r WHERE r.tenant = o.tenant AND r.run = o.run) LIMIT :limit"
    )
    for table in PARTS
}


class DoneRuns:
    """What was done to runs: notes hold a run's id ("": the store)."""

    def __init__(self) -> None:
        self.mended: Notes = []
        self.lost: Notes = []


def repair_runs(tenant: int, progress: Progress | None = None) -> Flow[DoneRuns]:
    """Look at every run of a tenant, and stop those in which something is wrong."""
    done = DoneRuns()
    for table, sql in _ORPHANS.items():
        count = 0
        while some := (yield from write(partial(_drop_some, tenant, table, sql))):
            count += some
        if count:
            done.lost.append(("", None, f"{count} rows of {table} belong to runs that are not there: set aside"))
    after, seen = -1, 0
    while page := (yield from read(partial(page_of_runs, tenant, after))):
        for after in page:
            found = yield from check_run(tenant, after)
            if found is not None and found[1]:
                yield from _stop(tenant, after, *found, done)
            seen += 1
            if progress is not None:
                progress(seen, seen)
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key, runs in bad:
            what = f"the large result {key.hex()} is missing or is damaged"
            for run, name in runs:
                yield from _stop(tenant, run, name, [what], done)
            if not runs:
                yield from write(partial(_drop_blob, tenant, key))
                done.mended.append(("", None, f"the large result {key.hex()}, which no run needs, was set aside"))
    return done


def _stop(tenant: int, run: int, name: str, problems: list[str], done: DoneRuns) -> Flow[None]:
    done.lost += [(name, None, what) for what in problems]
    if (yield from write(partial(_stick, tenant, run, problems[0]))):
        done.mended.append((name, None, "it is stuck now, so that no worker resumes it by itself"))


def _stick(tenant: int, run: int, problem: str) -> Program[bool]:
    waiting = orjson.dumps({"for": "help", "error": problem, "type": "JournalDamaged"}).decode()
    [rows] = yield Batch(_STICK(tenant=tenant, run=run, waiting=waiting), last=True)
    return bool(rows)


def _drop_some(tenant: int, table: str, sql: Sql) -> Program[int]:
    [rows] = yield Batch(sql(tenant=tenant, limit=_PAGE))
    for row in rows:
        yield from set_aside(tenant, table, row, "it belongs to no run", drop=True)
    return len(rows)


def _drop_blob(tenant: int, key: bytes) -> Program[None]:
    yield from set_aside(tenant, "blob", (key,), "it is missing or damaged, and no run needs it", drop=True)
