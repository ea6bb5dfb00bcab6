"""The commands that change or check one thread: fork, rollback, verify, pin, unpin, pins, prune, delete, erase.

A command that removes something asks first on a terminal and wants `--yes` anywhere else. Nothing is removed before
the answer.
"""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, argument, command, with_store
from perdure.cli.health import print_report
from perdure.cli.parameters import POSITIVE, REF_HELP, ref_argument, thread_argument, yes_option
from perdure.cli.refs import existing, resolve
from perdure.cli.retention import print_erased
from perdure.cli.text import fields, local, plural
from perdure.cli.threads import checkpoint_json
from perdure.errors import NotFound

if TYPE_CHECKING:
    from perdure import Store


@command("perdure thread fork alice-001 --name alice-try\nperdure thread fork alice-001 head~3 --name alice-retry")
@thread_argument
@ref_argument
@click.option("--name", metavar="NEW", required=True, help="The name of the new thread.")
@with_store
def fork(cli: Invocation, store: Store, thread: str, ref: str | None, name: str) -> None:
    """Continue from a checkpoint in a new thread.

    Copies nothing, and leaves the old thread as it is.
    """
    handle = existing(store, thread)
    at = resolve(handle, ref)
    made = handle.fork(at, name=name)
    cli.out.result(
        {"thread": made.name, "from": thread, "at": at.id, "step": at.step},
        f"forked {thread} at {at.id} (step {at.step}) as {made.name}",
    )


@command(
    "perdure thread rollback alice-001 head~1\n"
    'perdure thread rollback alice-001 @12 --note "the tool returned stale prices"'
)
@thread_argument
@argument("ref", "REF", f"Back to: {REF_HELP}.")
@click.option("--note", metavar="TEXT", help="Why; shown in the log.")
@with_store
def rollback(cli: Invocation, store: Store, thread: str, ref: str, note: str | None) -> None:
    """Make an old checkpoint the newest.

    Adds a checkpoint that equals the old one; what came in between stays in the log.
    """
    handle = existing(store, thread)
    to = resolve(handle, ref)
    head = handle.rollback(to, note=note)
    cli.out.result(
        checkpoint_json(head) | {"rolled_back_to": to.id},
        f"{thread} is back at {to.id} (step {to.step}); the new head is {head.id}",
    )


@command("perdure thread verify alice-001\nperdure thread verify alice-001 --json | jq .problems")
@thread_argument
@with_store
def verify(cli: Invocation, store: Store, thread: str) -> int:
    """Check every hash and every record of a thread.

    Exits with 1 if there is a problem.
    """
    with cli.out.progress("verifying") as progress:
        report = existing(store, thread).verify(progress=progress)
    return print_report(report, cli.out)


@command("perdure thread pin alice-001 --name before-the-move\nperdure thread pin alice-001 @12 --name good")
@thread_argument
@ref_argument
@click.option("--name", metavar="NAME", required=True, help="What the pin is called.")
@with_store
def pin(cli: Invocation, store: Store, thread: str, ref: str | None, name: str) -> None:
    """Keep a checkpoint, whatever retention is set.

    A thread with a pin does not expire.
    """
    handle = existing(store, thread)
    made = handle.pin(resolve(handle, ref), name=name)
    cli.out.result({"thread": thread, **fields(made)}, f"pinned {made.checkpoint} of {thread} as {made.name}")


@command("perdure thread unpin alice-001 --name good\nperdure thread unpin alice-001 --name good --json")
@thread_argument
@click.option("--name", metavar="NAME", required=True, help="Which pin.")
@with_store
def unpin(cli: Invocation, store: Store, thread: str, name: str) -> None:
    """Remove a pin.

    Retention applies again to what it held.
    """
    handle = existing(store, thread)
    try:
        handle.unpin(name)
    except NotFound:
        raise NotFound(
            f"thread {thread!r} has no pin {name!r}: `perdure thread pins {quote(thread)}` lists them"
        ) from None
    cli.out.result({"thread": thread, "name": name}, f"unpinned {name} of {thread}")


