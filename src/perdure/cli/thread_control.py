"""The commands that change one thread: fork, rollback, edit, pin, unpin, pins, prune, delete, erase."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from perdure.cli.base import REF_HELP, Invocation, command, thread_group, with_store
from perdure.cli.parameters import POSITIVE, full_option, parse_value, who_option, yes_option
from perdure.cli.refs import existing, resolve
from perdure.cli.retention import print_erased
from perdure.cli.text import local, plural, readable
from perdure.cli.threads import checkpoint_json

if TYPE_CHECKING:
    from perdure import Store


@command(
    thread_group,
    "History",
    "perdure thread fork alice-001 --name alice-try\nperdure thread fork alice-001 head~3 --name alice-retry",
)
@click.argument("thread")
@click.argument("ref", required=False)
@click.option("--name", metavar="NEW", required=True, help="The name of the new thread.")
@who_option
@with_store
def fork(cli: Invocation, store: Store, thread: str, ref: str | None, name: str, who: str) -> None:
    """Continue from a checkpoint in a new thread.

    Copies nothing and leaves the old thread as it is.
    """
    handle = existing(store, thread)
    at = resolve(handle, ref)
    copy = handle.fork(at, name=name, who=who)
    text = f"forked {thread} at {at.id} (step {at.step}) as {copy.name}"
    cli.result(text, {"from": thread}, thread=copy.name, at=at.id, step=at.step)


@command(thread_group, "History", "perdure thread show alice-001\nperdure thread show alice-001 --json")
@click.argument("thread")
@with_store
def show(cli: Invocation, store: Store, thread: str) -> None:
    """Show a thread: its head, metadata, retention, pins and what adaptive autosave has measured.

    `perdure show` shows a state, and `perdure log` the checkpoints.
    """
    from perdure.log.retention import OF_A_THREAD
    from perdure.values.durations import show_duration

    handle = existing(store, thread)
    head, rules, autosave = handle.get_head(), handle.retention(), handle.get_autosave()
    spans = {name: getattr(rules, name) for name in OF_A_THREAD}
    kept = {name: show_duration(span) if isinstance(span, timedelta) else span for name, span in spans.items()}
    pins = [pin.name for pin in handle.pins()]
    if cli.json:
        fields = {"retention": kept, "own": list(rules.own), "pins": pins, "autosave": autosave}
        return cli.document({"thread": thread, "head": head and checkpoint_json(head), **fields})
    if head is not None:
        cli.line("head", f"{head.id} (step {head.step})", local(head.at))
    for name, value in kept.items():
        cli.line(f"retention {name}", "forever" if value is None else str(value), "its own" * (name in rules.own))
    if pins:
        cli.line("pins", ", ".join(pins))
    if autosave is not None:
        measured = (
            f"{plural(autosave.failures, 'failure')} in {autosave.uptime_s:,.0f} s, one in {autosave.mtbf_s:,.0f} s"
        )
        interval = f"every {autosave.interval_s:.1f} s: a save costs {autosave.cost_s * 1000:.1f} ms, {measured}"
        cli.line("autosave", interval)
    return None


@command(
    thread_group,
    "History",
    "perdure thread rollback alice-001 head~1\n"
    'perdure thread rollback alice-001 @12 --note "the tool returned stale prices"',
)
@click.argument("thread")
@click.argument("ref")
@click.option("--note", metavar="TEXT", help="Why you roll back; `perdure log` shows the note.")
@who_option
@with_store
def rollback(cli: Invocation, store: Store, thread: str, ref: str, note: str | None, who: str) -> None:
    """Make an old checkpoint the newest.

    Adds a checkpoint with the state of the old one. The checkpoints in between stay in the log.
    """
    handle = existing(store, thread)
    to = resolve(handle, ref)
    head = handle.rollback(to, note=note, who=who)
    text = f"{thread} is back at {to.id} (step {to.step}); the new head is {head.id}"
    cli.result(text, checkpoint_json(head), rolled_back_to=to.id)


@command(
    thread_group,
    "History",
    "perdure thread edit alice-001 budget 5000\n"
    'perdure thread edit alice-001 \'["tasks", 2, "owner"]\' ann --note "chen is away"',
)
@click.argument("thread")
@click.argument("path")
@click.argument("value")
@click.option("--note", metavar="TEXT", help="Why you change it; `perdure log` shows the note.")
@click.option("--expect", metavar="REF", help=f"Only if this checkpoint is the newest: {REF_HELP}.")
@who_option
@with_store
def edit(
    cli: Invocation, store: Store, thread: str, path: str, value: str, note: str | None, expect: str | None, who: str
) -> None:
    """Replace one value of the newest state.

    PATH is a key, or a JSON list of keys and positions. VALUE is JSON, or else text. Adds a checkpoint; the old one
    stays in the log. Needs none of your classes.
    """
    handle, parsed = existing(store, thread), parse_value(path)
    place, base = parsed if isinstance(parsed, list) else path, resolve(handle, expect) if expect else None
    head = handle.edit(place, parse_value(value), note=note, expect=base, who=who)
    cli.result(f"{thread}: the new head is {head.id}", checkpoint_json(head))


@command(
    thread_group,
    "Retention",
    "perdure thread pin alice-001 --name before-the-move\nperdure thread pin alice-001 @12 --name good",
)
@click.argument("thread")
@click.argument("ref", required=False)
@click.option("--name", metavar="NAME", required=True, help="The name of the pin.")
@who_option
@with_store
def pin(cli: Invocation, store: Store, thread: str, ref: str | None, name: str, who: str) -> None:
    """Pin a checkpoint: no retention rule removes it.

    A thread with a pin does not expire.
    """
    handle = existing(store, thread)
    pinned = handle.pin(resolve(handle, ref), name=name, who=who)
    cli.result(f"pinned {pinned.checkpoint} of {thread} as {pinned.name}", pinned, thread=thread)


@command(thread_group, "Retention", "perdure thread unpin alice-001 --name good")
@click.argument("thread")
@click.option("--name", metavar="NAME", required=True, help="The name of the pin.")
@who_option
@with_store
def unpin(cli: Invocation, store: Store, thread: str, name: str, who: str) -> None:
    """Remove a pin."""
    existing(store, thread).unpin(name, who=who)
    cli.result(f"unpinned {name} of {thread}", thread=thread, name=name)


@command(thread_group, "Retention", "perdure thread pins alice-001")
@click.argument("thread")
@with_store
def pins(cli: Invocation, store: Store, thread: str) -> None:
    """List the pins of a thread.

    --json prints a line per pin.
    """
    cli.listing(
        existing(store, thread).pins(),
        ("name", "checkpoint", "pinned"),
        lambda pin: [pin.name, pin.checkpoint, local(pin.at)],
        empty=f"{thread} has no pins",
        document=lambda pin: {"thread": thread, **readable(pin)},
    )


@command(thread_group, "Retention", "perdure thread prune alice-001 --keep 100 --yes")
@click.argument("thread")
@click.option("--keep", metavar="N", type=POSITIVE, required=True, help="How many of the newest to keep.")
@yes_option
@with_store
def prune(cli: Invocation, store: Store, thread: str, keep: int, yes: bool) -> None:
    """Remove all but the newest checkpoints of a thread.

    Keeps what a pin, a fork or a graph needs.
    """
    handle = existing(store, thread)
    cli.confirm(f"Remove all but the newest {plural(keep, 'checkpoint')} of {thread!r}?", yes=yes)
    pruned = handle.prune(keep=keep)
    cli.result(f"{plural(pruned.removed, 'checkpoint')} of {thread} removed", pruned, thread=thread)
    if pruned.kept:
        cli.message(f"{plural(pruned.kept, 'older checkpoint')} kept: pins, forks or later checkpoints need them")


@command(thread_group, "Remove and move", "perdure thread delete alice-001 --yes")
@click.argument("thread")
@click.option("--force", is_flag=True, help="Delete it even if it has pinned checkpoints.")
@yes_option
@with_store
def delete(cli: Invocation, store: Store, thread: str, force: bool, yes: bool) -> None:
    """Delete a thread and its history.

    Keeps what its forks need.
    """
    handle = existing(store, thread)
    cli.confirm(f"Delete thread {thread!r} and all its history?", yes=yes)
    pruned = store.delete_thread(handle, force=force)
    text = f"deleted {thread}: {plural(pruned.removed, 'record')} removed"
    cli.result(text, thread=thread, removed=pruned.removed)


@command(
    thread_group,
    "Remove and move",
    "perdure thread erase alice-001 --yes\nperdure thread erase alice-001 --checkpoint @12 --yes --json",
)
@click.argument("thread")
@click.option("--checkpoint", metavar="REF", help=f"Only this checkpoint: {REF_HELP}.")
@click.option("--forks", is_flag=True, help="Also erase the thread's forks, which share its history.")
@full_option
@yes_option
@with_store
def erase(
    cli: Invocation, store: Store, thread: str, checkpoint: str | None, forks: bool, full: bool, yes: bool
) -> None:
    """Erase every byte of a thread or a checkpoint, also if it is pinned.

    Removes the bytes from the store's files too; SQLite rewrites its file for that. Prints which copies may still hold
    them, such as backups.
    """
    handle = existing(store, thread)
    if checkpoint is None:
        cli.confirm(f"Erase thread {thread!r} and all its history, and every byte of it?", yes=yes)
        erased = store.ops.erase(handle, forks=forks, full=full)
    else:
        one = resolve(handle, checkpoint)
        cli.confirm(f"Erase checkpoint {one.id} (step {one.step}) of {thread!r}, and every byte of it?", yes=yes)
        erased = handle.erase(one, full=full)
    print_erased(erased, cli)
