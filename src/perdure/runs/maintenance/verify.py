"""Verification of stored runs: rows, journals, arguments, results, questions and answers. It changes nothing.

Each run is checked in one read transaction. Whatever a worker would refuse when it resumes the run is a problem. Each
large result is checked once, however many runs refer to it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import get_type_hints

from perdure.errors import Damaged, JournalDamaged, Undecodable
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.blobs import blob_hash
from perdure.runs.journal.entries import decompress
from perdure.runs.journal.journal import read_whole
from perdure.runs.journal.rows import CHECK_ARGS, RUN_ENCRYPTED, STATUSES, TASK
from perdure.runs.run_table import NO_TASK, RunRow, tags_of
from perdure.runs.tables import BLOB_BODY, JOURNAL, PARTS, RUN_VALUE, SCHEDULE, TAG_VALUE
from perdure.storage.columns import UNREADABLE
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, check, fetch, read

_PAGE = 200
KIND = "function, version, queue, status"
_BLOB_PAGE = 16  # each has 64 KB or more
_ORPHANS = [
    Sql(
        f"""SELECT count(*) FROM (SELECT DISTINCT run FROM {table.name} WHERE tenant = :tenant
        EXCEPT SELECT run FROM run WHERE tenant = :tenant) orphan"""
    )
    for table in PARTS
]
_COUNT = Sql("SELECT count(*) FROM run WHERE tenant = :tenant")
_RUNS = Sql("SELECT run FROM run WHERE tenant = :tenant AND run > :after ORDER BY run LIMIT :limit")
_RUN = Sql(
    f"SELECT {', '.join(RunRow._fields)} FROM run WHERE tenant = :tenant AND run = :run",
    opens=RUN_ENCRYPTED,
    tolerant=True,
)


# How a problem report names a row of a table, by the second column of its key.
_SHOWN = {
    "run_value": "its {}",
    "ask": "question {}",
    "answer": "an answer to question {}",
    "mail": "message {}",
}
# The rows of every table with hashed values. Journals and arguments are read with their own checks.
_VALUES = {
    table.name: Sql(
        f"""SELECT {", ".join(table.names)} FROM {table.name} WHERE tenant = :tenant AND run = :run
        {"AND kind <> 'args'" if table is RUN_VALUE else ""}""",
        opens=table.opens(table.names),
        tolerant=True,
    )
    for table in PARTS
    if table is not JOURNAL and any(column.hashed for column in table.columns)
}
_REFERRED = Sql(
    """SELECT u.hash, b.hash FROM run_blob u LEFT JOIN blob b ON b.tenant = u.tenant AND b.hash = u.hash
    WHERE u.tenant = :tenant AND u.run = :run"""
)
_BLOBS = Sql(
    "SELECT hash, body FROM blob WHERE tenant = :tenant AND hash > :after ORDER BY hash LIMIT :limit",
    opens={1: BLOB_BODY.at(0)},
    tolerant=True,
)
_WHOSE = Sql(
    """SELECT r.run, r.id FROM run_blob b JOIN run r ON r.tenant = b.tenant AND r.run = b.run
    WHERE b.tenant = :tenant AND b.hash = :hash ORDER BY r.run"""
)
_SCHEDULES = Sql(
    "SELECT name, args FROM schedule WHERE tenant = :tenant ORDER BY name",
    opens=SCHEDULE.opens(("name", "args")),
    tolerant=True,
)
_TAGGED = Sql("SELECT count(*) FROM run_tag WHERE tenant = :tenant AND run = :run")
_TAG = Sql(
    "SELECT 1 FROM run_tag WHERE tenant = :tenant AND key = :key AND value = :value AND at = :at AND run = :run",
    seals={"value": TAG_VALUE},
)
# One statement, which sees both tables as of one moment.
WRONG_COUNTS = Sql(
    f"""SELECT count(*) FROM (
        SELECT {KIND}, sum(n) AS n FROM (
            SELECT {KIND}, n FROM run_count WHERE tenant = :tenant
            UNION ALL SELECT {KIND}, -1 FROM run WHERE tenant = :tenant AND {NO_TASK}) counted
        GROUP BY {KIND}) kinds
    WHERE n <> 0"""
)
_BYTES = [
    Sql(f"SELECT CAST(coalesce(sum(length({column})), 0) AS bigint) FROM {table} WHERE tenant = :tenant")
    for table, column in (("journal", "body"), ("run_value", "value"), ("blob", "body"))
]
_TYPES: dict[str, tuple[type, ...]] = {
    name: hint.__args__ if isinstance(hint, UnionType) else (hint,) for name, hint in get_type_hints(RunRow).items()
}


@dataclass
class RunFindings:
    """The number of checked runs, and the problems: id of the run (None for the store) and text."""

    runs: int = 0
    problems: list[tuple[str | None, str]] = field(default_factory=list)


def verify_runs(tenant: int, progress: Progress | None = None, *, live: bool = True) -> Flow[RunFindings]:
    """Check the runs of a tenant. `live` is False at a snapshot, which has no counts of runs."""
    total, findings = yield from read(partial(_overview, tenant, live))
    after = -1
    while page := (yield from fetch(_RUNS, tenant=tenant, after=after, limit=_PAGE)):
        for (after,) in page:
            checked = yield from check_run(tenant, after)
            if checked is not None:  # None if it was deleted meanwhile
                findings.runs += 1
                findings.problems += [(checked[0], problem) for problem in checked[1]]
            if progress is not None:
                progress(findings.runs, max(findings.runs, total))
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key, runs in bad:
            names = [name for _, name in runs] or [None]
            findings.problems.append((names[0], f"the large result {key.hex()} is missing or is damaged"))
    schedules = yield from check(partial(_bad_schedules, tenant))
    findings.problems += [(None, f"the arguments of schedule {name!r} cannot be read") for name in schedules]
    return findings


def _bad_schedules(tenant: int) -> Program[list[str]]:
    [rows] = yield Batch(_SCHEDULES(tenant=tenant), last=True)
    return [name for name, args in rows if args is UNREADABLE]


def count_runs(tenant: int) -> Program[tuple[int, int]]:
    """Return the number of runs, and the bytes of their journals, arguments and results."""
    [[(runs,)], *parts] = yield Batch(_COUNT(tenant=tenant), *(sql(tenant=tenant) for sql in _BYTES), last=True)
    return int(runs), sum(int(rows[0][0]) for rows in parts)


def _overview(tenant: int, live: bool) -> Program[tuple[int, RunFindings]]:
    statements = (_COUNT, WRONG_COUNTS, *_ORPHANS)
    [total], wrong, *orphans = yield Batch(*(sql(tenant=tenant) for sql in statements), last=True)
    problems = [
        (None, f"rows of {table.name} belong to {rows[0][0]} runs that are not there")
        for table, rows in zip(PARTS, orphans, strict=True)
        if rows[0][0]
    ]
    if live and wrong[0][0]:
        problems.append((None, f"run_count is wrong for {wrong[0][0]} kinds of runs: lists may miss runs"))
    return int(total[0]), RunFindings(0, [*problems])


def check_run(tenant: int, run: int) -> Flow[tuple[str, list[str]] | None]:
    """Return the id of a run and its problems, or None if there is no such run."""
    try:
        return (yield from check(partial(_check_run, tenant, run)))
    except (Damaged, Undecodable) as error:
        return f"number {run}", [str(error)]


def _check_run(tenant: int, run: int) -> Program[tuple[str, list[str]] | None]:
    key = {"tenant": tenant, "run": run}
    runs, args, referred, tagged, *values = yield Batch(
        _RUN(**key), CHECK_ARGS(**key), _REFERRED(**key), _TAGGED(**key), *(sql(**key) for sql in _VALUES.values())
    )
    if not runs:
        return None
    row = RunRow._make(runs[0])
    name = row.id if isinstance(row.id, str) and row.id else f"number {run}"
    # A column of SQLite may hold any type. Other checks of a row with wrong types make no sense.
    if odd := [column for column, value in row._asdict().items() if type(value) not in _TYPES[column]]:
        return name, [f"its row is damaged: {', '.join(odd)}"]
    wrong = [] if row.status in STATUSES else [f"its status {row.status!r} is none"]
    if not 0 <= row.fence <= 10**18:
        wrong.append(f"its fence {row.fence} makes no sense: no worker takes it")
    if not args or args[0][0] is UNREADABLE:
        wrong.append("its arguments cannot be read" if args else "its arguments are missing")
    elif row.input and row.since == 0 and digest(decompress(args[0][0])) != row.input:
        wrong.append("its arguments are not those that it was started with")
    stored = dict(zip(_VALUES, values, strict=True))
    for table, rows in stored.items():
        shown = _SHOWN.get(table, f"a row of {table}, {{}},")
        wrong += [f"{shown.format(one[1])} cannot be read" for one in rows if UNREADABLE in one]
    has_outcome = any(kind == "outcome" for _, kind, _ in stored[RUN_VALUE.name])
    if not has_outcome and row.status in ("done", "failed") and not row.function.startswith(TASK):
        wrong.append(f"it is {row.status}, and its result is missing")
    wrong += [f"its large result {bytes(key).hex()} is missing" for key, there in referred if there is None]
    tags = [_TAG(**key, key=tag, value=value, at=row.created_at) for tag, value in tags_of(row.tags).items()]
    if tagged[0][0] != len(tags) or (tags and not all((yield Batch(*tags)))):
        wrong.append("run_tag does not have its tags: a search for them misses it")
    wrong += yield from _wrong_journal(tenant, row, {bytes(key) for key, _ in referred})
    return name, wrong


def _wrong_journal(tenant: int, row: RunRow, referred: set[bytes]) -> Generator[Batch, list[Rows], list[str]]:
    try:
        entries = (yield from read_whole(tenant, row)).entries
    except JournalDamaged as error:
        return [str(error)]
    return [
        f"entry {recorded.seq} ({recorded.entry.name}): nothing keeps its large result"
        for recorded in entries
        if recorded.own and (key := (recorded.entry.extra or {}).get("blob")) is not None and key not in referred
    ]


def bad_blobs(tenant: int, after: bytes) -> Program[tuple[bytes | None, list[tuple[bytes, Rows]]]]:
    """Check a page of large results. Return the last hash, and the damaged results with the runs that need them.

    The hash is None if there are no more."""
    [rows] = yield Batch(_BLOBS(tenant=tenant, after=after, limit=_BLOB_PAGE))
    bad = [bytes(key) for key, body in rows if type(body) is not bytes or blob_hash(body) != key]
    answers = (yield Batch(*(_WHOSE(tenant=tenant, hash=key) for key in bad))) if bad else []
    return (bytes(rows[-1][0]) if rows else None), list(zip(bad, answers, strict=True))
