"""The commands that steer runs: answer, resolve, cancel, pause, resume, send, fork, rollback, export and import."""

from __future__ import annotations

import getpass
import json
from argparse import Namespace
from typing import Any

from holdfast import Store
from holdfast.cli import changing
from holdfast.cli.readable import plural
from holdfast.cli.render import Output
from holdfast.cli.runs import OK, has_run
from holdfast.errors import UsageError


def value_of(text: str) -> Any:
    """A value on the command line: JSON if it can be, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def answer(args: Namespace, store: Store, out: Output) -> int:
    value = args.value if args.text else value_of(args.value)
    given = store.answer(args.run, value, step=args.step, who=_who(args))
    if out.json:
        out.document({"run": args.run, "settled": given.settled, "missing": given.missing})
    elif given.settled:
        out.line((f"answered; {args.run} goes on at a worker, or where somebody waits for its result", "green"))
    else:
        out.line((f"noted; {plural(given.missing, 'more answer')} of the same kind needed", "green"))
    return OK


def resolve(args: Namespace, store: Store, out: Output) -> int:
    handle = store.get_run(args.run)
    if args.not_done:
        handle.resolve(args.step, not_done=True, who=_who(args))
    else:
        handle.resolve(args.step, done=value_of(args.done), who=_who(args))
    said = "not done" if args.not_done else "done"
    if out.json:
        out.document({"run": args.run, "step": args.step, "resolved": said})
    else:
        out.line((f"step {args.step} of {args.run} counts as {said}; the run goes on", "green"))
    return OK


def _who(args: Namespace) -> str:
    if args.who:
        return str(args.who)
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"


def steer(args: Namespace, store: Store, out: Output) -> int:
    """cancel, pause, resume: one request each."""
    handle = store.get_run(args.run)
    before = handle.status
    status = {"cancel": handle.cancel, "pause": handle.pause, "resume": handle.resume}[args.command]()
    if out.json:
        out.document({"run": args.run, "before": before, "status": status})
        return OK
    if status == "running":
        out.line((f"{args.run} is running: its process was told to {args.command}", "yellow"))
    elif status == before:
        out.line((f"{args.run} is {status}: there is nothing to {args.command}", "yellow"))
    else:
        out.line((f"{args.run} is {status} now", "green"))
    return OK


def send(args: Namespace, store: Store, out: Output) -> int:
    store.send(args.run, value_of(args.value), topic=args.topic, key=args.key)
    if out.json:
        out.document({"run": args.run, "topic": args.topic, "sent": True})
    else:
        out.line((f"sent to {args.run}", "green"))
    return OK


def fork(args: Namespace, store: Store, out: Output) -> int:
    """Of a thread, or of a run if the name is one's."""
    if not has_run(store, args.thread):
        if args.keys or args.set:
            raise UsageError(f"--keys and --set are for runs, and {args.thread!r} is none")
        return changing.fork(args, store, out)
    changes = {step: value_of(value) for step, value in (item.split("=", 1) for item in args.set or ())}
    made = store.fork(args.thread, at=args.ref, id=args.name, changes=changes or None, keys=args.keys)
    if out.json:
        out.document({"run": made.id, "from": args.thread, "at": args.ref, "status": made.status})
    else:
        at = f"at step {args.ref}" if args.ref is not None else "at its end"
        out.line((f"forked run {args.thread} {at} as {made.id}; a worker goes on with it", "green"))
    return OK


def rollback(args: Namespace, store: Store, out: Output) -> int:
    """A thread back to a checkpoint; or a run: its effects are undone."""
    if not has_run(store, args.thread):
        if args.ref is None:
            raise UsageError("rollback of a thread wants a REF: the checkpoint to go back to")
        return changing.rollback(args, store, out)
    if args.ref is not None:
        raise UsageError(
            "rollback of a run undoes all its effects and takes no REF; `holdfast fork` goes on from a step"
        )
    handle = store.get_run(args.thread)
    before, status = handle.status, handle.rollback()
    if out.json:
        out.document({"run": handle.id, "before": before, "status": status})
    elif status == before and status != "running":
        out.line((f"{handle.id} is {status}: there is nothing to undo", "yellow"))
    else:
        out.line((f"{handle.id} will be undone by a worker, newest effect first", "green"))
    return OK


def export_run(args: Namespace, store: Store, out: Output) -> int:
    store.export_run(args.run, args.file, keep=args.keep)
    if out.json:
        out.document({"run": args.run, "file": args.file, "kept": args.keep})
    else:
        kept = "" if args.keep else "; here it is marked as exported and will not run any more"
        out.line((f"{args.run} is in {args.file}{kept}", "green"))
    return OK


def import_run(args: Namespace, store: Store, out: Output) -> int:
    made = store.import_run(args.file)
    if out.json:
        out.document({"run": made.id, "status": made.status})
    else:
        out.line((f"{made.id} is here now, {made.status}", "green"))
    return OK
