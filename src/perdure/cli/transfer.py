"""The commands that copy threads, runs and whole stores into other stores."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, argument, command, with_store
from perdure.cli.parameters import no_verify_option, run_argument, thread_argument, trust_option
from perdure.cli.text import fields, plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

target_argument = argument("target", "TARGET", "Another store: a path, or postgresql://user@host/database.")


@command(
    "perdure thread transfer alice-001 alice-001.db\nperdure thread transfer alice-001 postgresql://app@db/app",
    name="transfer",
)
@thread_argument
@target_argument
@with_store
def transfer_thread(cli: Invocation, store: Store, thread: str, target: str) -> None:
    """Copy a thread into another store.

    With its branches, its metadata, its pins, LangGraph's ids and pending writes; every hash is verified. Creates the
    target if there is none. Run again after an interruption, it continues.
    """
    _transfer(cli, store, target, threads=[thread])


@command(
    "perdure run transfer trip-41 archive.db\nperdure run transfer trip-42 postgresql://app@db/app --move",
    name="transfer",
)
@run_argument
@target_argument
@click.option("--move", is_flag=True, help="It continues there, and never again here; for runs that are not finished.")
@with_store
def transfer_run(cli: Invocation, store: Store, run: str, target: str, move: bool) -> None:
    """Copy or move a run into another store.

    With its history, its keys, and the runs that it has started. Run again after an interruption, it continues.
    """
    from perdure.cli.runs import existing_run

    _transfer(cli, store, target, runs=[existing_run(store, run).id], move=move)


@command(
    "perdure store transfer postgresql://app@db/app\n"
    "perdure store transfer agent.db --store alice.db --one-tenant --move",
    name="transfer",
)
@target_argument
@click.option("--one-tenant", is_flag=True, help="Only this tenant (--tenant), into a store that need not be empty.")
@click.option("--move", is_flag=True, help="With --one-tenant: runs that are not finished continue there only.")
@with_store
def transfer_store(cli: Invocation, store: Store, target: str, one_tenant: bool, move: bool) -> None:
    """Copy everything into another, empty store, SQLite or PostgreSQL.

    All tenants; every row is copied as it is. Stop the processes that use this store first: the copy takes its place.
    Run again after an interruption, it continues.
    """
    if move and not one_tenant:
        raise UsageError("--move goes with --one-tenant: a copy of everything takes the place of this store anyway")
    _transfer(cli, store, target, tenant=store._context.tenant_name if one_tenant else None, move=move)


def _transfer(cli: Invocation, store: Store, target: str, **what: Any) -> None:
    from perdure.storage.urls import is_postgres, redacted

    options = cli.options(target if is_postgres(target) else cli.url)
    if not is_postgres(target):
        options.pop("schema", None)  # --schema is the source's
    with cli.out.progress("transferring") as progress:
        done = store.ops.transfer(target, progress=progress, **what, **options)
    if cli.out.json:
        cli.out.document(fields(done) | {"target": redacted(target)})
        return
    counts = (
        f"{plural(done.threads, 'thread')} with {plural(done.checkpoints, 'checkpoint')}, {plural(done.runs, 'run')}"
    )
    cli.out.line((f"transferred to {redacted(target)}: {counts}", "green"))
    for name in done.already:
        cli.out.line((f"thread {name} was there already, with the same history", ""))


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
