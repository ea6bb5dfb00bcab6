"""The commands that write: fork, rollback, prune, delete, delete-run.

What removes something asks first on a terminal and wants `--yes` anywhere else; the question says what will go. Nothing
is removed before the answer.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from perdure import Store
from perdure.cli.looking import NO, OK, checkpoint_json
from perdure.cli.readable import plural
from perdure.cli.refs import existing, resolve
from perdure.cli.render import Output
from perdure.cli.runs import existing_run
from perdure.errors import UsageError


def fork(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    at = resolve(thread, args.ref)
    made = thread.fork(at, name=args.name)
    if out.json:
        out.document({"thread": made.name, "from": thread.name, "at": at.id, "step": at.step})
    else:
        out.line((f"forked {thread.name} at {at.id} (step {at.step}) as {made.name}", "green"))
    return OK


def rollback(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    to = resolve(thread, args.ref)
    head = thread.rollback(to, note=args.note)
    if out.json:
        out.document(checkpoint_json(head) | {"rolled_back_to": to.id})
    else:
        out.line((f"{thread.name} is back at {to.id} (step {to.step}); the new head is {head.id}", "green"))
    return OK


_WHY_KEPT = {
    "pin": "pinned (`perdure pins`)",
    "fork": "another thread shares them",
    "graph": "a graph's later checkpoints or pending writes are built on them",
}


def prune(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    question = f"Remove all but the newest {plural(args.keep, 'checkpoint')} of {args.thread!r}? This cannot be undone."
    if not agreed(args, out, question):
        return NO
    with out.progress("pruning") as progress:
        pruned = thread.prune(keep=args.keep, progress=progress)
    if out.json:
        found = {"removed": pruned.removed, "rebased": pruned.rebased, "kept": pruned.kept}
        out.document({"thread": thread.name, **found})
    else:
        out.line((f"{plural(pruned.removed, 'checkpoint')} of {thread.name} removed", "green"))
        for why, count in pruned.kept.items():
            out.line((f"{plural(count, 'older checkpoint')} kept: {_WHY_KEPT[why]}", ""))
    return OK


def delete(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    if not agreed(args, out, f"Delete thread {args.thread!r} and all its history? This cannot be undone."):
        return NO
    with out.progress("deleting") as progress:
        pruned = store.delete_thread(thread, force=args.force, progress=progress)
    if out.json:
        out.document({"thread": thread.name, "removed": pruned.removed})
    else:
        out.line((f"deleted {thread.name}: {plural(pruned.removed, 'record')} removed", "green"))
    return OK


def delete_run(args: Namespace, store: Store, out: Output) -> int:
    existing_run(store, args.run)
    if not agreed(args, out, f"Delete run {args.run!r} with all that is known of it? This cannot be undone."):
        return NO
    store.delete_run(args.run)
    if out.json:
        out.document({"run": args.run, "deleted": True})
    else:
        out.line((f"deleted {args.run}", "green"))
    return OK


def agreed(args: Namespace, out: Output, question: str) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{args.command} removes for good: give --yes when there is no terminal to ask on")
    if out.confirm(question):
        return True
    out.message("nothing was removed")
    return False
