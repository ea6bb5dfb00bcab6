"""The commands that move threads into archives and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, store_group, thread_group, with_store
from perdure.cli.text import local

if TYPE_CHECKING:
    from perdure import Store


@command(
    thread_group,
    "Remove and move",
    "perdure thread archive alice-001 archive.db\nperdure thread archive alice-001 s3://bucket/alice-001.db",
)
@click.argument("name", metavar="THREAD")
@click.argument("place")
@with_store
def archive(cli: Invocation, store: Store, name: str, place: str) -> None:
    """Move a thread into an archive: a file, or an object (s3://bucket/NAME).

    Copies it into a store file, verifies that, and removes it here. The store remembers where it is.
    """
    done = store.ops.archive(name, place)
    cli.result(f"archived thread {done.name}: {done.place}", done)


@command(thread_group, "Remove and move", "perdure thread unarchive alice-001")
@click.argument("name", metavar="THREAD")
@click.option("--place", metavar="PLACE", help="Where the archive is now, if it was moved.")
@with_store
def unarchive(cli: Invocation, store: Store, name: str, place: str | None) -> None:
    """Bring an archived thread back. The archive stays."""
    done = store.ops.unarchive(name, place)
    cli.result(f"unarchived thread {done.name}: {done.place}", done)


@command(store_group, "State of the store", "perdure store archives")
@with_store
def archives(cli: Invocation, store: Store) -> None:
    """List the threads that are archived.

    --json prints a line for each.
    """
    cli.listing(
        store.ops.archives(),
        ("name", "archived", "place"),
        lambda one: [one.name, local(one.at), one.place],
        empty="nothing is archived",
    )
