"""The commands about retention: retention, store compact."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, root, store_group, with_store
from perdure.cli.health import print_fields
from perdure.cli.text import plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Erased


@command(
    root,
    "Stores",
    "perdure retention\nperdure retention threads=90d checkpoint_age=30d runs=90d\nperdure retention threads=forever",
)
@click.argument("rules", metavar="[RULE=TIME]...", nargs=-1)
@with_store
def retention(cli: Invocation, store: Store, rules: tuple[str, ...]) -> None:
    """Show how long a tenant's data is kept, or change the rules that you name.

    Prints each rule, its value and what it does. TIME is 45s, 30m, 12h, 30d, 8w or forever; the rule `checkpoints`
    takes a number.

    The rules are stored. Workers apply them daily, `perdure store compact` at once. A thread (`thread.retention()`) and
    a namespace of memory (`policy()`) may have rules of their own.
    """
    from perdure.log.retention import RULES
    from perdure.values.durations import show_duration

    changes: dict[str, Any] = {}
    for text in rules:
        name, _, value = text.partition("=")
        if name not in RULES or not value:
            raise UsageError(f"{text!r} is not a rule: write threads=30d or threads=forever; rules: {', '.join(RULES)}")
        changes[name] = None if value == "forever" else int(value) if value.isdecimal() else value
    policy = store.ops.retention(**changes)
    spans = {name: getattr(policy, name) for name in RULES}
    shown = {name: show_duration(span) if isinstance(span, timedelta) else span for name, span in spans.items()}
    if cli.json:
        return cli.document(shown)
    for name, value in shown.items():
        cli.line(f"{name:<14}", f"{'forever' if value is None else value:<7}", RULES[name])
    return None


@command(
    store_group, "Retention", "perdure store compact --dry-run\nperdure store compact\nperdure store compact --vacuum"
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option("--vacuum", is_flag=True, help="Return free space to the system: SQLite rewrites the file.")
@with_store
def compact(cli: Invocation, store: Store, dry_run: bool, vacuum: bool) -> None:
    """Apply the rules of `perdure retention` now. Workers do it daily.

    Deletes old threads, checkpoints, journals of finished runs, items of memory and snapshots. Keeps what a pin, a
    fork, a graph or an unfinished run needs.
    """
    with cli.progress("compacting") as progress:
        done = store.ops.compact(dry_run=dry_run, vacuum=vacuum, progress=progress)
    if cli.json:
        return cli.document(done)
    if dry_run:
        cli.message("nothing was changed; a compaction would remove this")
    return print_fields(cli, done, {})


def print_erased(erased: Erased, cli: Invocation, subject: str = "") -> None:
    """Print what was erased and which copies may remain. `subject` names it: by default the threads or the run."""
    if cli.json:
        return cli.document(erased)
    names = ", ".join((*erased.threads, *erased.runs))
    count = plural(erased.checkpoints, "checkpoint")
    cli.line(f"erased {subject or (f'run {names}' if erased.runs else f'{names}: {count}' if names else count)}")
    cli.line("copies that may remain:")
    for copy in erased.may_remain:
        cli.line(f"  - {copy}")
    return None
