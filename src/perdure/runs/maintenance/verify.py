"""Checking what is stored of runs: rows, journals, large results, questions and answers. Nothing is changed.

One run at a time, each in one read transaction: its journal must add up to what its row says, as it must for
a worker that resumes it. Large results are checked once each, in pages, however many runs refer to them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import Any, get_type_hints

import msgspec
import orjson

from perdure.errors import Damaged, JournalDamaged, NotEncrypted, PerdureError, Undecodable
from perdure.runs.calls.asks import AskSpec
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.blobs import blob_hash
from perdure.runs.journal.entries import DIGEST_MASK, KIND_NAMES, Recorded, decompress
from perdure.runs.journal.journal import read_whole
from perdure.runs.journal.rows import CHECK_ARGS, FINISHED, RUN_CELLS, STATUSES, TASK, RunRow
from perdure.storage.columns import ANSWER, ASK_ANSWER, BLOB, QUESTION, RUN_VALUE, SIGNAL, TERMS
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, check, read

_PAGE = 200
_BLOB_PAGE = 16  # each has 64 KB or more
_OF_RUNS = ("journal", "run_value", "ask", "answer", "signal", "run_blob")
_STRAYS = [
    Sql(
        f"""SELECT count(*) FROM (SELECT DISTINCT run FROM {table} WHERE tenant = :tenant
        EXCEPT SELECT run FROM run WHERE tenant = :tenant) stray"""
    )
    for table in _OF_RUNS
]
_STRAY_ANSWERS = Sql(
    """SELECT count(*) FROM (SELECT run, path FROM answer WHERE tenant = :tenant
    EXCEPT SELECT run, path FROM ask WHERE tenant = :tenant) stray"""
)
_COUNT = Sql("SELECT count(*) FROM run WHERE tenant = :tenant")
_RUNS = Sql("SELECT run FROM run WHERE tenant = :tenant AND run > :after ORDER BY run LIMIT :limit")
_RUN = Sql(
    f"SELECT {', '.join(RunRow._fields)} FROM run WHERE tenant = :tenant AND run = :run",
    opens=RUN_CELLS,
    tolerant="all",
)
_VALUES = Sql(
    "SELECT sort, value FROM run_value WHERE tenant = :tenant AND run = :run AND sort <> 'args'",
    opens={1: RUN_VALUE.at("run", 0)},
    tolerant="all",
)
_ASKS = Sql(
    """SELECT path, sort, terms, status, answer, asked_at, question FROM ask WHERE tenant = :tenant AND run = :run
    ORDER BY path""",
    opens={2: TERMS.at("run", 0), 4: ASK_ANSWER.at("run", 0), 6: QUESTION.at("run", 0)},
    tolerant="all",
)
ANSWERS = Sql(
    "SELECT path, who, value FROM answer WHERE tenant = :tenant AND run = :run",
    opens={2: ANSWER.at("run", 0, 1)},
    tolerant="all",
)
_SIGNALS = Sql(
    "SELECT topic, key, value FROM signal WHERE tenant = :tenant AND run = :run",
    opens={2: SIGNAL.at("run", 0, 1)},
    tolerant="all",
)
_REFERRED = Sql("SELECT hash FROM run_blob WHERE tenant = :tenant AND run = :run")
_BLOBS = Sql(
    "SELECT hash, body FROM blob WHERE tenant = :tenant AND hash > :after ORDER BY hash LIMIT :limit",
    opens={1: BLOB.at(0)},
    tolerant="all",
)
_HAS_BLOB = Sql("SELECT hash FROM blob WHERE tenant = :tenant AND hash = :hash")
_WHOSE = Sql(
    """SELECT r.id FROM run_blob b JOIN run r ON r.tenant = b.tenant AND r.run = b.run
    WHERE b.tenant = :tenant AND b.hash = :hash ORDER BY r.run LIMIT 1"""
)
_BYTES = [
    Sql(f"SELECT CAST(coalesce(sum(length({column})), 0) AS bigint) FROM {table} WHERE tenant = :tenant")
    for table, column in (("journal", "body"), ("run_value", "value"), ("blob", "body"))
]
_TIME_MAX = 2**53  # microseconds: the year 2255
_TYPES: dict[str, tuple[type, ...]] = {
    name: hint.__args__ if isinstance(hint, UnionType) else (hint,) for name, hint in get_type_hints(RunRow).items()
}


Problems = list[tuple[str | None, str]]  # the run's id (None: the store), and what


@dataclass
class Findings:
    """What was looked at, and what is wrong."""

    runs: int = 0
    problems: Problems = field(default_factory=list)


def verify_runs(tenant: int, progress: Progress | None = None) -> Flow[Findings]:
    """Check every run of a tenant, and what belongs to runs."""
    total, findings = yield from read(partial(_overview, tenant))
    after = -1
    while page := (yield from read(partial(_page, tenant, after))):
        for run in page:
            after = run
            try:
                problems = yield from read(partial(check_run, tenant, run))
            except (Damaged, Undecodable) as error:
                problems = [(f"number {run}", str(error))]
            if problems is not None:  # None: it was deleted meanwhile
                findings.runs += 1
                findings.problems += problems
            if progress is not None:
                progress(findings.runs, max(findings.runs, total))
    last: bytes | None = b""
    while last is not None:
        last, problems = yield from check(partial(_check_blobs, tenant, last))
        findings.problems += problems
    return findings


def count_runs(tenant: int) -> Program[tuple[int, int]]:
    """How many runs there are, and the bytes of their journals, arguments and results."""
    [[(runs,)], *parts] = yield Batch(_COUNT(tenant=tenant), *(sql(tenant=tenant) for sql in _BYTES), last=True)
    return int(runs), sum(int(rows[0][0]) for rows in parts)


def _overview(tenant: int) -> Program[tuple[int, Findings]]:
    [total], [answers], *strays = yield Batch(
        _COUNT(tenant=tenant), _STRAY_ANSWERS(tenant=tenant), *(sql(tenant=tenant) for sql in _STRAYS), last=True
    )
    findings = Findings()
    for table, rows in zip(_OF_RUNS, strays, strict=True):
        if rows[0][0]:
            findings.problems.append((None, f"rows of {table} belong to {rows[0][0]} runs that are not there"))
    if answers[0]:
        findings.problems.append((None, f"{answers[0]} questions are answered that nobody asked"))
    return int(total[0]), findings


def _page(tenant: int, after: int) -> Program[list[int]]:
    [rows] = yield Batch(_RUNS(tenant=tenant, after=after, limit=_PAGE), last=True)
    return [run for (run,) in rows]


def check_run(tenant: int, run: int) -> Program[Problems | None]:
    """What is wrong with one run. None: there is no such run."""
    key = {"tenant": tenant, "run": run}
    found, args, values, asks, answers, signals, referred = yield Batch(
        _RUN(**key), CHECK_ARGS(**key), _VALUES(**key), _ASKS(**key), ANSWERS(**key), _SIGNALS(**key), _REFERRED(**key)
    )
    if not found:
        return None
    row = RunRow._make(found[0])
    name = row.id if isinstance(row.id, str) else f"number {run}"
    wrong = _wrong_types(row)
    if not wrong:
        wrong = [
            *_wrong_row(row),
            *_wrong_values(row, dict([*values, *(("args", value) for value, _ in args)])),
            *_wrong_asks(row, asks, answers),
        ]
        wrong += [f"a message of topic {topic!r} cannot be read" for topic, _, value in signals if not text_of(value)]
        wrong += yield from _wrong_journal(tenant, row, {bytes(hash_) for (hash_,) in referred})
    return [(name, what) for what in wrong]


def _wrong_types(row: RunRow) -> list[str]:
    """SQLite lets a column hold anything: nothing else can be said of such a row."""
    odd = [name for name, value in row._asdict().items() if type(value) not in _TYPES[name]]
    return [f"its row is damaged: {', '.join(odd)}"] if odd else []


def _wrong_row(row: RunRow) -> list[str]:
    wrong = []
    if row.status not in STATUSES:
        wrong.append(f"its status {row.status!r} is none")
    if (row.owner is not None) != (row.status == "running"):
        wrong.append(f"it is {row.status}, and its owner is {row.owner or 'nobody'}")
    if not (0 <= row.since <= row.seq and row.entries >= 0 and 0 <= row.digest <= DIGEST_MASK and row.fence >= 0):
        wrong.append("the counts in its row make no sense")
    if not all(0 < at < _TIME_MAX for at in (row.created_at, row.changed_at)):
        wrong.append("its times are none")
    if len(row.incarnation) != 16:
        wrong.append("its incarnation, which its keys are made from, is damaged")
    if row.waiting is not None and not _is_json(row.waiting.encode()):
        wrong.append("what it waits for cannot be read")
    return wrong


def _began_so(row: RunRow) -> bool:
    """Whether a run still has the arguments that its row was made for: continue_as_new gives others."""
    return bool(row.input) and row.since == 0


def _wrong_values(row: RunRow, values: dict[str, Any]) -> list[str]:
    wrong = []
    args = text_of(values.get("args"))
    if args is None:
        wrong.append("its arguments are missing" if "args" not in values else "its arguments cannot be read")
    elif _began_so(row) and digest(args) != row.input:
        wrong.append("its arguments are not those that it was started with")
    if "outcome" in values and text_of(values["outcome"]) is None:
        wrong.append("its result cannot be read")
    if "outcome" not in values and row.status in ("done", "failed") and not row.function.startswith(TASK):
        wrong.append(f"it is {row.status}, and its result is missing")
    return wrong


def _wrong_asks(row: RunRow, asks: Rows, answers: Rows) -> list[str]:
    wrong = []
    for path, sort, terms, status, answer, asked_at, question in asks:
        about = f"question {path}"
        if type(question) is not str:
            wrong.append(f"{about}: its text cannot be read")
        if sort not in ("question", "approval", "doubt") or status not in ("open", "answered", "closed"):
            wrong.append(f"{about}: it is {sort!r} and {status!r}")
        if status == "answered" and text_of(answer) is None:
            wrong.append(f"{about}: its answer cannot be read")
        if status == "open" and row.status in FINISHED:
            wrong.append(f"{about}: it is open, and the run is {row.status}")
        if type(asked_at) is not int or not 0 < asked_at < _TIME_MAX:
            wrong.append(f"{about}: its time is none")
        try:
            msgspec.json.decode(terms, type=AskSpec)
        except (msgspec.DecodeError, msgspec.ValidationError, TypeError):
            wrong.append(f"{about}: its terms cannot be read")
    wrong += [f"question {path}: what {who} said cannot be read" for path, who, value in answers if not text_of(value)]
    return wrong


def _wrong_journal(tenant: int, row: RunRow, referred: set[bytes]) -> Generator[Batch, list[Rows], list[str]]:
    try:
        entries = (yield from read_whole(tenant, row)).entries
    except (JournalDamaged, NotEncrypted) as error:
        return [str(error)]
    wrong = [
        f"entry {recorded.seq}: its kind {recorded.kind} is none"
        for recorded in entries
        if recorded.kind not in KIND_NAMES
    ]
    own = [recorded for recorded in entries if recorded.own]
    missing = [recorded for recorded in own if _blob(recorded) is not None and _blob(recorded) not in referred]
    wrong += [f"entry {recorded.seq} ({recorded.entry.name}): nothing keeps its large result" for recorded in missing]
    wanted = {key for recorded in entries if (key := _blob(recorded)) is not None}
    there: set[bytes] = set()
    keys = sorted(wanted)
    for start in range(0, len(keys), _PAGE):
        answers = yield Batch(*(_HAS_BLOB(tenant=tenant, hash=key) for key in keys[start : start + _PAGE]))
        there |= {bytes(rows[0][0]) for rows in answers if rows}
    wrong += [
        f"entry {recorded.seq} ({recorded.entry.name}): its large result is missing"
        for recorded in entries
        if (key := _blob(recorded)) is not None and key not in there
    ]
    return wrong


def _blob(recorded: Recorded) -> bytes | None:
    key = (recorded.entry.more or {}).get("blob")
    return bytes(key) if isinstance(key, bytes) else None


def _check_blobs(tenant: int, after: bytes) -> Program[tuple[bytes | None, Problems]]:
    """A page of large results: the last one's hash (None: there are no more), and what is wrong."""
    problems: Problems = []
    last, bad = yield from bad_blobs(tenant, after)
    for key in bad:
        [whose] = yield Batch(_WHOSE(tenant=tenant, hash=key))
        problems.append((whose[0][0] if whose else None, f"the large result {key.hex()} is missing or is damaged"))
    return last, problems


def bad_blobs(tenant: int, after: bytes) -> Program[tuple[bytes | None, list[bytes]]]:
    """The same: which of a page cannot be read."""
    [rows] = yield Batch(_BLOBS(tenant=tenant, after=after, limit=_BLOB_PAGE))
    bad: list[bytes] = []
    for key, body in rows:
        if type(body) is not bytes or blob_hash(body) != key:
            bad.append(bytes(key))
    return (bytes(rows[-1][0]) if rows else None), bad


def text_of(stored: Any) -> bytes | None:
    """The text of a stored value; None if there is none, or it cannot be read."""
    if type(stored) is not bytes:
        return None
    try:
        text = decompress(stored)
    except PerdureError:
        return None
    return text if _is_json(text) else None


def _is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