@command("perdure thread pins alice-001\nperdure thread pins alice-001 --json")
@thread_argument
@with_store
def pins(cli: Invocation, store: Store, thread: str) -> None:
    """List the pins of a thread.

    --json prints a line per pin.
    """
    found = existing(store, thread).pins()
    if cli.out.json:
        for one in found:
            cli.out.json_line({"thread": thread, **fields(one)})
    elif found:
        rows = [[(one.name, "bold"), (one.checkpoint, ""), (local(one.at), "dim")] for one in found]
        cli.out.table(("name", "checkpoint", "pinned"), rows)
    else:
        cli.out.message(f"{thread} has no pins")


@command("perdure thread prune alice-001 --keep 100\nperdure thread prune alice-001 --keep 100 --yes --json")
@thread_argument
@click.option("--keep", metavar="N", type=POSITIVE, required=True, help="How many of the newest to keep.")
@yes_option
@with_store
def prune(cli: Invocation, store: Store, thread: str, keep: int, yes: bool) -> int:
    """Remove all but the newest checkpoints of a thread.

    What a pin, a fork or a graph needs stays.
    """
    out, handle = cli.out, existing(store, thread)
    if not cli.confirmed(f"Remove all but the newest {plural(keep, 'checkpoint')} of {thread!r}?", yes=yes):
        return NO
    with out.progress("pruning") as progress:
        pruned = handle.prune(keep=keep, progress=progress)
    out.result({"thread": thread, **fields(pruned)}, f"{plural(pruned.removed, 'checkpoint')} of {thread} removed")
    return OK


@command("perdure thread delete alice-001\nperdure thread delete alice-001 --yes --json")
@thread_argument
@click.option("--force", is_flag=True, help="Also if it has pinned checkpoints.")
@yes_option
@with_store
def delete(cli: Invocation, store: Store, thread: str, force: bool, yes: bool) -> int:
    """Delete a thread and its history.

    What a fork of it needs stays.
    """
    handle = existing(store, thread)
    if not cli.confirmed(f"Delete thread {thread!r} and all its history?", yes=yes):
        return NO
    with cli.out.progress("deleting") as progress:
        pruned = store.delete_thread(handle, force=force, progress=progress)
    cli.out.result(
        {"thread": thread, "removed": pruned.removed}, f"deleted {thread}: {plural(pruned.removed, 'record')} removed"
    )
    return OK


@command("perdure thread erase alice-001\nperdure thread erase alice-001 --checkpoint @12 --yes --json")
@thread_argument
@click.option("--checkpoint", metavar="REF", help=f"Only this checkpoint: {REF_HELP}.")
@click.option("--forks", is_flag=True, help="The thread's forks too, which hold its history.")
@click.option("--full", is_flag=True, help="PostgreSQL: rewrite the tables, which locks them meanwhile.")
@yes_option
@with_store
def erase(
    cli: Invocation, store: Store, thread: str, checkpoint: str | None, forks: bool, full: bool, yes: bool
) -> int:
    """Erase every byte of a thread or a checkpoint.

    Removes it from the store's files too, which SQLite rewrites for it; pins do not hold it. Prints which copies may
    still hold it, such as backups.
    """
    handle = existing(store, thread)
    if checkpoint is not None:
        one = resolve(handle, checkpoint)
        question = f"Erase checkpoint {one.id} (step {one.step}) of {thread!r}, and every byte of it?"
        if not cli.confirmed(question, yes=yes):
            return NO
        erased = handle.erase(one, full=full)
    elif cli.confirmed(f"Erase thread {thread!r} and all its history, and every byte of it?", yes=yes):
        erased = store.ops.erase(handle, forks=forks, full=full)
    else:
        return NO
    print_erased(erased, cli.out)
    return OK
