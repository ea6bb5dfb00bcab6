"""The commands about retention: store retention, store compact."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, store_group, with_store
from perdure.cli.health import print_fields
from perdure.cli.parameters import POSITIVE, duration
from perdure.cli.text import plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Erased


@command(store_group, "Retention", "perdure store retention\nperdure store retention --ttl 30d --keep-last 100")
@click.option("--ttl", metavar="TIME", type=duration, help="Delete a thread that was not written to for so long.")
@click.option("--keep-last", metavar="N", type=POSITIVE, help="How many of the newest checkpoints of a thread stay.")
@click.option("--never", is_flag=True, help="Keep everything for good.")
@with_store
def retention(cli: Invocation, store: Store, ttl: timedelta | None, keep_last: int | None, never: bool) -> None:
    """Show or configure how long the threads of a tenant stay.

    `perdure store compact` applies it, and workers daily. A thread may have a retention of its own
    (`thread.set_retention()`).
    """
    if never and (ttl or keep_last):
        raise UsageError("--never excludes --ttl and --keep-last: it removes both")
    if never:
        found = store.ops.set_retention(ttl=None, keep_last=None)
    elif ttl or keep_last:
        found = store.ops.set_retention(ttl=ttl or "unchanged", keep_last=keep_last or "unchanged")
    else:
        found = store.ops.retention()
    if cli.json:
        return cli.document(ttl_s=found.ttl and found.ttl.total_seconds(), keep_last=found.keep_last)
    span = str(found.ttl).removesuffix(", 0:00:00")
    kept = "all checkpoints" if found.keep_last is None else f"its newest {plural(found.keep_last, 'checkpoint')}"
    cli.line("every thread", "stays for good" if found.ttl is None else f"is deleted if not written to for {span}")
    cli.line("every thread", f"keeps {kept}")
    return None


@command(
    store_group, "Retention", "perdure store compact --dry-run\nperdure store compact\nperdure store compact --vacuum"
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option("--vacuum", is_flag=True, help="Return free space to the system: SQLite rewrites the file.")
@with_store
def compact(cli: Invocation, store: Store, dry_run: bool, vacuum: bool) -> None:
    """Apply retention.

    Deletes expired threads, checkpoints beyond --keep-last and the journals of old finished runs. What a pin, a fork, a
    graph or an unfinished run needs stays. Workers do it daily.
    """
    with cli.progress("compacting") as progress:
        done = store.ops.compact(dry_run=dry_run, vacuum=vacuum, progress=progress)
    if cli.json:
        return cli.document(done)
    if dry_run:
        cli.message("nothing was changed; this would be removed")
    return print_fields(cli, done, {})


def print_erased(erased: Erased, cli: Invocation, what: str = "") -> None:
    """Print what was erased, by default threads or a run, and which copies may remain."""
    if cli.json:
        return cli.document(erased)
    names = ", ".join((*erased.threads, *erased.runs))
    count = plural(erased.checkpoints, "checkpoint")
    cli.line(f"erased {what or (f'run {names}' if erased.runs else f'{names}: {count}' if names else count)}")
    cli.line("copies that may remain:")
    for copy in erased.may_remain:
        cli.line(f"  - {copy}")
    return None
