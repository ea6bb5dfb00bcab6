"""The commands that move threads and runs between stores and files."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, argument, command, with_store
from perdure.cli.parameters import REF_HELP, no_verify_option, run_argument, thread_argument, trust_option
from perdure.cli.refs import existing, resolve
from perdure.cli.text import fields, plural, size
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

file_argument = argument("file", "FILE", "The file to write; must not exist.")
read_argument = argument("file", "FILE", "A file that the export has written.")


@command(
    "perdure thread export alice-001 alice-001.thread\nperdure thread export alice-001 short.thread --branch head~3",
    name="export",
)
@thread_argument
@file_argument
@click.option("--branch", metavar="REF", help=f"Only this checkpoint and those that led to it: {REF_HELP}.")
@with_store
def export_thread(cli: Invocation, store: Store, thread: str, file: str, branch: str | None) -> None:
    """Write a thread to one file.

    With its branches, its metadata, LangGraph's ids and pending writes. The file is not encrypted.
    """
    handle = existing(store, thread)
    at = resolve(handle, branch) if branch is not None else None
    with cli.out.progress("exporting") as progress:
        done = store.ops.export_thread(handle, file, branch=at, progress=progress)
    if cli.out.json:
        cli.out.document(fields(done))
    else:
        what = "" if at is None else f" that led to {at.id}"
        cli.out.line(
            (f"{plural(done.checkpoints, 'checkpoint')} of {thread}{what} in {file}", "green"), (size(done.bytes), "")
        )


@command(
    "perdure thread import alice-001.thread --store agent.db\n"
    "perdure thread import alice-001.thread --store postgresql://app@db/app --name alice-copy",
    name="import",
)
@read_argument
@click.option("--name", metavar="NAME", help="Another name for the thread.")
@click.pass_obj
def import_thread(cli: Invocation, file: str, name: str | None) -> None:
    """Read a thread from a file into a store.

    All of it or nothing; every hash is checked. Creates the store if there is none.
    """
    from perdure.ops.copies.importing import open_file

    open_file(file, None)[0].close()  # before a store is made: a typo must make none
    with cli.open(create=True) as store, cli.out.progress("importing") as progress:
        done = store.ops.import_thread(file, name=name, progress=progress)
    if cli.out.json:
        cli.out.document(fields(done))
    elif done.already:
        cli.out.line((f"{done.thread} exists already and is equal: nothing was changed", ""))
    else:
        cli.out.line((f"imported {done.thread} with {plural(done.checkpoints, 'checkpoint')}", "green"))


@command(
    "perdure run export trip-42 trip-42.run\nperdure run export trip-41 trip-41.run --keep",
    name="export",
)
@run_argument
@file_argument
@click.option("--keep", is_flag=True, help="A copy of a finished run; it stays here too.")
@with_store
def export_run(cli: Invocation, store: Store, run: str, file: str, keep: bool) -> None:
    """Write a run with its history to a file.

    A parked, paused, stuck or finished one, with the runs that it has started. It does not run here any more, so that
    it cannot run twice.
    """
    from perdure.cli.runs import existing_run

    store.ops.export_run(existing_run(store, run), file, keep=keep)
    if cli.out.json:
        cli.out.document({"run": run, "file": file, "kept": keep})
    else:
        kept = "" if keep else "; here it is marked as exported and will not run any more"
        cli.out.line((f"{run} is in {file}{kept}", "green"))


@command(
    "perdure run import trip-42.run\nperdure run import trip-42.run --store postgresql://app@db/app", name="import"
)
@read_argument
@with_store
def import_run(cli: Invocation, store: Store, file: str) -> None:
    """Read a run from a file into this store.

    With its id, its history and its keys. Once: a file that was imported is not imported again.
    """
    made = store.ops.import_run(file)
    cli.out.result({"run": made.id, "status": made.status}, f"imported {made.id}, {made.status}")


@command(
    "perdure store import-langgraph checkpoints.db --store agent.db\n"
    "perdure store import-langgraph postgresql://app@db/old --store postgresql://app@db/app --trust myapp."
)
@argument("source", "SOURCE", "A file of SqliteSaver, or postgresql://user@host/database.")
@trust_option
@click.option("--thread", "threads", metavar="ID", multiple=True, help="Only this thread (may be repeated).")
@no_verify_option
@click.pass_obj
def import_langgraph(
    cli: Invocation, source: str, trust: tuple[str, ...], threads: tuple[str, ...], no_verify: bool
) -> int:
    """Import the database of one of LangGraph's own checkpointers.

    Also while it is in use: it is only read. Ids, parents, metadata and pending writes stay as they are. Creates the
    store if there is none. Run again, it continues. Nothing that is stored is executed.
    """
    from perdure.langgraph import PerdureSaver
    from perdure.langgraph import import_langgraph as run_import
    from perdure.langgraph.migration import check_apart, open_source

    if re.search(r"[?&](schema|currentSchema)=", source):
        raise UsageError("SOURCE: name its schema as ?options=-csearch_path%3DNAME; --schema is the store's")
    check_apart(source, cli.url)
    with open_source(source):
        pass  # a source that cannot be read makes no store
    if trust:
        sys.path.insert(0, os.getcwd())  # the installed script does not look there for the user's modules
    out, verify, options = cli.out, not no_verify, cli.options(cli.url)
    with (
        PerdureSaver(cli.url, trust=trust, tenant=cli.settings.tenant, **options) as saver,
        out.progress("importing") as progress,
    ):
        done = run_import(source, saver, threads=threads or None, verify=verify, progress=progress)
    if out.json:
        out.document(fields(done) | {"verified": verify})
        return OK if done.ok else NO
    counts = f"imported {plural(done.checkpoints, 'checkpoint')} of {plural(done.threads, 'thread')}"
    out.line((f"{counts}, with {plural(done.writes, 'pending write')}", "green"))
    for thread in done.skipped:
        out.line((f"skipped thread {thread!r}: the store has a thread of that name with other checkpoints", "red"))
    for difference in done.differences:
        out.line((difference, "red"))
    if verify and not done.differences:
        out.line(("verified: every imported checkpoint reads back as it is in the source", "green"))
    return OK if done.ok else NO
