"""The command that takes over the database of one of LangGraph's own checkpointers.

The one command that may make a store: what it is asked to fill need not be there. The source is looked at first, so
that a typo there makes nothing.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from perdure import Store
from perdure.cli import opening
from perdure.cli.looking import NO, OK
from perdure.cli.readable import plural
from perdure.cli.render import Output
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.langgraph import MigrationReport


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
    from perdure.langgraph import import_langgraph as run_import
    from perdure.langgraph.migration import check_apart, open_source

    if re.search(r"[?&](schema|currentSchema)=", args.source):
        raise UsageError("SOURCE: name its schema as ?options=-csearch_path%3DNAME; --schema is the store's")
    check_apart(args.source, args.store)
    with open_source(args.source):
        pass  # a source that cannot be read makes no store
    if args.trust:
        sys.path.insert(0, os.getcwd())  # where one's own modules are: the installed script does not look there
    verify, given = not args.no_verify, opening.options(args, args.store)
    with (
        PerdureSaver(args.store, trust=args.trust, tenant=args.tenant, **given) as saver,
        out.progress("importing") as progress,
    ):
        done = run_import(args.source, saver, threads=args.thread, verify=verify, progress=progress)
    if out.json:
        out.document({**asdict(done), "verified": verify})
    else:
        _show(done, verify, out)
    return OK if done.ok else NO


def _show(done: MigrationReport, verified: bool, out: Output) -> None:
    line = (
        f"imported {plural(done.checkpoints, 'checkpoint')} of {plural(done.threads, 'thread')}, "
        f"with {plural(done.writes, 'pending write')}"
    )
    out.line((line, "green"))
    for thread in done.skipped:
        out.line((f"skipped thread {thread!r}: the store has a thread of that name with other checkpoints", "red"))
    for difference in done.differences:
        out.line((difference, "red"))
    if verified and not done.differences:
        out.line(("verified: every imported checkpoint reads back as it is in the source", "green"))
