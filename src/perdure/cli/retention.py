"""The commands about retention: thread retention, store retention, store compact."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, with_store
from perdure.cli.parameters import POSITIVE, Duration, thread_argument
from perdure.cli.refs import existing
from perdure.cli.text import fields, plural, size
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.cli.output import Output
    from perdure.ops import Erased, Retention

ttl_option = click.option(
    "--ttl", metavar="TIME", type=Duration(), help="Delete a thread that was not written to for so long."
)
keep_last_option = click.option(
    "--keep-last", metavar="N", type=POSITIVE, help="How many of the newest checkpoints of a thread stay."
)
never_option = click.option("--never", is_flag=True, help="Keep everything for good.")


@command("perdure store retention\nperdure store retention --ttl 30d --keep-last 100", name="retention")
@ttl_option
@keep_last_option
@never_option
@with_store
def store_retention(cli: Invocation, store: Store, ttl: timedelta | None, keep_last: int | None, never: bool) -> None:
    """Show or configure how long the threads of a tenant stay.

    `perdure store compact` applies it, and workers daily. A thread may have a retention of its own.
    """
    given = _given(ttl, keep_last, never)
    before = store.ops.retention()
    if given:
        before = store.ops.set_retention(**{"ttl": before.ttl, "keep_last": before.keep_last, **given})
    _print(before, None, cli.out)


@command("perdure thread retention alice-001\nperdure thread retention alice-001 --never", name="retention")
@thread_argument
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

    Its own retention goes before the store's.
    """
    handle = existing(store, thread)
    given = _given(ttl, keep_last, never)
    if inherit and given:
        raise UsageError("--inherit stands alone")
    before = handle.retention()
    if inherit:
        before = handle.set_retention()
    elif given:
        before = handle.set_retention(**{**{name: getattr(before, name) for name in before.own}, **given})
    _print(before, thread, cli.out)


def _given(ttl: timedelta | None, keep_last: int | None, never: bool) -> dict[str, Any]:
    given = {name: value for name, value in (("ttl", ttl), ("keep_last", keep_last)) if value is not None}
    if never and given:
        raise UsageError("--never stands alone: it means both")
    return {"ttl": None, "keep_last": None} if never else given


def _print(found: Retention, thread: str | None, out: Output) -> None:
    if out.json:
        out.document({"thread": thread, **fields(found, "ttl"), "ttl_s": found.ttl and found.ttl.total_seconds()})
        return
    who = "every thread" if thread is None else thread
    inherited = "" if thread is None else " (the store's)"
    span = str(found.ttl).removesuffix(", 0:00:00")
    ttl = "stays for good" if found.ttl is None else f"is deleted when it was not written to for {span}"
    last = "all checkpoints" if found.keep_last is None else f"its newest {plural(found.keep_last, 'checkpoint')}"
    out.line((f"{who}: {ttl}{'' if 'ttl' in found.own else inherited}", ""))
    out.line((f"{who}: keeps {last}{'' if 'keep_last' in found.own else inherited}", ""))


@command("perdure store compact --dry-run\nperdure store compact\nperdure store compact --vacuum --json")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option("--vacuum", is_flag=True, help="Return free space to the system: SQLite rewrites the file.")
@with_store
def compact(cli: Invocation, store: Store, dry_run: bool, vacuum: bool) -> None:
    """Apply retention, and compress what stays.

    Deletes expired threads, checkpoints beyond --keep-last and the journals of old finished runs, and packs the rest.
    What a pin, a fork, a graph or an unfinished run needs stays. Workers do it daily.
    """
    out = cli.out
    with out.progress("compacting") as progress:
        done = store.ops.compact(dry_run=dry_run, vacuum=vacuum, progress=progress)
    if out.json:
        out.document(fields(done))
        return
    would = "that would be " if dry_run else ""
    rows = [
        (f"threads {would}deleted", f"{done.threads:,}"),
        (f"checkpoints {would}removed", f"{done.checkpoints:,}"),
        (f"journals of finished runs {would}removed", f"{done.runs:,}"),
        ("expired threads that are still needed", f"{done.held:,}"),
        *([("damaged threads: see `perdure store verify`", f"{done.damaged:,}")] if done.damaged else []),
    ]
    if not dry_run:
        rows += [("checkpoints packed", f"{done.packed:,}"), ("saved by compressing", size(done.saved_bytes))]
    rows += [("in use before", size(done.bytes_before)), ("in use after", size(done.bytes_after))]
    out.table(("what", "how much"), [[(what, ""), (value, "bold")] for what, value in rows])
    for name in done.expired:
        out.line((f"  {name}", "dim"))


def print_erased(erased: Erased, out: Output) -> None:
    """What was erased, and which copies may remain."""
    if out.json:
        out.document(fields(erased))
        return
    names = ", ".join((*erased.threads, *erased.runs))
    what = f"{names}: {plural(erased.checkpoints, 'checkpoint')}" if not erased.runs else f"run {names}"
    out.line((f"erased {what}" if names else f"erased {plural(erased.checkpoints, 'checkpoint')}", "green"))
    out.line(("copies that may remain:", ""))
    for copy in erased.may_remain:
        out.line((f"  - {copy}", "dim"))
