"""Retry of a failed run: its journal stands, and the calls that failed it run once more.

The journal has the error that a call ended with, and a replay would raise it again. A FAILED entry after that end
reopens the call for another attempt. A call is reopened only if nothing was recorded after it, because its new result
could lead the code past the later calls. Effects that happened stay, with their keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from perdure.errors import RunError
from perdure.runs.calls.children import described_end
from perdure.runs.calls.failures import recorded_at
from perdure.runs.engine.flows import check_no_task, locate
from perdure.runs.execution.execution import Execution
from perdure.runs.journal.entries import DIGEST_MASK, DONE, FAILED, Entry, Recorded, entry_digest, pack
from perdure.runs.journal.index import JournalIndex, branch_of, is_call
from perdure.runs.journal.journal import ADD_ENTRY, outcome_of, read_with_sum
from perdure.runs.journal.keyed import check_single
from perdure.runs.journal.rows import LOCK, NOT_ON_RECORD, JournalRow, JournalSum, is_swept
from perdure.runs.journal.turns import take_turn
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Flow, Program, Sql, read, write
from perdure.threads.context import StoreContext

_RETRY = Sql(
    """UPDATE run SET status = 'queued', fence = fence + 1, owner = NULL, waiting = NULL, wake_at = 0, request = NULL,
        keep_until = NULL, entries = :entries, digest = :digest, seq = :last, changed_at = {now}, reopened_at = {now}
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'failed' RETURNING run"""
)


def failed_calls(execution: Execution, failure: Exception) -> list[str]:
    """Return the paths of the calls that failed a run and that a retry can run again: nothing was recorded after."""
    paths = {path for error in _errors(failure) if (path := recorded_at(error)) is not None}
    return sorted(path for path in paths if _is_last(execution.index, path))


def _errors(error: BaseException) -> Iterable[BaseException]:
    """Return an error, the members of a group, and their causes.

    Their `__context__` is left out: the code had caught that error and continued.
    """
    known = {id(error): error}
    left = [error]
    while left:
        link = left.pop()
        below = [link.__cause__, *(link.exceptions if isinstance(link, BaseExceptionGroup) else ())]
        new = {id(other): other for other in below if other is not None and id(other) not in known}
        known |= new
        left += new.values()
    return known.values()


def _is_last(index: JournalIndex, path: str) -> bool:
    """Return whether nothing was recorded after the end of a call, in its branch or in an enclosing one.

    Other branches do not count: they repeat their calls whatever this call returns.
    """
    ends = [row.seq for row in index.at(path) if row.kind == DONE]
    after = (row.entry.path for row in index.rows() if ends and row.seq > ends[-1])
    others = (other for other in after if is_call(other) and other != path)
    return bool(ends) and not any(path.startswith(branch_of(other)) for other in others)


def retry(ctx: StoreContext, run_id: str) -> Flow[str]:
    """Queue a failed run again. Return "queued", or the status of a run that has not failed.

    Raises RunError if the run's effects were undone or its journal was removed, and Conflict if it is a singleton and
    another one is open.
    """
    tenant, row = yield from locate(ctx, run_id)
    check_no_task(row)
    if row.status != "failed":
        return row.status
    if is_swept(row):
        raise RunError(f"run {run_id!r} cannot be retried: {NOT_ON_RECORD}")
    described = described_end((yield from read(partial(outcome_of, tenant, row))), ctx.codec)
    if "undone" in described:
        raise RunError(
            f"run {run_id!r} cannot be retried: its effects were undone when it failed. Start it again under another id"
        )
    entries, total = yield from read(partial(read_with_sum, tenant, row))
    lines, total = _reopened(row, entries, total, described.get("calls") or [], ctx.clock_us())
    return (yield from write(partial(_retry, tenant, row, lines, total, ctx.clock_us())))


def _reopened(
    row: RunRow, entries: list[Recorded], total: JournalSum, paths: list[str], now: int
) -> tuple[list[JournalRow], JournalSum]:
    """Return the rows that reopen calls, and the journal's sum including them."""
    count, digest, last = total.entries or 0, total.digest or 0, total.last or 0
    ends = {one.entry.path: one.entry for one in entries if one.kind == DONE}
    lines = []
    for path in paths:
        end = ends[path]
        entry = Entry(path, end.name, now, end.args_hash, end.attempt, extra={"retried": True, "due": 0})
        lines.append(JournalRow(last := last + 1, FAILED, pack(entry)))
        digest += entry_digest(row.run, last, FAILED, lines[-1].body)
    return lines, JournalSum(count + len(lines), digest & DIGEST_MASK, last)


def _retry(tenant: int, row: RunRow, lines: list[JournalRow], total: JournalSum, now: int) -> Program[str]:
    key = {"tenant": tenant, "run": row.run}
    yield from check_single(tenant, row)
    [taken] = yield Batch(_RETRY(**key, fence=row.fence, **total._asdict(), now=now))
    if not taken:  # another process has changed the run since it was read
        [rows] = yield Batch(LOCK(**key), last=True)
        return RunRow._make(rows[0]).status
    statements = [*(ADD_ENTRY(**key, **line._asdict()) for line in lines), *take_turn(tenant, row)]
    if statements:
        yield Batch(*statements, last=True)
    return "queued"
