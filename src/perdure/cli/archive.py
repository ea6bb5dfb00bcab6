"""The commands that move threads and finished runs into archives and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, argument, command, with_store
from perdure.cli.parameters import run_argument, thread_argument
from perdure.cli.text import fields, local

if TYPE_CHECKING:
    from perdure import Store
    from perdure.cli.output import Output
    from perdure.ops import Archive

place_argument = argument("place", "PLACE", "A file, or an object such as s3://bucket/alice.db.")
place_option = click.option("--place", metavar="PLACE", help="Where the archive is now, if it was moved.")


@command(
    "perdure thread archive alice-001 archive.db\nperdure thread archive alice-001 s3://bucket/alice-001.db",
    name="archive",
)
@thread_argument
@place_argument
@with_store
def archive_thread(cli: Invocation, store: Store, thread: str, place: str) -> None:
    """Move a thread into an archive.

    Copies it into a store file, verifies that, and removes it here. The store remembers where it is.
    """
    _print(store.ops.archive(thread, place), "archived", cli.out)


@command("perdure thread unarchive alice-001", name="unarchive")
@thread_argument
@place_option
@with_store
def unarchive_thread(cli: Invocation, store: Store, thread: str, place: str | None) -> None:
    """Bring an archived thread back.

    The archive stays.
    """
    _print(store.ops.unarchive(thread, place), "unarchived", cli.out)


@command("perdure run archive trip-42 archive.db\nperdure run archive trip-42 s3://bucket/trip-42.db", name="archive")
@run_argument
@place_argument
@with_store
def archive_run(cli: Invocation, store: Store, run: str, place: str) -> None:
    """Move a finished run into an archive.

    With the runs that it started and their states. Copies them into a store file, verifies that, and removes them here.
    """
    _print(store.ops.archive_run(run, place), "archived", cli.out)


@command("perdure run unarchive trip-42", name="unarchive")
@run_argument
@place_option
@with_store
def unarchive_run(cli: Invocation, store: Store, run: str, place: str | None) -> None:
    """Bring an archived run back.

    The archive stays.
    """
    _print(store.ops.unarchive_run(run, place), "unarchived", cli.out)


@command("perdure store archives")
@with_store
def archives(cli: Invocation, store: Store) -> None:
    """List the threads and runs that are archived.

    --json prints a line for each.
    """
    found = store.ops.archives()
    if cli.out.json:
        for one in found:
            cli.out.json_line(fields(one))
    elif found:
        rows = [[(one.kind, ""), (one.name, "bold"), (local(one.at), "dim"), (one.place, "")] for one in found]
        cli.out.table(("kind", "name", "archived", "place"), rows)
    else:
        cli.out.message("nothing is archived")


def _print(done: Archive, verb: str, out: Output) -> None:
    out.result(fields(done), f"{verb} {done.kind} {done.name}: {done.place}")
