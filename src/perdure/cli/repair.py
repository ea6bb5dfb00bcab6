"""`perdure repair`: mends a damaged store and says what it did; on a copy, unless told otherwise."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sized
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import perdure
from perdure.cli import opening
from perdure.cli.command import Command
from perdure.cli.readable import plural
from perdure.cli.render import Cell, Output
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.ops.repair.repaired import Mend, Repaired

OK, NO = 0, 1
_SHOWN_MAX = 200


def arguments(parser: ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--to", metavar="FILE", help="where the mended copy goes; on PostgreSQL, the name of a schema")
    how.add_argument("--in-place", action="store_true", help="mend the store itself; asks first, or give --yes")
    how.add_argument("--dry-run", action="store_true", help="say what would be done, and leave nothing behind")
    parser.add_argument(
        "--leave",
        metavar="TENANT",
        action="append",
        default=[],
        help="leave a tenant whose key is gone; may be repeated",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal")


def repair(args: Namespace, _store: None, out: Output) -> int:
    if args.in_place and not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("repair --in-place changes the store: give --yes when there is no terminal to ask on")
        if not out.confirm(f"Mend {args.store} itself? Without --in-place a copy is mended."):
            out.message("nothing was changed")
            return NO
    options = opening.options(args, args.store)
    with out.progress("repairing") as progress:
        done = perdure.repair(
            args.store,
            to=args.to,
            in_place=args.in_place,
            dry_run=args.dry_run,
            leave=args.leave,
            progress=progress,
            **options,
        )
    if out.json:
        out.document(_as_json(done, args.dry_run))
    else:
        _print(done, args.dry_run, out)
    return OK if done.ok else NO


def _as_json(done: Repaired, dry_run: bool) -> dict[str, Any]:
    return {
        "ok": done.ok,
        "changed": done.changed and not dry_run,
        "place": done.place,
        "in_place": done.in_place,
        "mended": [asdict(mend) for mend in done.mended],
        "lost": [asdict(mend) for mend in done.lost],
        "quarantine": done.quarantine,
        "rows": done.rows,
        "damaged": done.damaged,
        "left": list(done.left),
        "verify": {
            "ok": done.report.ok,
            "threads": done.report.threads,
            "checkpoints": done.report.checkpoints,
            "runs": done.report.runs,
            "problems": [str(problem) for problem in done.report.problems],
        },
        "seconds": round(done.seconds, 3),
    }


def _print(done: Repaired, dry_run: bool, out: Output) -> None:
    report = done.report
    for name in done.left:
        out.message(f"tenant {name} was left as it is, and not looked at")
    checked = f"{plural(report.checkpoints, 'checkpoint')} of {plural(report.threads, 'thread')}"
    checked += f" and {plural(report.runs, 'run')}" if report.runs else ""
    if not done.changed:
        out.line((f"nothing is wrong: {checked} checked, nothing was changed", "green"))
        return
    for title, mends, style in (("mended", done.mended, "green"), ("lost", done.lost, "red")):
        rows = [_row(mend, style) for mend in mends[:_SHOWN_MAX]]
        if rows:
            out.table((title, "where", "what"), rows)
        if len(mends) > _SHOWN_MAX:
            out.message(f"{len(mends) - _SHOWN_MAX} more; --json has all")
    mended, lost = _counted(done.mended, "mended", dry_run), _counted(done.lost, "lost", dry_run)
    out.line((f"{plural(len(done.mended), 'thing')} {mended}, {len(done.lost)} {lost}", "bold"))
    if done.quarantine:
        out.line((f"{plural(done.rows, 'row')} that could not be used: {done.quarantine}", "yellow"))
    if done.damaged:
        out.line((f"the file as it was: {done.damaged}", ""))
    where = "what a repair would make" if dry_run else done.place
    if report.ok:
        out.line((f"{where}: {checked} verified, no problems", "green"))
    else:
        for problem in report.problems[:_SHOWN_MAX]:
            out.line((str(problem), "red"))
        out.line((f"{where}: {checked} verified, {plural(len(report.problems), 'problem')}", "bold red"))
    if not (dry_run or done.in_place):
        out.message("the store itself is as it was: stop its users and put the copy in its place")


def _counted(mends: Sized, done: str, dry_run: bool) -> str:
    return f"would be {done}" if dry_run else f"{'was' if len(mends) == 1 else 'were'} {done}"


def _row(mend: Mend, style: str) -> list[Cell]:
    where = " ".join(part for part in (mend.thread or mend.run or "store", mend.checkpoint) if part)
    return [(mend.tenant or "-", "dim"), (where, "bold"), (mend.what, style)]


REPAIR = Command(
    "mend a damaged store, on a copy",
    "Rebuilds the file and its indexes, rows, keyframes, heads and\nids, as far as hashes prove what "
    "they were; what cannot be saved goes to a file, and is\nnamed. Then everything is verified. The copy is "
    "agent.repaired.db beside the store (or --to), on\nPostgreSQL a new schema. A store that is sound gets no copy. "
    "Exits with 1 if something is lost.\nIt needs the keys of an encrypted store (PERDURE_KEYS): without them it is "
    "refused, because sound data would look lost.",
    "  perdure repair --dry-run\n  perdure repair --store agent.db\n"
    "  perdure repair --store postgresql://app@db/app --in-place --yes",
    arguments,
    repair,
    opens=False,
)
