"""The command `health`: how a store is doing, in figures that cost nothing to get."""

from __future__ import annotations

import argparse
from argparse import Namespace

from perdure import Store
from perdure.cli.command import Command
from perdure.cli.looking import OK
from perdure.cli.readable import ago, local, size
from perdure.cli.render import Cell, Output
from perdure.ops.health import RUNS_MAX, THREADS_MAX, Health, WaitingRun, as_json


def health(args: Namespace, store: Store, out: Output) -> int:
    found = store.ops.health()
    if out.json:
        out.document(as_json(found))
        return OK
    rows = [*_work(found), *_space(found), *_kept(found), *_copies(found)]
    out.table(("what", "now"), [[(what, ""), cell] for what, cell in rows])
    return OK


def _work(found: Health) -> list[tuple[str, Cell]]:
    saved = ("never", "dim") if found.last_save_at is None else (ago(found.last_save_at, found.at), "bold")
    rows = [("last save", saved), ("threads", (_count(found.threads, THREADS_MAX), "bold"))]
    runs = ", ".join(f"{_count(count, RUNS_MAX)} {status}" for status, count in found.runs.items())
    rows.append(("runs", (runs or "none", "bold" if runs else "dim")))
    for what, run, style in (("stuck", found.oldest_stuck, "red"), ("waiting", found.oldest_waiting, "")):
        if run is not None:
            rows.append((f"oldest {what} run", (_run(run, found), style)))
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
    about = " (from its age: an estimate)" if found.growth_is_estimate else ""
    return (f"{sign}{size(round(abs(found.growth_bytes_per_day)))} per day{about}", "bold")


def _kept(found: Health) -> list[tuple[str, Cell]]:
    has = ("set", "bold") if found.has_retention else ("not set: everything is kept", "")
    return [("retention", has)]


def _copies(found: Health) -> list[tuple[str, Cell]]:
    if found.last_backup_at is None:
        return [("last backup", ("never: see `perdure backup`", "yellow"))]
    restored = found.last_restored_at
    tried = ", never restored" if restored is None else f", restored {ago(restored, found.at)}"
    return [("last backup", (ago(found.last_backup_at, found.at) + tried, "bold"))]


def _run(run: WaitingRun, found: Health) -> str:
    return f"{run.id}, since {ago(run.since, found.at).removesuffix(' ago')}"


def _count(number: int, most: int) -> str:
    return f"{number:,}" if number < most else f"{most:,} or more"


def _arguments(parser: argparse.ArgumentParser) -> None:
    pass


HEALTH = Command(
    "how the store is doing: saves, runs, size, growth, backups",
    "Reads no table from end to end, so it may be\nasked often. Leaves a sample of the size once an hour, from which "
    "growth is told.",
    "  perdure health\n  perdure health --json | jq .growth_bytes_per_day",
    _arguments,
    health,
)
