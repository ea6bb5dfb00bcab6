"""The command about what operators did: actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, root, with_store
from perdure.cli.parameters import limit_option
from perdure.cli.text import local, to_json

if TYPE_CHECKING:
    from perdure import Store


@command(root, "Stores", "perdure actions\nperdure actions --subject 'run trip-42'\nperdure actions --json | jq .who")
@click.option("--subject", metavar="TEXT", help="Only what was done to this: 'run trip-42', 'thread alice'.")
@limit_option
@with_store
def actions(cli: Invocation, store: Store, subject: str | None, limit: int) -> None:
    """List what operators did to runs, threads, schedules, deployments and snapshots, the newest first.

    These are the commands that changed something, and calls with who= in Python. --json prints a line per action.
    """
    listed = store.ops.actions(limit=limit or None, subject=subject)
    cli.listing(
        listed,
        ("time", "who", "action", "subject", "details"),
        lambda one: [local(one.at), one.who, one.action, one.subject, to_json(one.details) if one.details else ""],
        empty="operators did nothing yet",
    )
    if limit and len(listed) == limit and not cli.json:
        cli.message(f"the newest {limit}; there may be more: --limit 0 lists all")
