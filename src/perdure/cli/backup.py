"""The commands that copy or repair a store: backup, restore, repair, settle, transfer, import-langgraph."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import (
    NO,
    OK,
    Invocation,
    command,
    run_group,
    store_group,
    thread_group,
    with_store,
)
from perdure.cli.health import checked
from perdure.cli.parameters import retain_option, trust_option, yes_option
from perdure.cli.runs import existing_run
from perdure.cli.text import plural, size
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

_SHOWN_MAX = 200


@command(
    store_group,
    "Backup",
    "perdure store backup /backups/agent.db\n"
    "perdure store backup s3://bucket/monday.db --store postgresql://app@db/app",
)
@click.argument("file")
@retain_option
@with_store
def backup(cli: Invocation, store: Store, file: str, retain_until: datetime | None) -> None:
    """Copy the whole store while it is in use.

    Copies all tenants as of one commit. Writers do not wait for it. FILE is a new path or a new object:
    s3://bucket/name, gs://…, az://…. The copy is itself a store. --retain-until locks an object in S3.
    """
    with cli.progress("backing up") as progress:
        done = store.ops.backup(file, progress=progress, retain_until=retain_until)
    if cli.json:
        return cli.document(done)
    cli.line(f"copied the store to {file}", f"{size(done.bytes)} in {done.seconds:.1f} s")
    test = ["perdure", "store", "restore", file, "--test", *(["--store", cli.store] if cli.store else ())]
    cli.message(f"Test this backup: `{shlex.join(test)}`")
    return None


@command(
    store_group,
    "Backup",
    "perdure store restore /backups/agent.db agent.db\n"
    "perdure store restore /backups/app.db postgresql://app@db/app2\n"
    "perdure store restore /backups/agent.db --test --store agent.db",
)
@click.argument("file")
@click.argument("target", required=False)
@click.option("--test", is_flag=True, help="Restore to a temporary place, check it, remove it; needs --store.")
@click.pass_obj
def restore(cli: Invocation, file: str, target: str | None, test: bool) -> int:
    """Restore a backup, or test whether it can be restored.

    TARGET is a new path, or postgresql://user@host/database whose schema (--schema) is empty. Checks every hash after
    the restore. Queues runs that were running. --test restores to a temporary place and removes it; `perdure doctor`
    shows when you last did that.
    """
    import perdure

    if test and target is not None:
        raise UsageError("TARGET and --test exclude each other: --test restores to a temporary place and removes it")
    if not test and target is None:
        raise UsageError(f"restore where? `perdure store restore {shlex.quote(file)} TARGET`, or --test to only try it")
    with cli.progress("restoring") as progress:
        if target is None:
            with cli.open() as store:
                done = store.ops.test_backup(file, progress=progress)
        else:
            done = perdure.ops.restore_backup(file, target, progress=progress, **cli.options(target))
    report = done.report
    if cli.json:
        cli.document(done, to=None if test else done.url, test=test, ok=done.ok)
        return OK if done.ok else NO
    for problem in report.problems[:_SHOWN_MAX]:
        cli.line(str(problem))
    if not done.ok:
        cli.line(f"{plural(len(report.problems), 'problem')} in {file}")
        return NO
    counts = (
        f"{plural(report.threads, 'thread')}, {plural(report.checkpoints, 'checkpoint')}, {plural(report.runs, 'run')}"
    )
    headline = f"{file} can be restored" if test else f"{file} is restored to {done.url}"
    cli.line(f"{headline}: {counts}, every hash correct")
    if done.requeued and not test:
        cli.line(f"{plural(done.requeued, 'run')} that had been running will be resumed: start a worker")
    return OK


@command(
    store_group,
    "Backup",
    "perdure store repair --store agent.db\nperdure store repair --store postgresql://app@db/app --to repaired",
)
@click.option("--to", metavar="FILE", help="Where the repaired copy goes; on PostgreSQL, the name of a schema.")
@click.pass_obj
def repair(cli: Invocation, to: str | None) -> int:
    """Make a repaired copy of a damaged store.

    The copy keeps everything whose hash is correct. The command lists what the copy lacks, and verifies the copy. The
    damaged store stays as it is. The copy is agent.repaired.db beside the store, or FILE; on PostgreSQL it is a new
    schema. Makes no copy if it finds no damage. Exits with 1 if something is lost. An encrypted store needs its keys
    ($PERDURE_KEYS).
    """
    import perdure

    with cli.progress("repairing") as progress:
        done = perdure.ops.repair_store(cli.url, to=to, progress=progress, **cli.options(cli.url))
    report, code = done.report, OK if done.ok else NO
    if cli.json:
        cli.document(done, ok=done.ok, changed=done.changed)
        return code
    for name in done.left:
        cli.message(f"tenant {name} was not checked: its key is missing")
    if not done.changed:
        cli.line(f"no damage: {checked(report)} checked, no copy was made")
        return code
    for title, notes in (("repaired", done.repaired), ("lost", done.lost)):
        rows = [
            (note.tenant or "-", f"{note.thread or note.run or 'store'} {note.checkpoint or ''}", note.what)
            for note in notes[:_SHOWN_MAX]
        ]
        if rows:
            cli.table((title, "where", "what"), rows)
    cli.line(f"{plural(len(done.repaired), 'thing')} repaired, {len(done.lost)} lost")
    for problem in report.problems[:_SHOWN_MAX]:
        cli.line(str(problem))
    problems = plural(len(report.problems), "problem") if report.problems else "no problems"
    cli.line(f"{done.place}: {checked(report)} verified, {problems}")
    cli.message("the store itself is unchanged: stop the processes that use it, then put the copy in its place")
    return code


# --- transfer


@command(
    thread_group,
    "Remove and move",
    "perdure thread transfer alice-001 alice-001.db\nperdure thread transfer alice-001 postgresql://app@db/app",
    name="transfer",
)
@click.argument("thread")
@click.argument("target")
@with_store
def transfer_thread(cli: Invocation, store: Store, thread: str, target: str) -> None:
    """Copy a thread into another store: a path, or postgresql://user@host/database.

    Copies its branches, metadata, pins, LangGraph ids and pending writes, and verifies every hash. Creates the target
    if it does not exist. After an interruption, run the same command again: it continues.
    """
    _transfer(cli, store, target, threads=[thread])


@command(
    run_group,
    "Remove and move",
    "perdure run transfer trip-41 archive.db\nperdure run transfer trip-42 postgresql://app@db/app --move",
    name="transfer",
)
@click.argument("run")
@click.argument("target")
@click.option("--move", is_flag=True, help="Move an unfinished run: it continues there, and never again here.")
@with_store
def transfer_run(cli: Invocation, store: Store, run: str, target: str, move: bool) -> None:
    """Copy or move a run into another store.

    Copies its history, its idempotency keys, and the runs that it started. After an interruption, run the same command
    again: it continues.
    """
    _transfer(cli, store, target, runs=[existing_run(store, run).id], move=move)


@command(
    store_group,
    "Migration",
    "perdure store transfer postgresql://app@db/app\n"
    "perdure store transfer agent.db --store alice.db --one-tenant --move",
    name="transfer",
)
@click.argument("target")
@click.option("--one-tenant", is_flag=True, help="Only this tenant (--tenant), into a store that need not be empty.")
@click.option("--move", is_flag=True, help="With --one-tenant: unfinished runs continue only in the target.")
@with_store
def transfer_store(cli: Invocation, store: Store, target: str, one_tenant: bool, move: bool) -> None:
    """Copy everything into another, empty store, SQLite or PostgreSQL.

    Copies all tenants, and every row as it is. Stop the processes that use this store first: the copy takes its place.
    After an interruption, run the same command again: it continues.
    """
    if move and not one_tenant:
        raise UsageError("--move needs --one-tenant: a copy of everything takes the place of this store anyway")
    _transfer(cli, store, target, tenant=store._context.tenant_name if one_tenant else None, move=move)


def _transfer(cli: Invocation, store: Store, target: str, **choice: Any) -> None:
    from perdure.storage.urls import is_postgres, redacted

    options = cli.options(target if is_postgres(target) else cli.url)
    if not is_postgres(target):
        options.pop("schema", None)  # --schema is the source's
    with cli.progress("transferring") as progress:
        done = store.ops.transfer(target, progress=progress, **choice, **options)
    copied = (
        f"{plural(done.threads, 'thread')} with {plural(done.checkpoints, 'checkpoint')}, {plural(done.runs, 'run')}"
    )
    copied += f", {plural(done.versions, 'version')} of items of memory" if done.versions else ""
    text = f"transferred to {redacted(target)}: {copied}"
    cli.result(text, done, target=redacted(target))
    for name in done.already:
        cli.message(f"thread {name} was there already, with the same history")


@command(
    store_group,
    "Migration",
    "perdure store import-langgraph checkpoints.db --store agent.db\n"
    "perdure store import-langgraph postgresql://app@db/old --store postgresql://app@db/app --trust myapp.",
)
@click.argument("source")
@trust_option
@click.option("--thread", "threads", metavar="ID", multiple=True, help="Only this thread (may be repeated).")
@click.pass_obj
def import_langgraph(cli: Invocation, source: str, trust: tuple[str, ...], threads: tuple[str, ...]) -> int:
    """Import the database of one of LangGraph's own checkpointers.

    SOURCE is a file of SqliteSaver, or postgresql://user@host/database. It is only read, so it may be in use. Keeps
    ids, parents, metadata and pending writes. Creates the store if it does not exist. After an interruption, run the
    same command again: it continues. Executes nothing that is stored.
    """
    from perdure.langgraph import PerdureSaver
    from perdure.langgraph import import_langgraph as run_import
    from perdure.langgraph.saver_import import check_apart, open_source

    if re.search(r"[?&](schema|currentSchema)=", source):
        raise UsageError("SOURCE: name its schema as ?options=-csearch_path%3DNAME; --schema is the store's")
    check_apart(source, cli.url)
    with open_source(source):
        pass  # an unreadable source must not create a store
    if trust:
        sys.path.insert(0, os.getcwd())  # the installed script does not search the working directory for modules
    with (
        PerdureSaver(cli.url, trust=trust, tenant=cli.tenant, **cli.options(cli.url)) as saver,
        cli.progress("importing") as progress,
    ):
        done = run_import(source, saver, threads=threads or None, progress=progress)
    counts = f"imported {plural(done.checkpoints, 'checkpoint')} of {plural(done.threads, 'thread')}"
    cli.result(f"{counts}, with {plural(done.writes, 'pending write')}", done)
    if cli.json:
        return OK if done.ok else NO
    for thread in done.skipped:
        cli.line(f"skipped thread {thread!r}: the store has a thread of that name with other checkpoints")
    for difference in done.differences:
        cli.line(difference)
    if not done.differences:
        cli.line("verified: every imported checkpoint reads back as it is in the source")
    return OK if done.ok else NO


@command(
    store_group,
    "Backup",
    "perdure store settle a.db postgresql://app@us/app\nperdure store settle a.db --drop --yes",
    names_stores=True,
)
@click.argument("urls", metavar="STORE...", nargs=-1, required=True)
@click.option("--drop", is_flag=True, help="Undo what is prepared in these stores, whatever was decided.")
@yes_option
@click.pass_obj
def settle(cli: Invocation, urls: tuple[str, ...], drop: bool, yes: bool) -> None:
    """End transactions over several stores whose process has died. Name all of their stores.

    The store that decides says whether they are committed. --drop is for one whose row is damaged or whose decider is
    lost: look yourself whether the other store has committed its part.
    """
    from perdure.storage.prepared import drop_all
    from perdure.teams.commit import settle as settle_stores

    if drop:
        cli.confirm(f"Undo what is prepared in {', '.join(urls)}, whatever was decided?", yes=yes)
    with ExitStack() as stack:
        stores = [stack.enter_context(cli.open(url)) for url in urls]
        dropped = sum(drop_all(store._context.driver) for store in stores) if drop else 0
        ended = dropped or settle_stores(*stores)
    cli.result(f"{plural(ended, 'transaction')} ended", ended=ended)
