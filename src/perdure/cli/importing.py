"""The command that takes over the database of one of LangGraph's own checkpointers.

The one command that may make a store: what it is asked to fill need not be there. The source is looked at first, so
that a typo there makes nothing.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from perdure import Store
from perdure.cli import opening
from perdure.cli.looking import NO, OK
from perdure.cli.readable import plural, size
from perdure.cli.render import Output
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.langgraph.importing import Imported


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a file of SqliteSaver, or postgresql://user@host/database")
    parser.add_argument(
        "--trust",
        metavar="PREFIX",
        action="append",
        default=[],
        help="modules whose data classes may be loaded, such as myapp. (may be given again)",
    )
    parser.add_argument("--thread", metavar="ID", action="append", help="only this thread (may be given again)")
    parser.add_argument("--no-verify", action="store_true", help="do not read everything back and compare it")


def import_langgraph(args: Namespace, _store: Store | None, out: Output) -> int:
    from perdure.langgraph import PerdureSaver
    from perdure.langgraph.importing import check_source
    from perdure.langgraph.importing import import_langgraph as run_import

    if re.search(r"[?&](schema|currentSchema)=", args.source):
        raise UsageError("SOURCE: name its schema as ?options=-csearch_path%3DNAME; --schema is the store's")
    check_source(args.source, args.store)
    if args.trust:
        sys.path.insert(0, os.getcwd())  # where one's own modules are: the installed script does not look there
    verify, given = not args.no_verify, opening.options(args, args.store)
    with (
        PerdureSaver(args.store, trust=args.trust, tenant=args.tenant, **given) as saver,
        out.progress("importing") as progress,
    ):
        done = run_import(args.source, saver, trust=args.trust, threads=args.thread, verify=verify, progress=progress)
    if out.json:
        out.document(_json(args, done))
    else:
        _say(args, done, out)
    return OK if done.ok else NO


def _json(args: Namespace, done: Imported) -> dict[str, Any]:
    return {
        "threads": done.threads,
        "checkpoints": done.checkpoints,
        "writes": done.writes,
        "skipped": done.skipped,
        "source_bytes": done.source_bytes,
        "store_bytes": done.store_bytes,
        "verified": not args.no_verify,
        "differences": list(done.differences),
    }


def _say(args: Namespace, done: Imported, out: Output) -> None:
    there = f"; {plural(done.skipped, 'checkpoint')} already there" if done.skipped else ""
    out.line(
        (
            f"imported {plural(done.checkpoints, 'checkpoint')} of {plural(done.threads, 'thread')}, "
            f"with {plural(done.writes, 'pending write')}{there}",
            "green",
        )
    )
    if args.thread is None:
        out.line((f"{size(done.source_bytes)} -> {size(done.store_bytes)}", "bold"))
    if not done.ok:
        for difference in done.differences:
            out.line((difference, "red"))
        out.message("not all is as in the source; if it is still being written to, import again")
    elif not args.no_verify:
        out.line(("verified: every checkpoint reads back as it is in the source", "green"))
