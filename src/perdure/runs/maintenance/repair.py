"""Repairing runs: nothing is guessed. A run that does not add up stops, says why, and waits for a person.

A journal whose sum does not hold cannot be told from one that lacks an effect which happened; so such a run is never
gone on with by itself. What belongs to no run, or cannot be read, is set aside. Each run in a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import orjson

from perdure.log.quarantine import set_aside
from perdure.log.repair_pointers import Notes
from perdure.runs.domain import TABLES
from perdure.runs.journal.rows import FINISHED, NEVER, STATUSES
from perdure.runs.maintenance.verify import ANSWERS, bad_blobs, check_run, text_of
from perdure.storage.columns import SIGNAL, WAITING
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, check, read, write

_PAGE = 200
_RUNS = Sql("SELECT run, id FROM run WHERE tenant = :tenant AND run > :after ORDER BY run LIMIT :limit")
_STATE = Sql(
    "SELECT status, owner, waiting, id FROM run WHERE tenant = :tenant AND run = :run {for_update}",
    opens={2: WAITING.at("run")},
    tolerant="all",
)
_DISOWN = Sql("UPDATE run SET owner = NULL WHERE tenant = :tenant AND run = :run")
_FORGET_WAITING = Sql("UPDATE run SET waiting = NULL WHERE tenant = :tenant AND run = :run")
_SET_ID = Sql("UPDATE run SET id = :id WHERE tenant = :tenant AND run = :run")
# A worker that runs it has lost it: its fence is an old one.
_STICK = Sql(
    f"""UPDATE run SET status = 'stuck', owner = NULL, fence = CASE WHEN fence >= 0 THEN fence + 1 ELSE 1 END,
        lease_until = 0, wake_at = {NEVER}, wakeup_pending = 0, waiting = :waiting
    WHERE tenant = :tenant AND run = :run""",
    seals={"waiting": WAITING},
)
_CLOSE_ASKS = Sql(
    "UPDATE ask SET status = 'closed' WHERE tenant = :tenant AND run = :run AND status = 'open' RETURNING path"
)
_SIGNALS = Sql(
    "SELECT topic, key, value, seq FROM signal WHERE tenant = :tenant AND run = :run",
    opens={2: SIGNAL.at("run", 0, 1)},
    tolerant="all",
)
_STRAYS = {
    table.name: Sql(
        f"SELECT {', '.join(table.key)} FROM {table.name} o WHERE tenant = :tenant AND NOT EXISTS"
        " (SELECT 1 FROM run r WHERE r.tenant = o.tenant AND r.run = o.run) LIMIT :limit"
    )
    for table in TABLES
    if table.name not in ("run", "blob")
}
_STRAY_ANSWERS = Sql(
    """SELECT run, path, who FROM answer o WHERE tenant = :tenant AND NOT EXISTS
    (SELECT 1 FROM ask a WHERE a.tenant = o.tenant AND a.run = o.run AND a.path = o.path) LIMIT :limit"""
)
_NEEDS = Sql(
    """SELECT r.run, r.id, r.status, r.waiting FROM run_blob b JOIN run r ON r.tenant = b.tenant AND r.run = b.run
    WHERE b.tenant = :tenant AND b.hash = :hash ORDER BY r.run {for_update}""",
    opens={3: WAITING.at(0)},
    tolerant="all",
)
_DAMAGED = "JournalDamaged"
_STUCK = "it is stuck now, so that nobody goes on with it by itself"


class DoneRuns:
    """What was done to runs: notes hold a run's id ("": the store)."""

    def __init__(self) -> None:
        self.mended: Notes = []
        self.lost: Notes = []


def repair_runs(tenant: int, progress: Progress | None = None) -> Flow[DoneRuns]:
    """Look at every run of a tenant, and mend or stop those in which something is wrong."""
    done = DoneRuns()
    for table, sql in (*_STRAYS.items(), ("answer", _STRAY_ANSWERS)):
        count = 0
        while some := (yield from write(partial(_drop_some, tenant, table, sql))):
            count += some
        if count:
            what = f"{count} rows of {table} belong to runs or questions that are not there: set aside"
            done.lost.append(("", None, what))
    after, seen = -1, 0
    while page := (yield from read(partial(_page, tenant, after))):
        for run in page:
            after = run
            problems = yield from read(partial(check_run, tenant, run))
            if problems:
                mended, lost = yield from write(partial(_mend, tenant, run))
                done.mended += mended
                done.lost += lost
            seen += 1
            if progress is not None:
                progress(seen, seen)
    yield from _see_to_results(tenant, done)
    return done


