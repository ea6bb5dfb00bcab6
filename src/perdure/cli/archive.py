"""The commands that move threads and finished runs into archives and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, run_group, store_group, thread_group, with_store
from perdure.cli.text import local

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Archive

place_option = click.option("--place", metavar="PLACE", help="Where the archive is now, if it was moved.")


@command(
    thread_group,
    "Remove and move",
    "perdure thread archive alice-001 archive.db\nperdure thread archive alice-001 s3://bucket/alice-001.db",
    name="archive",
)
@click.argument("thread")
@click.argument("place")
@with_store
def archive_thread(cli: Invocation, store: Store, thread: str, place: str) -> None:
    """Move a thread into an archive: a file, or an object such as s3://bucket/alice.db.

    Copies it into a store file, verifies that, and removes it here. The store remembers where it is.
    """
    _print(store.ops.archive(thread, place), "archived", cli)


@command(thread_group, "Remove and move", "perdure thread unarchive alice-001", name="unarchive")
@click.argument("thread")
@place_option
@with_store
def unarchive_thread(cli: Invocation, store: Store, thread: str, place: str | None) -> None:
    """Bring an archived thread back. The archive stays."""
    _print(store.ops.unarchive(thread, place), "unarchived", cli)


@command(
    run_group,
    "Remove and move",
    "perdure run archive trip-42 archive.db\nperdure run archive trip-42 s3://bucket/trip-42.db",
    name="archive",
)
@click.argument("run")
@click.argument("place")
@with_store
def archive_run(cli: Invocation, store: Store, run: str, place: str) -> None:
    """Move a finished run into an archive: a file, or an object such as s3://bucket/trip.db.

    With the runs that it started and their states. Copies them into a store file, verifies that, and removes them here.
    """
    _print(store.ops.archive_run(run, place), "archived", cli)


@command(run_group, "Remove and move", "perdure run unarchive trip-42", name="unarchive")
@click.argument("run")
@place_option
@with_store
def unarchive_run(cli: Invocation, store: Store, run: str, place: str | None) -> None:
    """Bring an archived run back. The archive stays."""
    _print(store.ops.unarchive_run(run, place), "unarchived", cli)


@command(store_group, "State of the store", "perdure store archives")
@with_store
def archives(cli: Invocation, store: Store) -> None:
    """List the threads and runs that are archived.

    --json prints a line for each.
    """
    cli.listing(
        store.ops.archives(),
        ("kind", "name", "archived", "place"),
        lambda one: [one.kind, one.name, local(one.at), one.place],
        empty="nothing is archived",
    )


def _print(done: Archive, verb: str, cli: Invocation) -> None:
    cli.result(f"{verb} {done.kind} {done.name}: {done.place}", done)
