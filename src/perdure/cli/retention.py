"""The commands about retention: thread retention, store retention, store compact."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, store_group, thread_group, with_store
from perdure.cli.health import print_fields
from perdure.cli.parameters import POSITIVE, duration
from perdure.cli.refs import existing
from perdure.cli.text import plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Erased, Retention

ttl_option = click.option(
    "--ttl", metavar="TIME", type=duration, help="Delete a thread that was not written to for so long."
)
keep_last_option = click.option(
    "--keep-last", metavar="N", type=POSITIVE, help="How many of the newest checkpoints of a thread stay."
)
never_option = click.option("--never", is_flag=True, help="Keep everything for good.")


@command(
    store_group,
    "Retention",
    "perdure store retention\nperdure store retention --ttl 30d --keep-last 100",
    name="retention",
)
@ttl_option
@keep_last_option
@never_option
@with_store
def store_retention(cli: Invocation, store: Store, ttl: timedelta | None, keep_last: int | None, never: bool) -> None:
    """Show or configure how long the threads of a tenant stay.

    `perdure store compact` applies it, and workers daily. A thread may have a retention of its own.
    """
    given = _given(ttl, keep_last, never)
    found = store.ops.retention()
    if given:
        found = store.ops.set_retention(**{"ttl": found.ttl, "keep_last": found.keep_last, **given})
    _print(found, None, cli)


@command(
    thread_group,
    "Retention",
    "perdure thread retention alice-001\nperdure thread retention alice-001 --never",
    name="retention",
)
@click.argument("thread")
@ttl_option
@keep_last_option
@never_option
@click.option("--inherit", is_flag=True, help="As the store is configured.")
@with_store
def thread_retention(
    cli: Invocation,
    store: Store,
    thread: str,
    ttl: timedelta | None,
    keep_last: int | None,
    never: bool,
    inherit: bool,
) -> None:
    """Show or configure how long a thread stays.

    Its own retention overrides the store's.
    """
    handle = existing(store, thread)
    given = _given(ttl, keep_last, never)
    if inherit and given:
        raise UsageError("--inherit stands alone")
    found = handle.retention()
    if inherit:
        found = handle.set_retention()
    elif given:
        found = handle.set_retention(**{**{name: getattr(found, name) for name in found.own}, **given})
    _print(found, thread, cli)


def _given(ttl: timedelta | None, keep_last: int | None, never: bool) -> dict[str, Any]:
    given = {name: value for name, value in (("ttl", ttl), ("keep_last", keep_last)) if value is not None}
    if never and given:
        raise UsageError("--never stands alone: it means both")
    return {"ttl": None, "keep_last": None} if never else given


def _print(found: Retention, thread: str | None, cli: Invocation) -> None:
    who = "every thread" if thread is None else thread
    inherited = "" if thread is None else " (the store's)"
    span = str(found.ttl).removesuffix(", 0:00:00")
    ttl = "stays for good" if found.ttl is None else f"is deleted when it was not written to for {span}"
    last = "all checkpoints" if found.keep_last is None else f"its newest {plural(found.keep_last, 'checkpoint')}"
    if cli.json:
        seconds = found.ttl and found.ttl.total_seconds()
        return cli.document(thread=thread, ttl_s=seconds, keep_last=found.keep_last, own=found.own)
    cli.line(f"{who}: {ttl}{'' if 'ttl' in found.own else inherited}")
    cli.line(f"{who}: keeps {last}{'' if 'keep_last' in found.own else inherited}")
    return None


@command(
    store_group, "Retention", "perdure store compact --dry-run\nperdure store compact\nperdure store compact --vacuum"
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option("--vacuum", is_flag=True, help="Return free space to the system: SQLite rewrites the file.")
@with_store
def compact(cli: Invocation, store: Store, dry_run: bool, vacuum: bool) -> None:
    """Apply retention, and compress what stays.

    Deletes expired threads, checkpoints beyond --keep-last and the journals of old finished runs, and packs the rest.
    What a pin, a fork, a graph or an unfinished run needs stays. Workers do it daily.
    """
    with cli.progress("compacting") as progress:
        done = store.ops.compact(dry_run=dry_run, vacuum=vacuum, progress=progress)
    if cli.json:
        return cli.document(done)
    if dry_run:
        cli.message("nothing was changed; this would be removed")
    return print_fields(cli, done, {})


def print_erased(erased: Erased, cli: Invocation) -> None:
    """What was erased, and which copies may remain."""
    if cli.json:
        return cli.document(erased)
    names = ", ".join((*erased.threads, *erased.runs))
    what = f"{names}: {plural(erased.checkpoints, 'checkpoint')}" if not erased.runs else f"run {names}"
    cli.line(f"erased {what}" if names else f"erased {plural(erased.checkpoints, 'checkpoint')}")
    cli.line("copies that may remain:")
    for copy in erased.may_remain:
        cli.line(f"  - {copy}")
    return None
