"""The commands that move threads and finished runs into archives and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import CommandGroup, Invocation, command, run_group, store_group, thread_group, with_store
from perdure.cli.text import local

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Archive


def _add_archive(group: CommandGroup, kind: str, example: str, subject: str) -> None:
    """Add `archive` and `unarchive` to a group."""

    def archive(cli: Invocation, store: Store, name: str, place: str) -> None:
        archive_it = store.ops.archive if kind == "thread" else store.ops.archive_run
        _print(archive_it(name, place), "archived", cli)

    archive.__doc__ = f"""Move a {subject} into an archive: a file, or an object (s3://bucket/NAME).

    Copies it into a store file, verifies the copy, then removes it here. The store remembers where the archive is.
    """

    def unarchive(cli: Invocation, store: Store, name: str, place: str | None) -> None:
        unarchive_it = store.ops.unarchive if kind == "thread" else store.ops.unarchive_run
        _print(unarchive_it(name, place), "unarchived", cli)

    unarchive.__doc__ = f"Bring an archived {kind} back. The archive stays."
    named = click.argument("name", metavar=kind.upper())
    there = click.argument("place")
    moved = click.option("--place", metavar="PLACE", help="Where the archive is now, if it was moved.")
    examples = f"perdure {kind} archive {example} archive.db\nperdure {kind} archive {example} s3://bucket/{example}.db"
    command(group, "Remove and move", examples)(named(there(with_store(archive))))
    command(group, "Remove and move", f"perdure {kind} unarchive {example}")(named(moved(with_store(unarchive))))


_add_archive(thread_group, "thread", "alice-001", "thread")
_add_archive(run_group, "run", "trip-42", "finished run with its children")


@command(store_group, "State of the store", "perdure store archives")
@with_store
def archives(cli: Invocation, store: Store) -> None:
    """List the archived threads and runs.

    --json prints a line per archive.
    """
    cli.listing(
        store.ops.archives(),
        ("kind", "name", "archived", "place"),
        lambda one: [one.kind, one.name, local(one.at), one.place],
        empty="nothing is archived",
    )


def _print(done: Archive, verb: str, cli: Invocation) -> None:
    cli.result(f"{verb} {done.kind} {done.name}: {done.place}", done)
