"""`perdure objects`: what of a store is in its object store; move cold data there, or everything back."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from perdure.cli.command import Command
from perdure.cli.readable import parse_since, plural, size
from perdure.cli.render import Output
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

OK = 0


def _seconds(text: str) -> float:
    now = datetime.now(UTC)
    try:
        return max(0.0, (now - parse_since(text, now)).total_seconds())
    except (ValueError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is no time: write 0s, 30m, 12h, 7d or 4w") from None


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ACTION", nargs="?", choices=("list", "out", "back"), default="list")
    parser.add_argument(
        "--cold", metavar="TIME", type=_seconds, help="out: what nobody has written to for so long (7d)"
    )


def objects(args: Namespace, store: Store, out: Output) -> int:
    if args.cold is not None and args.what != "out":
        raise UsageError("--cold goes with `perdure objects out`")
    if args.what == "list":
        found = store.objects()
        if out.json:
            out.document(
                {
                    "place": found.place,
                    "objects": found.objects,
                    "bytes": found.bytes,
                    "let_go": found.let_go,
                    "unfinished": found.unfinished,
                }
            )
            return OK
        out.line((f"{plural(found.objects, 'object')} named by the store", "bold"), (size(found.bytes), ""))
        out.line((f"whether they are at {found.place}, `perdure verify` looks", ""))
        if found.let_go:
            out.line(
                (f"{found.let_go} more that nothing needs now: `compact` removes them when their time is over", "")
            )
        if found.unfinished:
            out.line((f"{found.unfinished} more of moves that are under way or were killed", ""))
        return OK
    with out.progress("moving") as progress:
        if args.what == "out":
            done = store.move_out(cold_s=args.cold, progress=progress)
        else:
            done = store.bring_back(progress=progress)
    if out.json:
        out.document({"objects": done.objects, "bytes": done.bytes, "removed": done.removed})
        return OK
    where = "moved out" if args.what == "out" else "back in the database"
    out.line((f"{plural(done.objects, 'object')} {where}", "green"), (size(done.bytes), ""))
    if done.removed:
        out.line((f"{plural(done.removed, 'object')} that nothing needed removed there", ""))
    return OK


OBJECTS = Command(
    "move cold data to an object store, or back",
    "Name the object store\nwith --objects or $PERDURE_OBJECTS: s3://bucket/prefix, gs://…, az://…, file:///folder. "
    "Credentials come\nfrom the environment. `perdure compact` and workers move cold data out too.\n\n"
    "list  what is there (the default)\n"
    "out   move packs and large results there that nobody has written to for a week\n"
    "back  bring everything back, before the object store is given up",
    "  perdure objects --objects s3://my-bucket/agents\n  perdure objects out --cold 30d\n"
    "  perdure objects back --store agent.db",
    arguments,
    objects,
)
