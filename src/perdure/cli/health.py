"""The commands that examine a store: doctor, store health, store stats, store verify. Nothing here changes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, command, sqlite_file, with_store
from perdure.cli.text import ago, as_field, fields, local, plural, size
from perdure.errors import PerdureError, UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.cli.output import Cell, Output
    from perdure.ops import Finding, Health, Report

_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}


@command(
    "perdure doctor\nperdure doctor --store postgresql://app@db/app\n"
    "perdure doctor --strict --json | jq '.findings[] | select(.level != \"ok\")'"
)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too, not only for problems.")
@click.pass_obj
def doctor(cli: Invocation, strict: bool) -> int:
    """Go through the checklist of a deployment.

    Prints for each line how it stands and what to do. Changes nothing. Exits with 1 if there is a problem. Also for a
    store that cannot be opened. It does not read the states: `perdure store verify` does.
    """
    out, found = cli.out, _examine(cli)
    counts = {level: sum(finding.level == level for finding in found) for level in _STYLES}
    bad = counts["problem"] + (counts["warning"] if strict else 0)
    if out.json:
        out.document({"ok": not bad, "counts": counts, "findings": [fields(finding) for finding in found]})
        return NO if bad else OK
    for finding in found:
        out.line(
            (f"{finding.level:<7}", _STYLES[finding.level]), (f"{finding.check:<12}", "bold"), (finding.message, "")
        )
        if finding.hint:
            out.line((" " * 21, ""), (finding.hint, "cyan"))
    summary = ", ".join(plural(counts[level], level) for level in ("problem", "warning", "note"))
    out.line((summary, "bold red" if counts["problem"] else "yellow" if counts["warning"] else "green"))
    return NO if bad else OK


def _examine(cli: Invocation) -> list[Finding]:
    from perdure.ops.doctor.findings import Finding

    cli.options(cli.url)
    try:
        with cli.open(create=False) as store:
            return store.ops.doctor()
    except UsageError:
        raise
    except PerdureError as error:
        return [Finding("open", "problem", f"the store cannot be opened: {error}", "then run the doctor again")]


@command("perdure store health\nperdure store health --json | jq .growth_bytes_per_day")
@with_store
def health(cli: Invocation, store: Store) -> None:
    """Show saves, runs, size, growth and backups.

    Cheap: it may be asked often. Leaves a sample of the size once an hour, from which growth is computed.
    """
    found = store.ops.health()
    if cli.out.json:
        computed = ("unsaved_changes", "unsaved_s", "disk_full_at")
        cli.out.document(fields(found) | {name: as_field(getattr(found, name)) for name in computed})
    else:
        rows = [*_work(found), *_space(found), *_copies(found)]
        cli.out.table(("what", "now"), [[(what, ""), cell] for what, cell in rows])


def _work(found: Health) -> list[tuple[str, Cell]]:
    from perdure.ops.health import RUNS_MAX, THREADS_MAX

    saved = ("never", "dim") if found.last_save_at is None else (ago(found.last_save_at, found.at), "bold")
    rows = [("last save", saved), ("threads", (_count(found.threads, THREADS_MAX), "bold"))]
    runs = ", ".join(f"{_count(count, RUNS_MAX)} {status}" for status, count in found.runs.items())
    rows.append(("runs", (runs or "none", "bold" if runs else "dim")))
    for what, run, style in (("stuck", found.oldest_stuck, "red"), ("waiting", found.oldest_waiting, "")):
        if run is not None:
            since = ago(run.since, found.at).removesuffix(" ago")
            rows.append((f"oldest {what} run", (f"{run.id}, since {since}", style)))
    return rows


def _space(found: Health) -> list[tuple[str, Cell]]:
    used = f"{size(found.bytes)}, {size(found.free_bytes)} of it free" if found.free_bytes else size(found.bytes)
    rows: list[tuple[str, Cell]] = [("size", (used, "bold"))]
    if found.wal_bytes is not None:
        rows.append(("write-ahead log", (size(found.wal_bytes), "")))
    rows.append(("growth", _growth(found)))
    if found.disk_free_bytes is not None:
        full = "" if found.disk_full_at is None else f", full on {local(found.disk_full_at)[:10]} at this rate"
        rows.append(("free on the disk", (size(found.disk_free_bytes) + full, "")))
    return rows


def _growth(found: Health) -> Cell:
    if found.growth_bytes_per_day is None:
        return ("not known yet: look again in an hour", "dim")
    sign = "-" if found.growth_bytes_per_day < 0 else ""
    about = " (estimated from its age)" if found.growth_is_estimate else ""
    return (f"{sign}{size(round(abs(found.growth_bytes_per_day)))} per day{about}", "bold")


def _copies(found: Health) -> list[tuple[str, Cell]]:
    retention = ("set", "bold") if found.has_retention else ("not set: everything is kept", "")
    rows: list[tuple[str, Cell]] = [("retention", retention)]
    if found.last_backup_at is None:
        return [*rows, ("last backup", ("never: see `perdure store backup`", "yellow"))]
    restored = found.last_restored_at
    tested = ", never restored" if restored is None else f", restored {ago(restored, found.at)}"
    return [*rows, ("last backup", (ago(found.last_backup_at, found.at) + tested, "bold"))]


def _count(number: int, most: int) -> str:
    return f"{number:,}" if number < most else f"{most:,} or more"


@command("perdure store stats\nperdure store stats --json | jq .ratio")
@with_store
def stats(cli: Invocation, store: Store) -> None:
    """Count threads, checkpoints, runs and bytes.

    The ratio says how many times larger the states would be if each were stored in full.
    """
    found = store.ops.stats()
    file_bytes = _file_bytes(cli.url)
    if cli.out.json:
        derived = {"stored_bytes": found.stored_bytes, "ratio": round(found.ratio, 3), "file_bytes": file_bytes}
        cli.out.document(fields(found) | derived)
        return
    rows: list[list[Cell]] = [
        [("threads", ""), (f"{found.threads:,}", "bold")],
        [("checkpoints", ""), (f"{found.checkpoints:,}", "bold")],
        [("keyframes", ""), (f"{found.keyframes:,}", "bold")],
        [("stored", ""), (size(found.stored_bytes), "bold")],
        [("  differences", ""), (size(found.difference_bytes), "")],
        [("  keyframes", ""), (size(found.keyframe_bytes), "")],
        [("full JSON", ""), (size(found.state_bytes), "bold")],
        [("ratio", ""), (f"{found.ratio:.1f}x", "bold green")],
    ]
    if found.runs:
        rows += [[("runs", ""), (f"{found.runs:,}", "bold")], [("  journals", ""), (size(found.run_bytes), "")]]
    if file_bytes is not None:
        rows.append([("file", ""), (size(file_bytes), "bold")])
    cli.out.table(("what", "how much"), rows, right=(1,))


def _file_bytes(url: str) -> int | None:
    """What the store takes on disk: the file and its write-ahead log."""
    path = sqlite_file(url)
    if path is None:
        return None
    return sum(os.path.getsize(name) for name in (path, path + "-wal") if os.path.exists(name))


@command("perdure store verify\nperdure store verify --json | jq .problems")
@with_store
def verify(cli: Invocation, store: Store) -> int:
    """Check every hash and every record of the tenant, and the database file.

    Exits with 1 if there is a problem.
    """
    with cli.out.progress("verifying") as progress:
        report = store.ops.verify(progress=progress)
    return print_report(report, cli.out)


def print_report(report: Report, out: Output) -> int:
    """What was verified, and the exit code."""
    if out.json:
        out.document({"ok": report.ok, **fields(report)})
        return OK if report.ok else NO
    runs = f" and {plural(report.runs, 'run')}" if report.runs else ""
    checked = f"{plural(report.checkpoints, 'checkpoint')} of {plural(report.threads, 'thread')}{runs} checked"
    if report.ok:
        out.line((f"{checked}: no problems", "green"))
        return OK
    rows: list[list[Cell]] = [
        [(found.run or found.thread or "-", "bold"), (found.checkpoint or "-", "yellow"), (found.what, "red")]
        for found in report.problems
    ]
    out.table(("thread or run", "checkpoint", "problem"), rows)
    out.line((f"{checked}: {plural(len(report.problems), 'problem')}", "bold red"))
    return NO
