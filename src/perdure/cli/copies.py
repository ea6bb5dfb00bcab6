"""The commands about copies: a thread to a file and back, a backup of the whole store, its restoration."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

import perdure
from perdure.cli import opening
from perdure.cli.command import Command
from perdure.cli.looking import NO, OK
from perdure.cli.readable import moment, plural, size
from perdure.cli.refs import HELP as REF_HELP
from perdure.cli.refs import existing, resolve
from perdure.cli.render import Output
from perdure.errors import UsageError
from perdure.storage.urls import redacted

if TYPE_CHECKING:
    from perdure import Restored, Store

_SHOWN_MAX = 20


def export(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    branch = resolve(thread, args.branch) if args.branch is not None else None
    with out.progress("exporting") as progress:
        done = store.ops.export_thread(thread, args.file, branch=branch, progress=progress)
    if out.json:
        out.document(
            {
                "thread": done.thread,
                "file": done.path,
                "checkpoints": done.checkpoints,
                "bytes": done.bytes,
                "whole": done.is_whole,
            }
        )
    else:
        what = "" if done.is_whole else f" that led to {branch.id if branch else ''}"
        out.line(
            (f"{plural(done.checkpoints, 'checkpoint')} of {done.thread}{what} in {args.file}", "green"),
            (size(done.bytes), ""),
        )
    return OK


def import_(args: Namespace, _store: Store | None, out: Output) -> int:
    from perdure.ops.copies.importing import open_file

    open_file(args.file, None)[0].close()  # before a store is made: a typo must make none
    given = {**opening.options(args, args.store), **opening.tenant(args)}
    with perdure.open(args.store, **given) as store, out.progress("importing") as progress:
        done = store.ops.import_thread(args.file, name=args.name, progress=progress)
    if out.json:
        out.document(
            {"thread": done.thread, "checkpoints": done.checkpoints, "head": done.head, "already": done.already}
        )
    elif done.already:
        out.line((f"{done.thread} is here already, the same: nothing was done", ""))
    else:
        out.line((f"{done.thread} is here now, with {plural(done.checkpoints, 'checkpoint')}", "green"))
    return OK


def backup(args: Namespace, store: Store, out: Output) -> int:
    with out.progress("backing up") as progress:
        done = store.ops.backup(args.file, progress=progress)
    if out.json:
        out.document(
            {
                "backup": done.id,
                "file": done.path,
                "at": moment(done.at),
                "stamp": done.stamp,
                "snapshot": done.snapshot,
                "bytes": done.bytes,
                "seconds": round(done.seconds, 3),
            }
        )
    else:
        out.line(
            (f"the store is in {args.file}, as of commit {done.stamp}", "green"),
            (f"{size(done.bytes)} in {done.seconds:.1f} s", ""),
        )
        out.message(f"is it any good? `{_try_line(args)}` tries it")
    return OK


def _try_line(args: Namespace) -> str:
    """The command that tries a backup, such that it works where this one did."""
    line = ["perdure", "restore", args.file, "--test"]
    if args.store != (os.environ.get("PERDURE_STORE") or "agent.db"):  # --store named it
        line += ["--store", "URL" if redacted(args.store) != args.store else args.store]
    line += ["--schema", args.schema] if args.schema else []
    return shlex.join(line)


def restore(args: Namespace, _store: Store | None, out: Output) -> int:
    if args.test and args.to is not None:
        raise UsageError("--to and --test exclude each other: --test restores to a temporary place and throws it away")
    if not args.test and args.to is None:
        raise UsageError("restore where? Give --to URL, or --test to try it in a temporary place")
    with out.progress("restoring") as progress:
        if args.test:
            with opening.open_existing(args) as store:
                done = store.ops.try_restore(args.file, progress=progress)
        else:
            given = opening.options(args, args.to)
            verify = not args.no_verify
            done = perdure.restore(args.file, args.to, force=args.force, verify=verify, progress=progress, **given)
    if out.json:
        out.document(_json(args, done))
    else:
        _say(args, done, out)
    return OK if done.ok else NO


def _json(args: Namespace, done: Restored) -> dict[str, Any]:
    report = done.report
    return {
        "backup": done.backup,
        "to": None if args.test else done.url,
        "test": args.test,
        "verified": args.test or not args.no_verify,
        "ok": done.ok,
        "tenants": done.tenants,
        "threads": report.threads,
        "checkpoints": report.checkpoints,
        "runs": report.runs,
        "requeued": done.requeued,
        "problems": [str(problem) for problem in report.problems],
        "seconds": round(done.seconds, 3),
    }


def _say(args: Namespace, done: Restored, out: Output) -> None:
    report = done.report
    counts = (
        f"{plural(report.threads, 'thread')}, {plural(report.checkpoints, 'checkpoint')}, {plural(report.runs, 'run')}"
    )
    for problem in report.problems[:_SHOWN_MAX]:
        out.line((str(problem), "red"))
    if not done.ok:
        out.line((f"{plural(len(report.problems), 'problem')} in {args.file}", "red"))
    elif args.test:
        out.line((f"{args.file} can be restored: {counts}, every hash as it should be", "green"))
    elif args.no_verify:
        out.line((f"{args.file} is restored to {done.url}; nothing was checked: run `perdure verify`", "green"))
    else:
        out.line((f"{args.file} is restored to {done.url}: {counts}, every hash as it should be", "green"))
    if done.requeued and not args.test:
        out.line(
            (f"{plural(done.requeued, 'run')} that had been running will go on from the journal: start a worker", "")
        )


# --- what they take


def _export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("thread", metavar="THREAD", help="the thread's name")
    parser.add_argument("file", metavar="FILE", help="where to write it; must not be there")
    parser.add_argument("--branch", metavar="REF", help=f"only this checkpoint and those that led to it: {REF_HELP}")


def _import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a file that `perdure export` wrote")
    parser.add_argument("--name", metavar="NAME", help="another name for the thread")


def _backup_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="where to write it: a file (an earlier backup there is replaced), or s3://bucket/name, gs://…, az://…",
    )


def _restore_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `perdure backup` wrote: a file, or s3://bucket/name …")
    parser.add_argument(
        "--to", metavar="URL", help="an empty place: a path, or postgresql://user@host/database (and --schema)"
    )
    parser.add_argument("--force", action="store_true", help="replace an SQLite store that nobody has open")
    parser.add_argument("--no-verify", action="store_true", help="do not check every hash afterwards")
    parser.add_argument(
        "--test", action="store_true", help="restore to a temporary place, check it, throw it away; needs --store"
    )


COPY_COMMANDS = {
    "export": Command(
        "write a thread to one file",
        "All its branches, its metadata, LangGraph's ids and pending\nwrites. `perdure import` takes it into any "
        "store, with the same ids and hashes. The file is not encrypted.",
        "  perdure export alice-001 alice-001.thread\n  perdure export alice-001 short.thread --branch head~3",
        _export_arguments,
        export,
    ),
    "import": Command(
        "take a thread from a file into a store",
        "All of it or nothing; every hash is checked. Makes the\nstore if there is none.",
        "  perdure import alice-001.thread --store agent.db\n"
        "  perdure import alice-001.thread --store postgresql://app@db/app --name alice-copy",
        _import_arguments,
        import_,
        opens=False,
    ),
    "backup": Command(
        "copy the whole store while it is in use",
        "All tenants, as of one commit; nobody waits for it. Of SQLite\nthe copy is a store itself.",
        "  perdure backup /backups/agent.db\n"
        "  perdure backup /backups/app.backup --store postgresql://app@db/app --json",
        _backup_arguments,
        backup,
    ),
    "restore": Command(
        "bring a backup back, or try whether it can be",
        "Into an empty place, and checks every hash there. Runs that\nwere running are queued again. --test restores "
        "to a temporary place; `perdure doctor` tells when that was last done.",
        "  perdure restore /backups/agent.db --to agent.db\n"
        "  perdure restore /backups/app.backup --to postgresql://app@db/app2\n"
        "  perdure restore /backups/agent.db --test --store agent.db",
        _restore_arguments,
        restore,
        opens=False,
        wants_store=False,
    ),
}
