"""`perdure store repair`: repairs a damaged store, on a copy unless told otherwise, and reports what it did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, command
from perdure.cli.parameters import yes_option
from perdure.cli.text import fields, plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.cli.output import Cell, Output
    from perdure.ops.repair.report import Mend, Repaired

_SHOWN_MAX = 200


@command(
    "perdure store repair --dry-run\nperdure store repair --store agent.db\n"
    "perdure store repair --store postgresql://app@db/app --in-place --yes"
)
@click.option("--to", metavar="FILE", help="Where the repaired copy goes; on PostgreSQL, the name of a schema.")
@click.option("--in-place", is_flag=True, help="Repair the store itself; asks first, or give --yes.")
@click.option("--dry-run", is_flag=True, help="Report what would be done, and leave nothing behind.")
@click.option(
    "--leave", metavar="TENANT", multiple=True, help="Leave a tenant whose key is gone as it is (may be repeated)."
)
@yes_option
@click.pass_obj
def repair(
    cli: Invocation,
    to: str | None,
    in_place: bool,
    dry_run: bool,
    leave: tuple[str, ...],
    yes: bool,
) -> int:
    """Repair a damaged store, on a copy.

    Keeps what hashes prove and removes what they refute; rows that cannot be used go to a file. Then everything is
    verified. The copy is agent.repaired.db beside the store (or --to), on PostgreSQL a new schema. A store without
    damage gets no copy. Exits with 1 if something is lost. An encrypted store needs its keys ($PERDURE_KEYS).
    """
    import perdure

    if sum((to is not None, in_place, dry_run)) > 1:
        raise UsageError("--to, --in-place and --dry-run exclude each other")
    if in_place and not cli.confirmed(f"Repair {cli.url} itself? Without --in-place a copy is repaired.", yes=yes):
        return NO
    with cli.out.progress("repairing") as progress:
        done = perdure.repair(
            cli.url,
            to=to,
            in_place=in_place,
            dry_run=dry_run,
            leave=list(leave),
            progress=progress,
            **cli.options(cli.url),
        )
    if cli.out.json:
        cli.out.document({"ok": done.ok, "changed": done.changed and not dry_run, **fields(done)})
    else:
        _print(done, dry_run, cli.out)
    return OK if done.ok else NO


def _print(done: Repaired, dry_run: bool, out: Output) -> None:
    report = done.report
    for name in done.left:
        out.message(f"tenant {name} was left as it is, and not checked")
    checked = f"{plural(report.checkpoints, 'checkpoint')} of {plural(report.threads, 'thread')}"
    checked += f" and {plural(report.runs, 'run')}" if report.runs else ""
    if not done.changed:
        out.line((f"no damage: {checked} checked, nothing was changed", "green"))
        return
    for title, mends, style in (("repaired", done.mended, "green"), ("lost", done.lost, "red")):
        rows = [_row(mend, style) for mend in mends[:_SHOWN_MAX]]
        if rows:
            out.table((title, "where", "what"), rows)
        if len(mends) > _SHOWN_MAX:
            out.message(f"{len(mends) - _SHOWN_MAX} more; --json has all")
    would = "would be " if dry_run else ""
    out.line((f"{plural(len(done.mended), 'thing')} {would}repaired, {len(done.lost)} {would}lost", "bold"))
    if done.quarantine:
        out.line((f"{plural(done.rows, 'row')} that could not be used: {done.quarantine}", "yellow"))
    if done.damaged:
        out.line((f"the file as it was: {done.damaged}", ""))
    where = "the repaired store" if dry_run else done.place
    if report.ok:
        out.line((f"{where}: {checked} verified, no problems", "green"))
    else:
        for problem in report.problems[:_SHOWN_MAX]:
            out.line((str(problem), "red"))
        out.line((f"{where}: {checked} verified, {plural(len(report.problems), 'problem')}", "bold red"))
    if not (dry_run or done.in_place):
        out.message("the store itself is unchanged: stop its users and put the copy in its place")


def _row(mend: Mend, style: str) -> list[Cell]:
    where = " ".join(part for part in (mend.thread or mend.run or "store", mend.checkpoint) if part)
    return [(mend.tenant or "-", "dim"), (where, "bold"), (mend.what, style)]
