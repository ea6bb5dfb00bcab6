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

from perdure.errors import Damaged, JournalDamaged, NotEncrypted, Undecodable
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.blobs import blob_hash
from perdure.runs.journal.entries import decompress
from perdure.runs.journal.journal import read_whole
from perdure.runs.journal.rows import CHECK_ARGS, RUN_ENCRYPTED, STATUSES, TASK, RunRow
from perdure.runs.tables import (
    ANSWER_VALUE,
    ASK_ANSWER,
    BLOB_BODY,
    OUTCOME,
    QUESTION,
    RUN,
    SIGNAL_VALUE,
    TABLES,
    TERMS,
)
from perdure.storage.columns import UNREADABLE
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, check, read

_PAGE = 200
_BLOB_PAGE = 16  # each has 64 KB or more
PARTS = [table for table in TABLES if table.owner and table is not RUN]
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
    tolerant="all",
)


def _of_run(columns: str, table: str, opens: dict[int, object]) -> Sql:
    text = f"SELECT {columns} FROM {table} WHERE tenant = :tenant AND run = :run"
    return Sql(text, opens=opens, tolerant="all")  # type: ignore[arg-type]


# Values with their own hash, by the name that a problem report uses.
_VALUES = {
    "its {}": Sql(
        "SELECT kind, value FROM run_value WHERE tenant = :tenant AND run = :run AND kind <> 'args'",
        opens={1: OUTCOME.at("run", 0)},
        tolerant="all",
    ),
    "question {}": _of_run(
        "path, question, terms, answer",
        "ask",
        {1: QUESTION.at("run", 0), 2: TERMS.at("run", 0), 3: ASK_ANSWER.at("run", 0)},
    ),
    "an answer to question {}": _of_run("path, value, who", "answer", {1: ANSWER_VALUE.at("run", 0, 2)}),
    "a message of topic {!r}": _of_run("topic, value, key", "signal", {1: SIGNAL_VALUE.at("run", 0, 2)}),
}
_REFERRED = Sql(
    """SELECT u.hash, b.hash FROM run_blob u LEFT JOIN blob b ON b.tenant = u.tenant AND b.hash = u.hash
    WHERE u.tenant = :tenant AND u.run = :run"""
)
_BLOBS = Sql(
    "SELECT hash, body FROM blob WHERE tenant = :tenant AND hash > :after ORDER BY hash LIMIT :limit",
    opens={1: BLOB_BODY.at(0)},
    tolerant="all",
)
_WHOSE = Sql(
    """SELECT r.run, r.id FROM run_blob b JOIN run r ON r.tenant = b.tenant AND r.run = b.run
    WHERE b.tenant = :tenant AND b.hash = :hash ORDER BY r.run"""
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


def verify_runs(tenant: int, progress: Progress | None = None) -> Flow[RunFindings]:
    """Check every run of a tenant, its parts and all large results."""
    total, findings = yield from read(partial(_overview, tenant))
    after = -1
    while page := (yield from read(partial(page_of_runs, tenant, after))):
        for after in page:
            found = yield from check_run(tenant, after)
            if found is not None:  # None if it was deleted meanwhile
                findings.runs += 1
                findings.problems += [(found[0], what) for what in found[1]]
            if progress is not None:
                progress(findings.runs, max(findings.runs, total))
    last: bytes | None = b""
    while last is not None:
        last, bad = yield from check(partial(bad_blobs, tenant, last))
        for key, runs in bad:
            names = [name for _, name in runs] or [None]
            findings.problems.append((names[0], f"the large result {key.hex()} is missing or is damaged"))
    return findings


def count_runs(tenant: int) -> Program[tuple[int, int]]:
    """Return the number of runs, and the bytes of their journals, arguments and results."""
    [[(runs,)], *parts] = yield Batch(_COUNT(tenant=tenant), *(sql(tenant=tenant) for sql in _BYTES), last=True)
    return int(runs), sum(int(rows[0][0]) for rows in parts)


def _overview(tenant: int) -> Program[tuple[int, RunFindings]]:
    [total], *orphans = yield Batch(_COUNT(tenant=tenant), *(sql(tenant=tenant) for sql in _ORPHANS), last=True)
    problems = [
        (None, f"rows of {table.name} belong to {rows[0][0]} runs that are not there")
        for table, rows in zip(PARTS, orphans, strict=True)
        if rows[0][0]
    ]
    return int(total[0]), RunFindings(0, [*problems])


def page_of_runs(tenant: int, after: int) -> Program[list[int]]:
    [rows] = yield Batch(_RUNS(tenant=tenant, after=after, limit=_PAGE), last=True)
    return [run for (run,) in rows]


def check_run(tenant: int, run: int) -> Flow[tuple[str, list[str]] | None]:
    """Return the id of a run and its problems, or None if there is no such run."""
    try:
        return (yield from read(partial(_check_run, tenant, run)))
    except (Damaged, Undecodable) as error:
        return f"number {run}", [str(error)]


def _check_run(tenant: int, run: int) -> Program[tuple[str, list[str]] | None]:
    key = {"tenant": tenant, "run": run}
    found, args, referred, *values = yield Batch(
        _RUN(**key), CHECK_ARGS(**key), _REFERRED(**key), *(sql(**key) for sql in _VALUES.values())
    )
    if not found:
        return None
    row = RunRow._make(found[0])
    name = row.id if isinstance(row.id, str) else f"number {run}"
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
    for what, rows in zip(_VALUES, values, strict=True):
        wrong += [f"{what.format(one[0])} cannot be read" for one in rows if UNREADABLE in one]
    outcomes = [one for one in values[0] if one[0] == "outcome"]
    if not outcomes and row.status in ("done", "failed") and not row.function.startswith(TASK):
        wrong.append(f"it is {row.status}, and its result is missing")
    wrong += [f"its large result {bytes(key).hex()} is missing" for key, there in referred if there is None]
    wrong += yield from _wrong_journal(tenant, row, {bytes(key) for key, _ in referred})
    return name, wrong


def _wrong_journal(tenant: int, row: RunRow, referred: set[bytes]) -> Generator[Batch, list[Rows], list[str]]:
    try:
        entries = (yield from read_whole(tenant, row)).entries
    except (JournalDamaged, NotEncrypted) as error:
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
