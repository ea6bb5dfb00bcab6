"""`perdure doctor`: the checklist of a deployment, with what to do, and an exit code for CI. Changes nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

import perdure
from perdure.cli import opening
from perdure.cli.command import Command
from perdure.cli.readable import plural
from perdure.cli.render import Cell, Output
from perdure.errors import PerdureError, UsageError

if TYPE_CHECKING:
    from perdure.ops.doctor.checklist import Finding

OK, NO = 0, 1
_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too, not only for problems")


def doctor(args: Namespace, _store: None, out: Output) -> int:
    found = _examine(args)
    counts = {level: sum(finding.level == level for finding in found) for level in _STYLES}
    bad = counts["problem"] + (counts["warning"] if args.strict else 0)
    if out.json:
        out.document({"ok": not bad, "counts": counts, "findings": [asdict(finding) for finding in found]})
        return NO if bad else OK
    for finding in found:
        _print(finding, out)
    said = ", ".join(plural(counts[level], level) for level in ("problem", "warning", "note"))
    out.line((said, "bold red" if counts["problem"] else "yellow" if counts["warning"] else "green"))
    return NO if bad else OK


def _print(finding: Finding, out: Output) -> None:
    cells: list[Cell] = [
        (f"{finding.level:<7}", _STYLES[finding.level]),
        (f"{finding.check:<12}", "bold"),
        (finding.says, ""),
    ]
    out.line(*cells)
    if finding.do:
        out.line((" " * 21, ""), (finding.do, "cyan"))


def _examine(args: Namespace) -> list[Finding]:
    from perdure.ops.doctor.checklist import triage, would_change

    options = {**opening.options(args, args.store), **opening.tenant(args)}
    try:
        # Opening brings an old schema up to date, which is not the doctor's to do.
        if (finding := would_change(args.store)) is not None:
            return [finding]
        with perdure.open(args.store, create=False, **options) as store:
            return store.ops.doctor()
    except UsageError:
        raise
    except PerdureError as error:
        return triage(args.store, error)


DOCTOR = Command(
    "go through the checklist of a deployment",
    "For each line how it stands and what to do:\nwhere the store is, durability, the log, connections, backups and "
    "when one was last restored, retention,\nroles, disk and growth, clock, schema, transactions, versions, runs that "
    "need help, encryption,\npermissions. Changes nothing. Exits with 1 if there is a problem, with --strict also for "
    "a warning.\nAlso for a store that cannot be opened. It does not read the states: `perdure verify` does.",
    "  perdure doctor\n  perdure doctor --store postgresql://app@db/app\n"
    "  perdure doctor --strict --json | jq '.findings[] | select(.level != \"ok\")'",
    arguments,
    doctor,
    opens=False,
)
