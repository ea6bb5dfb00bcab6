"""`perdure store repair`: makes a repaired copy of a damaged store and reports what was done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, command
from perdure.cli.text import fields, plural

if TYPE_CHECKING:
    from perdure.cli.output import Cell, Output
    from perdure.ops.repair.repair import Repaired, RepairNote

_SHOWN_MAX = 200


@command("perdure store repair --store agent.db\nperdure store repair --store postgresql://app@db/app --to repaired")
@click.option("--to", metavar="FILE", help="Where the repaired copy goes; on PostgreSQL, the name of a schema.")
@click.pass_obj
def repair(cli: Invocation, to: str | None) -> int:
    """Make a repaired copy of a damaged store.

    Keeps what hashes prove; rows that they refute go to the table `quarantine` of the copy. Then everything is
    verified. The copy is agent.repaired.db beside the store (or --to), on PostgreSQL a new schema. A store without
    damage gets no copy. Exits with 1 if something is lost. An encrypted store needs its keys ($PERDURE_KEYS).
    """
    import perdure

    with cli.out.progress("repairing") as progress:
        done = perdure.repair(cli.url, to=to, progress=progress, **cli.options(cli.url))
    if cli.out.json:
        cli.out.document({"ok": done.ok, "changed": done.changed, **fields(done)})
    else:
        _print(done, cli.out)
    return OK if done.ok else NO


def _print(done: Repaired, out: Output) -> None:
    report = done.report
    for name in done.left:
        out.message(f"tenant {name} was not checked: its key is missing")
    checked = f"{plural(report.checkpoints, 'checkpoint')} of {plural(report.threads, 'thread')}"
    checked += f" and {plural(report.runs, 'run')}" if report.runs else ""
    if not done.changed:
        out.line((f"no damage: {checked} checked, no copy was made", "green"))
        return
    for title, notes, style in (("repaired", done.repaired, "green"), ("lost", done.lost, "red")):
        rows = [_row(note, style) for note in notes[:_SHOWN_MAX]]
        if rows:
            out.table((title, "where", "what"), rows)
        if len(notes) > _SHOWN_MAX:
            out.message(f"{len(notes) - _SHOWN_MAX} more; --json has all")
    out.line((f"{plural(len(done.repaired), 'thing')} repaired, {len(done.lost)} lost", "bold"))
    if done.quarantined:
        out.line((f"{plural(done.quarantined, 'row')} that could not be used: in its table quarantine", "yellow"))
    if report.ok:
        out.line((f"{done.place}: {checked} verified, no problems", "green"))
    else:
        for problem in report.problems[:_SHOWN_MAX]:
            out.line((str(problem), "red"))
        out.line((f"{done.place}: {checked} verified, {plural(len(report.problems), 'problem')}", "bold red"))
    out.message("the store itself is unchanged: stop its users and put the copy in its place")


def _row(note: RepairNote, style: str) -> list[Cell]:
    where = " ".join(part for part in (note.thread or note.run or "store", note.checkpoint) if part)
    return [(note.tenant or "-", "dim"), (where, "bold"), (note.what, style)]
