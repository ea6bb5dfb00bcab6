"""The doctor's checks of how agents work: effects, checks before a retry, progress files, commits, next actions.

They read the newest entries of the newest runs, so they stay cheap however much is stored. Git is only asked.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from perdure.agents import progress_file
from perdure.agents.progress import NAME, progress_in
from perdure.agents.progress_file import Progress
from perdure.ops.doctor.findings import DAY_S, Finding, span
from perdure.runs.journal.entries import DONE, INTENT, Entry, unpack
from perdure.runs.journal.journal import PAGE_OF_ROWS, SEQ_MAX
from perdure.runs.journal.rows import FINISHED
from perdure.storage.program import Flow, Sql, aside, fetch
from perdure.threads.context import StoreContext
from perdure.values.amounts import plural

_RUNS, _ENTRIES = 50, 500  # the newest runs, and the newest entries of each
_RECORDS = 5
_STALE_DAYS = 7
_DOUBT_DAYS = 30
_US = 1_000_000
_NEWEST = Sql("SELECT run, id, status, since, seq FROM run WHERE tenant = :tenant ORDER BY run DESC LIMIT :limit")
_DOUBTS = Sql("SELECT count(*) FROM ask WHERE tenant = :tenant AND kind = 'doubt' AND asked_at >= :since")


class _Report(NamedTuple):
    """The last progress that a run reported."""

    run: str
    is_over: bool
    at: int
    progress: Progress
    file: str | None


def agents(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that actions are saved before and after, and what agents leave for their next session."""
    tenant = yield from ctx.tenant()
    intents = open_ = 0
    reports: list[_Report] = []
    runs = [] if tenant is None else (yield from fetch(_NEWEST, tenant=tenant, limit=_RUNS))
    for run, name, status, since, seq in runs:
        first = max(since, seq - _ENTRIES)
        rows = yield from fetch(PAGE_OF_ROWS, tenant=tenant, run=run, since=first, last=SEQ_MAX, limit=2 * _ENTRIES)
        last: Entry | None = None
        begun, ended = set[str](), set[str]()
        for _, kind, body in rows:
            if kind == INTENT:
                begun.add(unpack(body).path)
            elif kind == DONE:
                ended.add((entry := unpack(body)).path)
                last = entry if entry.name == NAME else last
        intents, open_ = intents + len(begun), open_ + len(begun - ended)
        if last is not None and tenant is not None:
            record = yield from progress_in(ctx, tenant, last)
            reports.append(_Report(name, status in FINISHED, last.at, record.progress, record.file))
    findings = [_effects(len(runs), intents, open_)]
    if tenant is not None and intents:
        since = ctx.clock_us() - _DOUBT_DAYS * DAY_S * _US
        [(doubts,)] = yield from fetch(_DOUBTS, tenant=tenant, since=since)
        findings.append(_reconcile(doubts))
    return findings + (yield from aside(partial(_reported, reports, ctx.clock_us(), ctx.driver.capabilities.path)))


def _effects(runs: int, intents: int, open_: int) -> Finding:
    if intents:
        after = f"; {open_:,} of them without an end, under way or in doubt" if open_ else " and after it"
        message = f"{plural(intents, 'effect')} in the newest {plural(runs, 'run')}: saved before each began{after}"
        return Finding("effects", "ok", message)
    message = "no effect is recorded: a crash would not show which calls to the outside had begun"
    hint = "mark calls that change something outside with @perdure.effect, also in nodes; see docs/how-to/effects.md"
    return Finding("effects", "note", message, hint)


def _reconcile(doubts: int) -> Finding:
    """Report effects in doubt that no `reconcile` could settle, so that a person had to."""
    if not doubts:
        message = f"no effect of the last {_DOUBT_DAYS} days needed a person to find out whether it had happened"
        return Finding("reconcile", "ok", message)
    message = f"{plural(doubts, 'effect')} of the last {_DOUBT_DAYS} days needed a person to find out what happened"
    hint = "give effects a reconcile= that asks the receiver before a retry; see docs/how-to/effects.md"
    return Finding("reconcile", "warning", message, hint)


def _reported(reports: list[_Report], now: int, store: str) -> list[Finding]:
    if not reports:
        hint = 'for work of several sessions: perdure.progress(goal=…, next=…, file="PROGRESS.md", git=True)'
        return [Finding("progress", "note", "the newest runs have reported no progress", hint)]
    newest: dict[str, _Report] = {}
    for report in reports:  # the newest first
        newest.setdefault(report.file or f"run {report.run}", report)
    findings: list[Finding] = []
    for report in list(newest.values())[:_RECORDS]:
        findings.append(_file(report, now))
        if report.file is not None and os.path.exists(report.file):
            findings.append(_commits(report.file, store))
        findings.append(_next(report))
    return findings


def _file(report: _Report, now: int) -> Finding:
    """Check that the file of a report is there and has what the store has."""
    file, age_s = report.file, (now - report.at) / _US
    if file is None:
        hint = 'name one for people and the next session: perdure.progress(file="PROGRESS.md")'
        return Finding("progress", "note", f"run {report.run!r} reports progress without a file", hint)
    try:
        written = progress_file.read(file)
    except OSError as error:
        hint = "make it readable; a report does not replace a file that it cannot read"
        return Finding("progress", "warning", f"{file} cannot be read: {error.strerror}", hint)
    again = f"`perdure run progress {report.run}` prints the record: the next report writes the file again"
    if written is None:
        return Finding("progress", "note", f"{file}, of run {report.run!r}, is not on this machine", again)
    if not {progress_file.one_line(text) for text in report.progress.done} <= set(written.done):
        return Finding("progress", "warning", f"{file} lacks steps that run {report.run!r} has completed", again)
    if not report.is_over and age_s > _STALE_DAYS * DAY_S:
        message = f"the last report in {file} is {span(age_s)} old, and run {report.run!r} is not finished"
        return Finding("progress", "warning", message, f"see what it waits for: `perdure run show {report.run}`")
    return Finding("progress", "ok", f"{file} has all that run {report.run!r} reported, {span(age_s)} ago")


def _commits(file: str, store: str) -> Finding:
    """Check that git has the file as it is, and what else changed in its repository. The store's own files are none."""
    status = progress_file.git_status(Path(file))
    if status is None:
        hint = "keep it in a git repository, and report with git=True: each report is then a commit"
        return Finding("commits", "note", f"{file} is in no git repository", hint)
    if status:
        hint = f"commit it, or report with git=True: `git add {file}`"
        return Finding("commits", "warning", f"{file} has changes that git has not", hint)
    changed = (progress_file.git_status(Path(file), all_files=True) or "").splitlines()
    others = sum(not os.path.basename(line[3:]).startswith(os.path.basename(store) or "/") for line in changed)
    if others:
        message = f"git has {file} as it is, but not {plural(others, 'other change')} in its repository"
        return Finding("commits", "note", message, "commit what a session did together with its report: `git status`")
    return Finding("commits", "ok", f"git has {file} as it is, and nothing else in its repository has changed")


def _next(report: _Report) -> Finding:
    """Check that a report says what comes next, unless the work is done."""
    said, run = report.progress, report.run
    if said.next:
        return Finding("next", "ok", f"run {run!r} says what comes next: {said.next[:80]}")
    if report.is_over and not said.blocked:
        return Finding("next", "ok", f"run {run!r} is finished and says that nothing is left to do")
    hint = "a new session begins with it: perdure.progress(next=…)"
    return Finding("next", "warning", f"run {run!r} does not say what comes next", hint)
