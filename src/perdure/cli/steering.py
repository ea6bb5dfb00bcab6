"""The commands that steer runs: answer, resolve, cancel, pause, resume, send, fork, rollback, export and import."""

from __future__ import annotations

import getpass
import json
from argparse import Namespace
from shlex import quote
from typing import Any

from perdure import Run, Store
from perdure.cli import changing
from perdure.cli.readable import local, plural
from perdure.cli.refs import existing
from perdure.cli.render import Output
from perdure.cli.runs import OK, existing_run, is_run
from perdure.errors import AnswerRefused, UsageError
from perdure.runs.engine.waiting import ANSWER, RESULT, how_to_answer
from perdure.runs.journal.rows import FINISHED, TASK


def value_of(text: str) -> Any:
    """A value on the command line: JSON if it can be, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def answer(args: Namespace, store: Store, out: Output) -> int:
    existing_run(store, args.run)
    _refuse_placeholder(args.value, ANSWER)
    step, who = args.step or _only_question(store, args.run), _who(args)
    value = args.value if args.text else _yes_or_no(store, args.run, step, value_of(args.value))
    try:
        given = store.answer(args.run, value, step=step, who=who)
    except AnswerRefused as refused:
        if value == args.value:
            raise
        try:  # 2 can be meant as the text "2"; what was refused is not written
            given = store.answer(args.run, args.value, step=step, who=who)
        except AnswerRefused:
            raise refused from None
    if out.json:
        out.document({"run": args.run, "settled": given.settled, "missing": given.missing})
    elif given.settled:
        out.line((f"answered; a worker, or a process that waits for its result, will resume {args.run}", "green"))
    else:
        out.line((f"noted; {plural(given.missing, 'more answer')} of the same kind needed", "green"))
    return OK


_YES_OR_NO = {"yes": True, "y": True, "no": False, "n": False}


def _yes_or_no(store: Store, run: str, step: str, value: Any) -> Any:
    """To a question of true or false, yes and no are answers."""
    if not isinstance(value, str) or value.lower() not in _YES_OR_NO:
        return value
    asked = [ask for ask in store.asks(run) if ask.path == step and ask.options == [True, False]]
    return _YES_OR_NO[value.lower()] if asked else value


def _only_question(store: Store, run: str) -> str:
    """The step of the only question that is open."""
    found = [ask for ask in store.asks(run) if ask.kind != "doubt"]
    if len(found) == 1:
        return found[0].path
    if found:
        steps = ", ".join(ask.path for ask in found)
        raise UsageError(
            f"run {run!r} has {len(found)} open questions, at steps {steps}: name one, "
            f"`{how_to_answer(store._context.driver, run, found[0].path)}`; `perdure asks {quote(run)}` shows them"
        )
    if store.asks(run):
        raise UsageError(f"run {run!r} asks nothing but what became of an effect: `perdure run {quote(run)}` shows it")
    raise UsageError(f"run {run!r} has no open question; `perdure asks {quote(run)} --all` shows what it has asked")


def resolve(args: Namespace, store: Store, out: Output) -> int:
    handle = existing_run(store, args.run)
    _refuse_placeholder(args.done, RESULT)
    if args.not_done:
        handle.resolve(args.step, not_done=True, who=_who(args))
    else:
        handle.resolve(args.step, done=args.done if args.text else value_of(args.done), who=_who(args))
    said = "not done" if args.not_done else "done"
    if out.json:
        out.document({"run": args.run, "step": args.step, "resolved": said})
    else:
        then = "run its graph again" if handle.info().function.startswith(TASK) else "a worker will resume the run"
        again = _when_again(handle, args.step) if args.not_done else ""
        out.line((f"step {args.step} of {args.run} counts as {said}; {then}{again}", "green"))
    return OK


def _when_again(handle: Run, path: str) -> str:
    """When an effect that did not happen runs again: until its deadline the old request may still arrive."""
    deadline = handle._deadline(path)
    return "" if deadline is None else f". The effect runs again after its deadline, {local(deadline)}"


def _refuse_placeholder(given: str | None, placeholder: str) -> None:
    if given == placeholder:
        raise UsageError(f"{placeholder} stands for a value: put yours in its place, such as '\"B-1001\"'")


def _who(args: Namespace) -> str:
    if args.who:
        return str(args.who)
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"


def steer(args: Namespace, store: Store, out: Output) -> int:
    """cancel, pause, resume: one request each."""
    handle = existing_run(store, args.run)
    before = handle.status
    status = {"cancel": handle.cancel, "pause": handle.pause, "resume": handle.resume}[args.command]()
    if out.json:
        out.document({"run": args.run, "before": before, "status": status})
        return OK
    if status == "running" and args.command == "resume":
        out.line((f"{args.run} is running; if its process has died, a worker takes it over", "yellow"))
    elif status == "running":
        out.line((f"{args.run} is running: its process was told to {args.command}", "yellow"))
    elif status == before:
        out.line((f"{args.run} is {status}: there is nothing to {args.command}", "yellow"))
    else:
        out.line((f"{args.run} is {status} now", "green"))
    return OK


def send(args: Namespace, store: Store, out: Output) -> int:
    status = existing_run(store, args.run).status
    if status in FINISHED:
        raise UsageError(f"run {args.run!r} is {status}: nobody would receive it")
    store.send(args.run, value_of(args.value), topic=args.topic, key=args.key)
    if out.json:
        out.document({"run": args.run, "topic": args.topic, "sent": True})
    else:
        out.line((f"sent to {args.run}", "green"))
    return OK


def fork(args: Namespace, store: Store, out: Output) -> int:
    """Of a thread, or of a run if the name is one's."""
    if not is_run(args, store):
        if args.keys or args.set:
            raise UsageError(f"--keys and --set are for runs, and {args.thread!r} is none")
        return changing.fork(args, store, out)
    source = existing_run(store, args.thread)
    changes = dict(_change(item) for item in args.set or ())
    try:
        made = store.fork(source, at=args.ref, id=args.name, changes=changes or None, keys=args.keys)
    except UsageError as error:  # in the words of this side
        raise UsageError(
            str(error).replace('keys="new"', "--keys new").replace('keys="same"', "--keys same")
        ) from error
    if out.json:
        out.document({"run": made.id, "from": args.thread, "at": args.ref, "status": made.status})
    else:
        at = f"at step {args.ref}" if args.ref is not None else "at its end"
        out.line((f"forked run {args.thread} {at} as {made.id}; a worker goes on with it", "green"))
    return OK


