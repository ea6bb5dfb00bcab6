"""The commands about runs: their arguments and their help."""

from __future__ import annotations

import argparse

from perdure.cli import runs, steering
from perdure.cli.command import Command, count
from perdure.runs.journal.rows import STATUSES


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's id")


def _app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", metavar="APP", help="where the functions are: app.py, or a module such as myapp.agents")


def _who(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--who", metavar="NAME", help="who says so (default: the user of this machine)")


def _text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", action="store_true", help="take VALUE as text, whatever it looks like")


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", metavar="STATUS", choices=STATUSES, help=f"only these: {', '.join(STATUSES)}")
    parser.add_argument("--function", metavar="NAME", help="only runs of this function")
    parser.add_argument("--queue", metavar="NAME", help="only runs of this queue")
    parser.add_argument("--all", action="store_true", help="also the tasks of LangGraph graphs")
    parser.add_argument("--limit", metavar="N", type=count, default=50, help="at most N (default 50; 0: all)")


def _steps_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--in-doubt", action="store_true", help="only effects whose outcome nobody knows")


def _asks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="only of this run")
    parser.add_argument("--all", action="store_true", help="also those that were answered or closed")


def _tail_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--after", metavar="SEQ", type=count, default=0, help="begin after this entry of the journal")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    _app(parser)
    _run(parser)


def _answer_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("step", metavar="STEP", nargs="?", help="which question, if the run has several")
    parser.add_argument("value", metavar="VALUE", help="JSON if it can be, else text: LH400, true, '{\"seat\": 4}'")
    _text(parser)
    _who(parser)


def _resolve_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("step", metavar="STEP", help="the step in doubt, as `perdure steps` shows it")
    verdict = parser.add_mutually_exclusive_group(required=True)
    verdict.add_argument("--done", metavar="VALUE", help="it happened, with this result (JSON if it can be, else text)")
    verdict.add_argument("--not-done", action="store_true", help="it did not happen, and no longer can")
    _text(parser)
    _who(parser)


def _send_arguments(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("value", metavar="VALUE", help="JSON if it can be, else text")
    parser.add_argument("--topic", metavar="NAME", default="", help="which perdure.receive() takes it")
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
        "With each its status and what it waits for. Statuses:\nqueued (a worker may take it), running, waiting (for a "
        "person, a time, a message, a child), paused,\nstuck (somebody must mend something), done, failed, cancelled, "
        "rolled_back, exported.\n--json prints a line per run.",
        "  perdure runs\n  perdure runs --status stuck\n  perdure runs --json --limit 0 | jq .id",
        _runs_arguments,
        runs.runs,
    ),
    "run": Command(
        "show a run: where it stands, what it waits for, its result",
        "Names what is in doubt and what\nis asked, with the command that settles it.",
        "  perdure run trip-42\n  perdure run trip-42 --json | jq .result",
        _run,
        runs.run,
    ),
    "steps": Command(
        "list the steps of a run, in the order they began",
        "With results, errors, attempts and\nwhat is in doubt. Other commands name a step by its number here: 4, or "
        "4.1 in a branch.",
        "  perdure steps trip-42\n  perdure steps trip-42 --in-doubt --json",
        _steps_arguments,
        runs.steps,
    ),
    "asks": Command(
        "list the questions that runs wait for",
        "Oldest first, with the answers they allow. What is in doubt is\namong them: `perdure resolve` settles that, "
        "`perdure answer` all others.",
        "  perdure asks\n  perdure asks trip-42 --all",
        _asks_arguments,
        runs.asks,
    ),
    "answer": Command(
        "answer a question of a run",
        "An answer that the question does not allow is refused,\nwith the reason (exit code 2). Who answered is on "
        "record. A worker goes on with the run, or whoever\nwaits for its result.",
        "  perdure answer trip-42 LH400\n  perdure answer trip-42 4 true --who maria",
        _answer_arguments,
        steering.answer,
    ),
    "resolve": Command(
        "settle an effect in doubt",
        "Its process died, or lost the connection, after the request\nmay have gone out. Look at the receiver first: "
        "it knows the key that `perdure run` shows.\n--done: the run goes on with VALUE as the effect's result. "
        "--not-done: the effect is run.",
        "  perdure resolve trip-42 5 --done '\"B-1001\"'\n  perdure resolve trip-42 5 --not-done --who maria",
        _resolve_arguments,
        steering.resolve,
    ),
    "send": Command(
        "send a message to a run",
        "It takes it with perdure.receive(), in the order sent; until then it is kept.",
        '  perdure send trip-42 \'{"gate": "B12"}\' --topic news\n  perdure send trip-42 stop --key order-7',
        _send_arguments,
        steering.send,
    ),
    "tail": Command(
        "follow a run until it ends",
        "What is recorded, and what the run emits, wherever it runs. A run that\nwaits is followed too: Ctrl-C ends "
        "it.",
        "  perdure tail trip-42\n  perdure tail trip-42 --json | jq .value",
        _tail_arguments,
        runs.tail,
    ),
    "cancel": Command(
        "stop a run and its children for good",
        "Nothing is undone: `perdure rollback` does that. A run\nthat is running is told, and stops at its next step.",
        "  perdure cancel trip-42\n  perdure cancel trip-42 --json",
        _run,
        steering.steer,
    ),
    "pause": Command(
        "stop a run at its next step, until it is resumed",
        "No process is needed meanwhile.",
        "  perdure pause trip-42\n  perdure pause trip-42 --json",
        _run,
        steering.steer,
    ),
    "resume": Command(
        "let a paused or stuck run go on",
        "Or a waiting one look again whether what it waits for has come.\nA worker takes it up.",
        "  perdure resume trip-42\n  perdure resume trip-42 --json",
        _run,
        steering.steer,
    ),
    "replay": Command(
        "run a run's code with every step answered from its journal",
        "No body is run and nothing is\nwritten. Stops at the first step that is not recorded. Exits with 1 if the "
        "code goes another way than\nthe journal says: it was changed, or depends on something that is not recorded.",
        "  perdure replay app.py trip-42\n  perdure replay myapp.agents trip-42 --json | jq .stopped_at",
        _replay_arguments,
        runs.replay,
    ),
    "check": Command(
        "replay the open runs against new code before deploying it",
        "Exits with 1 if one would not\ngo on with it; perdure.patched() lets changed code meet old runs.",
        "  perdure check app.py\n  perdure check myapp.agents --json",
        _app,
        runs.check,
    ),
    "export-run": Command(
        "take a run with its history to a file",
        "A parked, paused, stuck or finished one, with the runs\nthat it has started. It does not run here any more, "
        "so that it cannot run twice.",
        "  perdure export-run trip-42 trip-42.run\n  perdure export-run trip-41 trip-41.run --keep",
        _export_arguments,
        steering.export_run,
    ),
    "import-run": Command(
        "bring a run from a file into this store",
        "With its id, its history and its keys. Once: a file that\nwas imported is not imported again.",
        "  perdure import-run trip-42.run\n  perdure import-run trip-42.run --store postgresql://app@db/app",
        _import_arguments,
        steering.import_run,
    ),
}
