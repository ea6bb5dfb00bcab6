"""The commands about what stays: compact, retention, pin, unpin, pins, erase."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from dataclasses import asdict
from datetime import datetime, timedelta
from shlex import quote
from typing import Any

from perdure import Erased, Retention, Store
from perdure.cli.changing import agreed
from perdure.cli.command import Command, count
from perdure.cli.looking import NO, OK
from perdure.cli.readable import local, moment, plural, size
from perdure.cli.refs import HELP as REF_HELP
from perdure.cli.refs import existing, resolve
from perdure.cli.render import Output
from perdure.cli.runs import existing_run
from perdure.errors import NotFound, UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def compact(args: Namespace, store: Store, out: Output) -> int:
    with out.progress("compacting") as progress:
        done = store.ops.compact(dry_run=args.dry_run, vacuum=args.vacuum, progress=progress)
    if out.json:
        out.document(_plain(asdict(done)))
        return OK
    would = "would be" if done.dry_run else "were"
    rows = [
        (f"threads that {would} deleted", f"{done.threads:,}"),
        (f"checkpoints that {would} removed", f"{done.checkpoints:,}"),
        (f"finished runs whose journals {would} removed", f"{done.runs:,}"),
        ("threads whose time is over, still needed", f"{done.held:,}"),
        *([("checkpoints beyond keep_last that forks keep", f"{done.shared:,}")] if done.shared else []),
        *([("threads that are damaged: see `perdure verify`", f"{done.damaged:,}")] if done.damaged else []),
    ]
    if not done.dry_run:
        rows += [("checkpoints packed", f"{done.packed:,}"), ("saved by compressing", size(done.saved_bytes))]
    rows += [("in use before", size(done.bytes_before)), ("in use after", size(done.bytes_after))]
    out.table(("what", "how much"), [[(what, ""), (value, "bold")] for what, value in rows])
    for name in done.expired:
        out.line((f"  {name}", "dim"))
    return OK


def retention(args: Namespace, store: Store, out: Output) -> int:
    target: Any = store if args.thread is None else existing(store, args.thread)
    changes = {"ttl": args.ttl, "keep_last": args.keep_last}
    given = {name: value for name, value in changes.items() if value is not None}
    if (args.never or args.inherit) and given:
        raise UsageError("--never and --inherit stand alone: they say it of both")
    if args.inherit and args.thread is None:
        raise UsageError("--inherit is for a thread: `perdure retention THREAD --inherit`")
    if args.never:
        given = dict.fromkeys(changes)
    if given or args.inherit:
        found = target.set_retention(**({} if args.inherit else _kept_fields(target, store, given)))
    else:
        found = target.retention()
    if out.json:
        out.document({"thread": args.thread, **_retention_json(found)})
        return OK
    who = "every thread" if args.thread is None else args.thread
    own = "" if args.thread is None else " (the store's)"
    ttl = "stays for good" if found.ttl is None else f"goes when nobody has written to it for {_span(found.ttl)}"
    last = "all checkpoints" if found.keep_last is None else f"its newest {plural(found.keep_last, 'checkpoint')}"
    out.line((f"{who}: {ttl}{'' if 'ttl' in found.own else own}", ""))
    out.line((f"{who}: keeps {last}{'' if 'keep_last' in found.own else own}", ""))
    return OK


def _span(ttl: timedelta) -> str:
    """`30 days`, and not `30 days, 0:00:00`."""
    return str(ttl).removesuffix(", 0:00:00")


def _kept_fields(target: Any, store: Store, given: dict[str, Any]) -> dict[str, Any]:
    """What was set before and is not named now stays."""
    before = target.retention()
    names = ("ttl", "keep_last") if target is store else before.own
    return {**{name: getattr(before, name) for name in names}, **given}


def _retention_json(found: Retention) -> dict[str, Any]:
    ttl_s = None if found.ttl is None else found.ttl.total_seconds()
    return {"ttl_s": ttl_s, "keep_last": found.keep_last, "own": list(found.own)}


def pin(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    made = thread.pin(resolve(thread, args.ref), name=args.name)
    if out.json:
        out.document({"thread": thread.name, **_plain(asdict(made))})
    else:
        out.line((f"pinned {made.checkpoint} of {thread.name} as {made.name}", "green"))
    return OK


def unpin(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    try:
        thread.unpin(args.name)
    except NotFound:
        raise NotFound(
            f"thread {thread.name!r} has no pin {args.name!r}: `perdure pins {quote(thread.name)}` lists them"
        ) from None
    if out.json:
        out.document({"thread": thread.name, "name": args.name})
    else:
        out.line((f"unpinned {args.name} of {thread.name}", "green"))
    return OK


def pins(args: Namespace, store: Store, out: Output) -> int:
    thread = existing(store, args.thread)
    found = thread.pins()
    if out.json:
        for one in found:
            out.json_line({"thread": thread.name, **_plain(asdict(one))})
        return OK
    if not found:
        out.message(f"{thread.name} has no pins")
        return OK
    rows = [[(one.name, "bold"), (one.checkpoint, ""), (local(one.at), "dim")] for one in found]
    out.table(("name", "checkpoint", "pinned"), rows)
    return OK


def erase(args: Namespace, store: Store, out: Output) -> int:
    if (args.thread is None) == (args.run is None):
        raise UsageError("erase what? A thread: `perdure erase THREAD`, or a run: `perdure erase --run ID`")
    if args.run is not None and (args.checkpoint is not None or args.forks):
        raise UsageError("--checkpoint and --forks are for a thread")
    if args.run is not None:
        existing_run(store, args.run)
        question = f"Erase run {args.run!r} with all that is known of it, and every byte of it?"
        erased = store.ops.erase_run(args.run, full=args.full) if _sure(args, out, question) else None
    else:
        thread = existing(store, args.thread)
        if args.checkpoint is not None:
            one = resolve(thread, args.checkpoint)
            question = f"Erase checkpoint {one.id} (step {one.step}) of {args.thread!r}, and every byte of it?"
            erased = thread.erase(one, full=args.full) if _sure(args, out, question) else None
        else:
            question = f"Erase thread {args.thread!r} and all its history, and every byte of it?"
            sure = _sure(args, out, question)
            erased = store.ops.erase(thread, forks=args.forks, full=args.full) if sure else None
    if erased is None:
        return NO
    _tell(erased, out)
    return OK


def _sure(args: Namespace, out: Output, question: str) -> bool:
    return agreed(args, out, f"{question} This cannot be undone.")


def _tell(erased: Erased, out: Output) -> None:
    if out.json:
        out.document(_plain(asdict(erased)))
        return
    names = ", ".join((*erased.threads, *erased.runs))
    what = f"{names}: {plural(erased.checkpoints, 'checkpoint')}" if not erased.runs else f"run {names}"
    out.line((f"erased {what}" if names else f"erased {plural(erased.checkpoints, 'checkpoint')}", "green"))
    out.line(("what may still hold it:", ""))
    for told in erased.may_remain:
        out.line((f"  - {told}", "dim"))


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: moment(value) if isinstance(value, datetime) else list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }


# --- their arguments


def _duration(text: str) -> timedelta:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    try:
        if found is None or not (made := timedelta(seconds=float(found[1]) * _SECONDS[found[2]])):
            raise OverflowError
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 45s, 30m, 2h, 30d or 8w") from None
    return made


def _at_least_one(text: str) -> int:
    if (given := count(text)) < 1:
        raise argparse.ArgumentTypeError("keep at least 1")
    return given


def _thread(parser: argparse.ArgumentParser, **options: Any) -> None:
    parser.add_argument("thread", metavar="THREAD", help="the thread's name", **options)


def _compact_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and change nothing")
    parser.add_argument("--vacuum", action="store_true", help="give free space back: SQLite rewrites the file")


def _retention_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser, nargs="?")
    parser.add_argument("--ttl", metavar="TIME", type=_duration, help="delete what nobody has written to for so long")
    parser.add_argument("--keep-last", metavar="N", type=_at_least_one, help="how many of the newest checkpoints stay")
    parser.add_argument("--never", action="store_true", help="keep everything for good")
    parser.add_argument("--inherit", action="store_true", help="of a thread: as the store says")


def _pin_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("ref", metavar="REF", nargs="?", help=f"{REF_HELP} (default: head)")
    parser.add_argument("--name", metavar="NAME", required=True, help="what the pin is called")


def _unpin_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("--name", metavar="NAME", required=True, help="which pin")


def _erase_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser, nargs="?")
    parser.add_argument("--run", metavar="ID", help="a finished run instead of a thread")
    parser.add_argument("--checkpoint", metavar="REF", help=f"only this checkpoint: {REF_HELP}")
    parser.add_argument("--forks", action="store_true", help="the thread's forks too, which hold its history")
    parser.add_argument("--full", action="store_true", help="PostgreSQL: rewrite the tables; nobody can use them then")
    parser.add_argument("--yes", action="store_true", help="do not ask")


KEEPING_COMMANDS = {
    "compact": Command(
        "remove what retention says, pack what stays",
        "Deletes threads that have expired, removes\ncheckpoints beyond --keep-last and the journals of old finished "
        "runs, and packs the rest. What a pin, a fork,\na graph or an unfinished run needs stays. Workers do it daily.",
        "  perdure compact --dry-run\n  perdure compact\n  perdure compact --vacuum --json",
        _compact_arguments,
        compact,
    ),
    "retention": Command(
        "show or set how long threads and checkpoints stay",
        "Of the whole tenant, or of one THREAD,\nwhose own setting goes before it. `perdure compact` acts on it.",
        "  perdure retention\n  perdure retention --ttl 30d --keep-last 100\n  perdure retention alice-001 --never",
        _retention_arguments,
        retention,
    ),
    "pin": Command(
        "keep a checkpoint whatever retention says",
        "A thread with a pin does not expire.",
        "  perdure pin alice-001 --name before-the-move\n  perdure pin alice-001 @12 --name good",
        _pin_arguments,
        pin,
    ),
    "unpin": Command(
        "take a pin back",
        "What it held goes when retention says so.",
        "  perdure unpin alice-001 --name good\n  perdure unpin alice-001 --name good --json",
        _unpin_arguments,
        unpin,
    ),
    "pins": Command(
        "list the pins of a thread",
        "--json prints a line per pin.",
        "  perdure pins alice-001\n  perdure pins alice-001 --json",
        _thread,
        pins,
    ),
    "erase": Command(
        "erase a thread, a checkpoint or a run, with every byte",
        "Removes it from the store's files too,\nwhich SQLite rewrites for it; pins do not hold it. Says what may "
        "still hold it, such as backups. Asks first on\na terminal; elsewhere it needs --yes.",
        "  perdure erase alice-001\n  perdure erase alice-001 --checkpoint @12 --yes\n"
        "  perdure erase --run trip-42 --yes --json",
        _erase_arguments,
        erase,
    ),
}