def _change(item: str) -> tuple[str, Any]:
    step, separator, value = item.partition("=")
    if not separator or not step:
        raise UsageError(f"--set {item!r}: write STEP=VALUE, with the value as JSON or text: --set '4=\"UA88\"'")
    return step, value_of(value)


def rollback(args: Namespace, store: Store, out: Output) -> int:
    """A thread back to a checkpoint; or a run: its effects are undone."""
    if not is_run(args, store):
        existing(store, args.thread)
        if args.ref is None:
            raise UsageError(f"where to? `perdure rollback {quote(args.thread)} REF`; `perdure log` lists checkpoints")
        return changing.rollback(args, store, out)
    if args.ref is not None or args.note is not None:
        raise UsageError(
            "rollback of a run undoes all its effects, and takes no REF and no --note; `perdure fork` goes on from a "
            "step"
        )
    handle = existing_run(store, args.thread)
    before, status = handle.status, handle.rollback()
    if out.json:
        out.document({"run": handle.id, "before": before, "status": status})
    elif status == before and status != "running":
        out.line((f"{handle.id} is {status}: there is nothing to undo", "yellow"))
    else:
        out.line((f"{handle.id} will be undone by a worker, newest effect first", "green"))
    return OK


def export_run(args: Namespace, store: Store, out: Output) -> int:
    store.ops.export_run(existing_run(store, args.run), args.file, keep=args.keep)
    if out.json:
        out.document({"run": args.run, "file": args.file, "kept": args.keep})
    else:
        kept = "" if args.keep else "; here it is marked as exported and will not run any more"
        out.line((f"{args.run} is in {args.file}{kept}", "green"))
    return OK


def import_run(args: Namespace, store: Store, out: Output) -> int:
    made = store.ops.import_run(args.file)
    if out.json:
        out.document({"run": made.id, "status": made.status})
    else:
        out.line((f"{made.id} is here now, {made.status}", "green"))
    return OK
