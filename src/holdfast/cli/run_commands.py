"""The commands about runs: their arguments and their help."""

from __future__ import annotations

import argparse

from holdfast.cli import runs, steering
from holdfast.cli.command import Command
from holdfast.runs.rows import STATUSES


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's id")


def _app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", metavar="APP", help="where the functions are: app.py, or a module such as myapp.agents")


def _who(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--who", metavar="NAME", help="who says so (default: the user of this machine)")


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=STATUSES, help="only these")
    parser.add_argument("--function", metavar="NAME", help="only runs of this function")
    parser.add_argument("--queue", metavar="NAME", help="only runs of this queue")
    parser.add_argument("--limit", metavar="N", type=int, default=50, help="at most N (default 50; 0: all)")


def _steps_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--in-doubt", action="store_true", help="only effects whose outcome nobody knows")


def _asks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="only of this run")
    parser.add_argument("--all", action="store_true", help="also those that were answered or closed")


def _tail_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--after", metavar="SEQ", type=int, default=0, help="begin after this entry")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    _app(parser)
    _run(parser)


def _answer_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("step", metavar="STEP", nargs="?", help="which question, if the run has several")
    parser.add_argument("value", metavar="VALUE", help="JSON if it can be, else text")
    parser.add_argument("--text", action="store_true", help="take VALUE as text, whatever it looks like")
    _who(parser)


def _resolve_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("step", metavar="STEP", help="the step in doubt, as `holdfast steps` shows it")
    verdict = parser.add_mutually_exclusive_group(required=True)
    verdict.add_argument("--done", metavar="VALUE", help="it happened, with this result (JSON if it can be, else text)")
    verdict.add_argument("--not-done", action="store_true", help="it did not happen")
    _who(parser)


def _send_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("value", metavar="VALUE", help="JSON if it can be, else text")
    parser.add_argument("--topic", metavar="NAME", default="", help="which hf.receive() takes it")
    parser.add_argument("--key", metavar="KEY", help="the same message with the same key is sent once")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("file", metavar="FILE", help="the file to write")
    parser.add_argument("--keep", action="store_true", help="a copy of a finished run; it stays here too")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a file that export-run wrote")


RUN_COMMANDS = {
    "runs": Command(
        "list the runs, the newest first",
        "With each its status and what it waits for.\n--json prints a line per run.",
        "  holdfast runs\n  holdfast runs --status stuck\n  holdfast runs --json --limit 0 | jq .id",
        _runs_arguments,
        runs.runs,
    ),
    "run": Command(
        "show a run: where it stands, what it waits for, its result",
        "Names what is in doubt and what\nis asked, with the command that settles it.",
        "  holdfast run trip-42\n  holdfast run trip-42 --json | jq .result",
        _run,
        runs.run,
    ),
    "steps": Command(
        "list the steps of a run, in the order they began",
        "With results, errors, attempts and\nwhat is in doubt.",
        "  holdfast steps trip-42\n  holdfast steps trip-42 --in-doubt --json",
        _steps_arguments,
        runs.steps,
    ),
    "asks": Command(
        "list the questions that runs wait for",
        "Oldest first, with the answers they allow.",
        "  holdfast asks\n  holdfast asks trip-42 --all",
        _asks_arguments,
        runs.asks,
    ),
    "answer": Command(
        "answer a question of a run",
        "An answer that the question does not allow is refused,\nwith the reason. Who answered is on record.",
        "  holdfast answer trip-42 LH400\n  holdfast answer trip-42 4 true --who maria",
        _answer_arguments,
        steering.answer,
    ),
    "resolve": Command(
        "settle an effect in doubt",
        "Look at the receiver first: it knows the key that\n`holdfast run` shows.",
        "  holdfast resolve trip-42 5 --done '\"B-1001\"'\n  holdfast resolve trip-42 5 --not-done",
        _resolve_arguments,
        steering.resolve,
    ),
    "send": Command(
        "send a message to a run",
        "It takes it with hf.receive().",
        '  holdfast send trip-42 \'{"gate": "B12"}\' --topic news',
        _send_arguments,
        steering.send,
    ),
    "tail": Command(
        "follow a run until it ends",
        "What is recorded, and what the run emits.",
        "  holdfast tail trip-42\n  holdfast tail trip-42 --json",
        _tail_arguments,
        runs.tail,
    ),
    "cancel": Command(
        "stop a run and its children for good",
        "Nothing is undone: `holdfast rollback` does that.",
        "  holdfast cancel trip-42",
        _run,
        steering.steer,
    ),
    "pause": Command(
        "stop a run at its next step, until it is resumed",
        "No process is needed meanwhile.",
        "  holdfast pause trip-42",
        _run,
        steering.steer,
    ),
    "resume": Command(
        "let a paused or stuck run go on",
        "Or a waiting one look again. A worker takes it up.",
        "  holdfast resume trip-42",
        _run,
        steering.steer,
    ),
    "replay": Command(
        "run a run's code with every step answered from its journal",
        "No body is run and nothing is\nwritten. Stops at the first step that is not recorded.",
        "  holdfast replay app.py trip-42",
        _replay_arguments,
        runs.replay,
    ),
    "check": Command(
        "replay the open runs against new code, before it is deployed",
        "Exits with 1 if one would not\ngo on with it.",
        "  holdfast check app.py\n  holdfast check myapp.agents --json",
        _app,
        runs.check,
    ),
    "export-run": Command(
        "take a run with its history to a file",
        "A parked, paused, stuck or finished one. It does not\nrun here any more, so that it cannot run twice.",
        "  holdfast export-run trip-42 trip-42.run",
        _export_arguments,
        steering.export_run,
    ),
    "import-run": Command(
        "bring a run from a file into this store",
        "With its id, its history and its keys.",
        "  holdfast import-run trip-42.run --store other.db",
        _import_arguments,
        steering.import_run,
    ),
}
