"""The commands about teams as a whole: what falls with a rewind, moving a member, the diagram, the words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, team_group, with_store

if TYPE_CHECKING:
    from perdure import Store


@command(team_group, "Commands", "perdure team recover research writer --turn 41")
@click.argument("team")
@click.argument("member")
@click.option("--turn", type=click.IntRange(min=0), required=True, help="The last turn that it would keep.")
@with_store
def recover(cli: Invocation, store: Store, team: str, member: str, turn: int) -> None:
    """Show the recovery line: who would fall with a member that goes back to a turn, how far, and why.

    Changes nothing; `perdure team rewind` does it. --json prints a line per member.
    """
    falls = store.team(team).rewind(member, turn=turn, dry_run=True).falls
    if not falls:
        cli.message("no member goes back")
    for fall in falls:
        cli.result(str(fall), {"member": fall.member, "from_turn": fall.from_turn, "to_turn": fall.to_turn})


@command(team_group, "Commands", "perdure team move research writer --to postgresql://db/west")
@click.argument("team")
@click.argument("member")
@click.option("--to", "url", metavar="URL", required=True, help="The store that it goes to: one of the same team.")
@with_store
def move(cli: Invocation, store: Store, team: str, member: str, url: str) -> None:
    """Move a member to another store of its team, between two of its turns, while it works and gets mail.

    Its state goes as a message, with what waits for it. The stores must be linked (`perdure.teams.link`).
    """
    from perdure.teams.linked import linked_already

    with store._open(url, tenant=store._context.tenant_name, create=False) as other:
        linked, there = linked_already(store.team(team), other.team(team))
        linked.move(member, there)
    cli.result(f"{member} continues in store {there}", {"team": team, "member": member, "store": there})


@command(
    team_group,
    "Commands",
    "perdure team diagram research --output research.svg\nperdure team diagram research --at before-deploy > cut.svg",
)
@click.argument("team")
@click.option("--at", metavar="SNAPSHOT", help="Draw the cut of this snapshot through it.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Write it there (default: print it).")
@with_store
def diagram(cli: Invocation, store: Store, team: str, at: str | None, output: Path | None) -> None:
    """Draw a team as SVG: agents are lines, turns boxes, messages arrows, a snapshot a line through all.

    A message that crosses that line was in flight.
    """
    picture = store.team(team).diagram(at)
    if output is None:
        _print(cli, picture, "svg")
    else:
        output.write_text(picture)
        cli.result(f"wrote {output}", {"file": str(output), "bytes": len(picture.encode())})


@command(team_group, "Commands", "perdure team explain research")
@click.argument("team")
@with_store
def explain(cli: Invocation, store: Store, team: str) -> None:
    """Say which of the three ways of checkpointing a team has, and what each costs."""
    _print(cli, store.team(team).explain(), "text")


def _print(cli: Invocation, text: str, field: str) -> None:
    """Print a text of several lines, or with --json a document that has it."""
    if cli.json:
        cli.document({field: text})
    else:
        for line in text.splitlines():
            cli.line(line)
