"""The commands that examine a store: doctor, store health, store stats, store verify. Nothing here changes it."""

from __future__ import annotations

import os
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, command, root, sqlite_file, store_group, with_store
from perdure.cli.text import ago, plural, readable, size
from perdure.errors import PerdureError, UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Finding, Report

LEVELS = ("ok", "note", "warning", "problem")


@command(
    root,
    "Stores",
    "perdure doctor\nperdure doctor --store postgresql://app@db/app\n"
    "perdure doctor --strict --json | jq '.findings[] | select(.level != \"ok\")'",
)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too, not only for problems.")
@click.pass_obj
def doctor(cli: Invocation, strict: bool) -> int:
    """Go through the checklist of a deployment.

    Prints the state of each check and what to do about it. Changes nothing. Exits with 1 if there is a problem, for
    example if the store cannot be opened. It does not read the states: `perdure store verify` does.
    """
    findings = _examine(cli)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    bad = counts["problem"] + (counts["warning"] if strict else 0)
    if cli.json:
        cli.document(ok=not bad, counts=counts, findings=findings)
        return NO if bad else OK
    for finding in findings:
        cli.line(f"{finding.level:<7}", f"{finding.check:<12}", finding.message)
        if finding.hint:
            cli.line(" " * 21, finding.hint)
    cli.line(", ".join(plural(counts[level], level) for level in ("problem", "warning", "note")))
    return NO if bad else OK


def _examine(cli: Invocation) -> list[Finding]:
    from perdure.ops.doctor.findings import Finding
    from perdure.storage.urls import redacted

    cli.options(cli.url)
    try:
        with cli.open() as store:
            return store.ops.doctor()
    except UsageError:
        raise
    except PerdureError as error:
        message = f"the store cannot be opened: {redacted(str(error))}"
        return [Finding("open", "problem", message, "mend this, then run `perdure doctor` again")]


@command(store_group, "State of the store", "perdure store health --json | jq .growth_bytes_per_day")
@with_store
def health(cli: Invocation, store: Store) -> None:
    """Show saves, runs, size, growth and backups.

    Cheap enough to run often. Records the size once an hour, and computes the growth from these samples.
    """
    status = store.ops.health()
    computed = {name: getattr(status, name) for name in ("unsaved_changes", "unsaved_s", "disk_full_at")}
    if cli.json:
        return cli.document(status, computed)
    return print_fields(cli, status, computed, now=status.at)


@command(store_group, "State of the store", "perdure store stats --json | jq .ratio")
@with_store
def stats(cli: Invocation, store: Store) -> None:
    """Count threads, checkpoints, runs and bytes.

    The ratio says how many times larger the states would be if each were stored in full.
    """
    usage = store.ops.stats()
    path = sqlite_file(cli.url)
    files = [name for name in (path, f"{path}-wal") if path and name and os.path.exists(name)]
    file_bytes = sum(map(os.path.getsize, files)) if files else None
    more = {"stored_bytes": usage.stored_bytes, "ratio": round(usage.ratio, 3), "file_bytes": file_bytes}
    if cli.json:
        return cli.document(usage, more)
    return print_fields(cli, usage, more)


def print_fields(cli: Invocation, record: Any, more: dict[str, Any], now: datetime | None = None) -> None:
    """Print the fields of a result, a line each."""
    values = {field.name: getattr(record, field.name) for field in fields(record)} | more
    rows = [(name.replace("_", " "), _figure(name, value, now)) for name, value in values.items() if name != "at"]
    cli.table(("what", "now"), rows)


def _figure(name: str, value: Any, now: datetime | None) -> str:
    if value in (None, (), {}):
        return "-"
    if isinstance(value, datetime):
        return ago(value, now or value)
    if "bytes" in name:
        return size(value)
    if isinstance(value, dict):
        return ", ".join(f"{count:,} {key}" for key, count in value.items())
    if hasattr(value, "since"):  # a waiting run
        return f"{value.id}, since {ago(value.since, now or value.since)}"
    return f"{value:,}" if type(value) is int else str(readable(value))


@command(store_group, "State of the store", "perdure store verify\nperdure store verify --json | jq .problems")
@with_store
def verify(cli: Invocation, store: Store) -> int:
    """Check every hash and every record of the tenant, and the database file.

    Exits with 1 if there is a problem.
    """
    with cli.progress("verifying") as progress:
        report = store.ops.verify(progress=progress)
    if cli.json:
        cli.document(report, ok=report.ok)
    else:
        if report.problems:
            rows = [
                (problem.run or problem.thread or "-", problem.checkpoint or "-", problem.what)
                for problem in report.problems
            ]
            cli.table(("thread or run", "checkpoint", "problem"), rows)
        problems = plural(len(report.problems), "problem") if report.problems else "no problems"
        cli.line(f"{checked(report)} checked: {problems}")
    return OK if report.ok else NO


def checked(report: Report) -> str:
    """Return how much a report covers: `3 checkpoints of 1 thread and 2 runs`."""
    parts = [f"{plural(report.checkpoints, 'checkpoint')} of {plural(report.threads, 'thread')}"]
    parts += [plural(report.runs, "run")] if report.runs else []
    parts += [f"{plural(report.versions, 'version')} of items"] if report.versions else []
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