def _see_to_results(tenant: int, done: DoneRuns) -> Flow[None]:
    """Large results that are lost: who needs them is named, and stops. Their rows stay: an object may come back."""
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key in bad:
            mended, lost = yield from write(partial(_stop_for, tenant, key))
            done.mended += mended
            done.lost += lost


def _stop_for(tenant: int, key: bytes) -> Program[tuple[Notes, Notes]]:
    [runs] = yield Batch(_NEEDS(tenant=tenant, hash=key))
    what = f"its large result {key.hex()} is missing or damaged"
    if not runs:
        yield from set_aside(tenant, "blob", (key,), "it is missing or damaged, and no run needs it", drop=True)
        return [("", None, f"the large result {key.hex()}, which no run needs, was set aside")], []
    mended: Notes = []
    for run, name, status, waiting in runs:
        if status not in FINISHED and not _is_stopped(status, waiting):
            yield from _stick(tenant, run, what)
            mended.append((name, None, _STUCK))
    return mended, [(name, None, what) for _, name, _, _ in runs]


def _page(tenant: int, after: int) -> Program[list[int]]:
    [rows] = yield Batch(_RUNS(tenant=tenant, after=after, limit=_PAGE), last=True)
    return [run for run, _ in rows]


def _drop_some(tenant: int, table: str, sql: Sql) -> Program[int]:
    [rows] = yield Batch(sql(tenant=tenant, limit=_PAGE))
    for row in rows:
        yield from set_aside(tenant, table, row, "it belongs to no run or question", drop=True)
    return len(rows)


def _mend(tenant: int, run: int) -> Program[tuple[Notes, Notes]]:
    key = {"tenant": tenant, "run": run}
    [rows] = yield Batch(_STATE(**key))
    if not rows:
        return [], []
    status, owner, waiting, given = rows[0]
    name = given if type(given) is str and given else f"number {run}"
    mended: Notes = []
    if name != given:
        yield Batch(_SET_ID(**key, id=f"recovered-{run}"))
        name = f"recovered-{run}"
        mended.append((name, None, "its id was lost; it has a new one"))
    if owner is not None and status in STATUSES and status != "running":
        yield Batch(_DISOWN(**key))
        mended.append((name, None, "it had an owner, and was not running: nobody owns it now"))
    if waiting is not None and not _is_json(waiting):
        yield Batch(_FORGET_WAITING(**key))
        mended.append((name, None, "what it waited for could not be read, and was removed"))
    if status in FINISHED:
        [closed] = yield Batch(_CLOSE_ASKS(**key))
        if closed:
            mended.append((name, None, f"{len(closed)} open questions of a finished run were closed"))
    missing = yield from _drop_unreadable(tenant, run)
    problems = missing + [what for _, what in (yield from check_run(tenant, run)) or []]
    if not problems:
        return mended, []
    lost: Notes = [(name, None, what) for what in problems]
    if status not in FINISHED and not _is_stopped(status, waiting):
        yield from _stick(tenant, run, problems[0])
        mended.append((name, None, _STUCK))
    return mended, lost


def _stick(tenant: int, run: int, problem: str) -> Generator[Batch, list[Rows], None]:
    text = orjson.dumps({"for": "help", "error": problem, "type": _DAMAGED}).decode()
    yield Batch(_STICK(tenant=tenant, run=run, waiting=text))


def _drop_unreadable(tenant: int, run: int) -> Generator[Batch, list[Rows], list[str]]:
    """Set aside messages and answers that cannot be read. What is missing now."""
    missing = []
    answers, signals = yield Batch(ANSWERS(tenant=tenant, run=run), _SIGNALS(tenant=tenant, run=run))
    for path, who, value in answers:
        if text_of(value) is None:
            yield from set_aside(tenant, "answer", (run, path, who), "it cannot be read", drop=True)
            missing.append(f"question {path}: what {who} said cannot be read")
    for topic, _, value, seq in signals:
        if text_of(value) is None:
            yield from set_aside(tenant, "signal", (run, topic, seq), "it cannot be read", drop=True)
            missing.append(f"a message of topic {topic!r} cannot be read")
    return missing


def _is_json(text: Any) -> bool:
    try:
        orjson.loads(text)
    except (ValueError, TypeError):
        return False
    return True


def _is_stopped(status: str, waiting: Any) -> bool:
    """Whether an earlier repair, or a worker, has stopped it for this already."""
    if status != "stuck" or not _is_json(waiting):
        return False
    found = orjson.loads(waiting)
    return isinstance(found, dict) and found.get("type") == _DAMAGED
