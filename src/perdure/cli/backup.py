"""The commands about copies of a whole store: store backup, store restore."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import click

from perdure.cli.base import DEFAULT_FILE, NO, OK, Invocation, argument, command, with_store
from perdure.cli.parameters import no_verify_option
from perdure.cli.text import fields, plural, size
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Restored

_SHOWN_MAX = 20


@command(
    "perdure store backup /backups/agent.db\n"
    "perdure store backup /backups/app.db --store postgresql://app@db/app --json"
)
@argument("file", "FILE", "A file (an earlier backup there is replaced), or s3://bucket/name, gs://…, az://….")
@with_store
def backup(cli: Invocation, store: Store, file: str) -> None:
    """Copy the whole store while it is in use.

    All tenants, as of one commit; writers do not wait for it. The copy is itself a store.
    """
    out = cli.out
    with out.progress("backing up") as progress:
        done = store.ops.backup(file, progress=progress)
    if out.json:
        out.document(fields(done))
        return
    out.line(
        (f"the store is in {file}", "green"),
        (f"{size(done.bytes)} in {done.seconds:.1f} s", ""),
    )
    out.message(f"Test this backup: `{_test_command(cli, file)}`")


def _test_command(cli: Invocation, file: str) -> str:
    """The command that tests a backup, such that it works where this one did."""
    from perdure.storage.urls import redacted

    line = ["perdure", "store", "restore", file, "--test"]
    if cli.url != (os.environ.get("PERDURE_STORE") or DEFAULT_FILE):  # --store named it
        line += ["--store", "URL" if redacted(cli.url) != cli.url else cli.url]
    schema = cli.settings.schema
    return shlex.join(line + (["--schema", schema] if schema else []))


@command(
    "perdure store restore /backups/agent.db --to agent.db\n"
    "perdure store restore /backups/app.db --to postgresql://app@db/app2\n"
    "perdure store restore /backups/agent.db --test --store agent.db"
)
@argument("file", "FILE", "What `perdure store backup` wrote: a file, or s3://bucket/name ….")
@click.option("--to", metavar="URL", help="An empty place: a path, or postgresql://user@host/database (and --schema).")
@click.option("--force", is_flag=True, help="Replace an SQLite store that no process has open.")
@no_verify_option
@click.option("--test", is_flag=True, help="Restore to a temporary place, check it, remove it; needs --store.")
@click.pass_obj
def restore(cli: Invocation, file: str, to: str | None, force: bool, no_verify: bool, test: bool) -> int:
    """Restore a backup, or test whether it can be restored.

    Into an empty place, and checks every hash there. Runs that were running are queued again. --test restores to a
    temporary place; `perdure doctor` tells when that was last done.
    """
    import perdure

    if test and to is not None:
        raise UsageError("--to and --test exclude each other: --test restores to a temporary place and removes it")
    if not test and to is None:
        raise UsageError("restore where? Give --to URL, or --test to test it in a temporary place")
    with cli.out.progress("restoring") as progress:
        if to is None:
            with cli.open() as store:
                done = store.ops.test_backup(file, progress=progress)
        else:
            options = cli.options(to)
            done = perdure.restore(file, to, force=force, verify=not no_verify, progress=progress, **options)
    if cli.out.json:
        place = {"to": None if test else done.url, "test": test, "verified": test or not no_verify, "ok": done.ok}
        cli.out.document(fields(done, "url") | place)
    else:
        _print(cli, file, done, test=test, verified=not no_verify)
    return OK if done.ok else NO


def _print(cli: Invocation, file: str, done: Restored, *, test: bool, verified: bool) -> None:
    out, report = cli.out, done.report
    counts = (
        f"{plural(report.threads, 'thread')}, {plural(report.checkpoints, 'checkpoint')}, {plural(report.runs, 'run')}"
    )
    for problem in report.problems[:_SHOWN_MAX]:
        out.line((str(problem), "red"))
    if not done.ok:
        out.line((f"{plural(len(report.problems), 'problem')} in {file}", "red"))
    elif test:
        out.line((f"{file} can be restored: {counts}, every hash correct", "green"))
    elif verified:
        out.line((f"{file} is restored to {done.url}: {counts}, every hash correct", "green"))
    else:
        out.line((f"{file} is restored to {done.url}; not checked: run `perdure store verify`", "green"))
    if done.requeued and not test:
        out.line((f"{plural(done.requeued, 'run')} that had been running will be resumed: start a worker", ""))
