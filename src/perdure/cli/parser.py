"""The commands, their options and their help, as one argparse parser.

Every command has a summary, a description and examples; the page `docs/reference/cli.md` names each of them, which a
test checks by walking this parser. Nothing is opened or printed here, and a usage error is raised, never an exit of
argparse's.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from datetime import UTC, datetime
from typing import Any, NoReturn

from perdure import __version__
from perdure.cli import changing, importing, looking, steering
from perdure.cli.command import Command, count
from perdure.cli.copies import COPY_COMMANDS
from perdure.cli.doctor import DOCTOR
from perdure.cli.drilling import DRILL
from perdure.cli.health import HEALTH
from perdure.cli.keeping import KEEPING_COMMANDS
from perdure.cli.keys import KEYS
from perdure.cli.readable import parse_since
from perdure.cli.refs import HELP as REF_HELP
from perdure.cli.repair import REPAIR
from perdure.cli.roles import ROLES
from perdure.cli.run_commands import RUN_COMMANDS
from perdure.cli.working import START, WORKER
from perdure.errors import UsageError

EXIT_CODES = """\
exit codes:
  0    done
  1    the answer is no: verify, doctor or restore found problems, check or replay that code goes another way, drill
       a defect, diff --exit-code changes; a question was answered no
  2    a usage error: an unknown command or option, no store named, --yes missing, an answer that is not allowed
  3    no such thread, checkpoint, path, run, step or question
  4    the store cannot be opened, or failed; the store or a backup is damaged
  130  interrupted (Ctrl-C); 141: whoever read the output closed it"""

OVERVIEW = f"""\
checkpoints (REF):
  {REF_HELP}

first steps:
  perdure runs                          what runs, waits or is stuck in ./agent.db
  perdure run trip-42                   one of them; `steps`, `asks`, `tail` show more
  perdure worker app.py                 run what is due
  perdure threads                       the threads of ./agent.db
  perdure log alice-001                 the checkpoints of a thread, newest first
  perdure show alice-001                its newest state
  perdure diff alice-001 head~1         what the last step changed

the store: --store URL (a path, sqlite:///path, postgresql://user@host/database), else $PERDURE_STORE, else ./agent.db.
On PostgreSQL it is in the schema --schema NAME, else $PERDURE_SCHEMA, else perdure.
$PERDURE_KEYS: the keys of an encrypted store.
Every command takes --json. `perdure COMMAND --help` has examples.

{EXIT_CODES}"""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a UsageError with one line that helps."""

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"argument COMMAND: invalid choice: (['\"])(.*?)\1 \(choose", message):
            near = difflib.get_close_matches(found[2], COMMANDS, n=1, cutoff=0.6)
            hint = f"did you mean `perdure {near[0]}`?" if near else "`perdure --help` lists them"
            raise UsageError(f"there is no command {found[2]!r}; {hint}")
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build() -> Parser:
    """The parser of `perdure`."""
    parser = Parser(
        prog="perdure",
        usage="perdure COMMAND [arguments and options]",
        description="Look at and arrange the state of AI agents, in any Perdure store.",
        epilog=f"{_listed()}\n\n{OVERVIEW}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"perdure {__version__}")
    _add_common(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="perdure", help=argparse.SUPPRESS)
    for name, command in COMMANDS.items():
        made = commands.add_parser(
            name,
            description=f"{command.summary[0].upper()}{command.summary[1:]}. {command.description}",
            epilog="examples:\n" + command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.arguments(made)
        _add_common(made, argparse.SUPPRESS)
        made.set_defaults(handler=command.run, opens=command.opens, wants_store=command.wants_store)
    return parser


def _listed() -> str:
    """The commands by what they are for, a line each. argparse's own list has no groups."""
    width = max(map(len, COMMANDS))
    return "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)])
        for title, names in GROUPS.items()
    )


def _add_common(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """The options of all commands. After a command they have no default: it would undo what came before it."""
    group = parser.add_argument_group("options of all commands")
    flag = False if default is None else default
    group.add_argument("--store", metavar="URL", default=default, help="the store (or $PERDURE_STORE, or ./agent.db)")
    group.add_argument(
        "--schema", metavar="NAME", default=default, help="PostgreSQL: its schema (or $PERDURE_SCHEMA, or perdure)"
    )
    group.add_argument("--tenant", metavar="NAME", default=default, help="whose threads and runs (default: default)")
    group.add_argument("--json", action="store_true", default=flag, help="print JSON, and nothing else, to stdout")
    group.add_argument("--no-color", action="store_true", default=flag, help="no colours (or set $NO_COLOR)")


# --- the types of arguments


def _positive(text: str) -> int:
    if (given := count(text)) < 1:
        raise argparse.ArgumentTypeError("keep at least 1, or use `perdure delete`")
    return given


def _condition(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _since(text: str) -> datetime:
    try:
        return parse_since(text, datetime.now(UTC))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 45s, 30m, 2h, 3d, 1w or 2026-01-31") from None


# --- the arguments of each command


def _thread(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("thread", metavar="THREAD", help="the thread's name")


def _yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal")


def _threads_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        metavar="KEY=VALUE",
        type=_condition,
        nargs="+",
        action="extend",
        default=[],
        help="only threads whose metadata has this; the value is JSON if it can be, else text",
    )
    parser.add_argument("--since", metavar="TIME", type=_since, help="saved since: 30m, 2h, 3d, 1w or an ISO date")
    parser.add_argument("--limit", metavar="N", type=count, default=50, help="at most N (default 50; 0: all)")


def _log_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("--limit", metavar="N", type=count, default=50, help="at most N (default 50; 0: all)")
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument("--start", metavar="REF", help=f"go back from here, not from the head: {REF_HELP}")
    lines.add_argument("--branches", action="store_true", help="all lines of the thread, merged, newest first")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("ref", metavar="REF", nargs="?", help=f"{REF_HELP}; default: the newest valid checkpoint")
    parser.add_argument("--path", metavar="PATH", help='a part of the state: plan.steps[3].title, limits."gpt-4.1"')
    parser.add_argument("--namespace", metavar="NS", help="a subgraph's line in a LangGraph thread; head is its newest")
    parser.add_argument("--all", action="store_true", help="LangGraph: the whole state as it is stored, nothing cut")


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("before", metavar="A", help=f"from this checkpoint: {REF_HELP}")
    parser.add_argument("after", metavar="B", nargs="?", help="to this one (default: head)")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if anything differs")
    parser.add_argument("--all", action="store_true", help="also fields of messages, and LangGraph's bookkeeping")


def _thread_or_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("thread", metavar="NAME", help="a thread's name, or a run's id")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run", dest="as_run", action="store_true", help="NAME is a run, also if there is such a thread"
    )
    which.add_argument("--thread", dest="as_thread", action="store_true", help="NAME is a thread")


def _fork_arguments(parser: argparse.ArgumentParser) -> None:
    _thread_or_run(parser)
    parser.add_argument(
        "ref", metavar="REF", nargs="?", help=f"where: {REF_HELP} (default: head); of a run: a step (default: its last)"
    )
    parser.add_argument(
        "--name", metavar="NEW", required=True, help="the name of the new thread, the id of the new run"
    )
    parser.add_argument(
        "--keys",
        metavar="new|same",
        choices=("new", "same"),
        help="of a run: are the effects that it does again new to their receivers (new), or answered as before (same)?",
    )
    parser.add_argument(
        "--set", metavar="STEP=VALUE", action="append", help="of a run: another result for a kept step; may be repeated"
    )


def _rollback_arguments(parser: argparse.ArgumentParser) -> None:
    _thread_or_run(parser)
    parser.add_argument("ref", metavar="REF", nargs="?", help=f"back to: {REF_HELP}; a run takes none")
    parser.add_argument("--note", metavar="TEXT", help="why; shown in the log")


def _prune_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("--keep", metavar="N", type=_positive, required=True, help="how many of the newest to keep")
    _yes(parser)


def _delete_arguments(parser: argparse.ArgumentParser) -> None:
    _thread(parser)
    parser.add_argument("--force", action="store_true", help="also if it has pinned checkpoints")
    _yes(parser)


def _delete_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's id")
    _yes(parser)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("thread", metavar="THREAD", nargs="?", help="only this thread (default: the whole tenant)")


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


COMMANDS = {
    "threads": Command(
        "list the threads, the most recently saved first",
        "With each its head, how many steps led\nthere, when it was saved last, and its metadata. "
        "--json prints a line per thread.",
        "  perdure threads\n  perdure threads --where user=alice --since 2h\n"
        "  perdure threads --json --limit 0 | jq .name",
        _threads_arguments,
        looking.threads,
    ),
    "log": Command(
        "list the checkpoints of a thread, newest first",
        "Marks the head, the ends of branches,\nand where lines split. --json prints a line per checkpoint.",
        "  perdure log alice-001\n  perdure log alice-001 --branches --limit 0\n"
        "  perdure log alice-001 --start @12 --limit 5",
        _log_arguments,
        looking.log,
    ),
    "show": Command(
        "show a checkpoint and its state",
        "Needs none of your classes: they are shown as\n"
        '{"<type>": …}. Bytes, times and other values that JSON lacks become text.',
        "  perdure show alice-001\n  perdure show alice-001 head~3 --path messages[-1].content\n"
        "  perdure show alice-001 @12 --json | jq .state",
        _show_arguments,
        looking.show,
    ),
    "diff": Command(
        "compare two checkpoints, path by path",
        "+ was added, - was removed, ~ was changed.\nLong values are cut; --json has them in full.",
        "  perdure diff alice-001 head~1\n  perdure diff alice-001 @3 @9\n"
        "  perdure diff alice-001 @3 --exit-code --json > changes.json",
        _diff_arguments,
        looking.diff,
    ),
    "fork": Command(
        "go on from a checkpoint or a step, in a new thread or run",
        "Copies nothing, and the old one\ndoes not notice. NAME may be a run's id: REF is then the last step that the "
        "fork shares, and a worker\ngoes on with it.",
        "  perdure fork alice-001 --name alice-try\n  perdure fork alice-001 head~3 --name alice-retry\n"
        "  perdure fork trip-42 4 --name trip-43 --keys new --set '4=\"UA88\"'",
        _fork_arguments,
        steering.fork,
    ),
    "rollback": Command(
        "make an old checkpoint the newest; or undo a run",
        "Adds a checkpoint that equals the old one;\nwhat came in between stays in the log. Of a run: its effects are "
        "undone, newest first.",
        '  perdure rollback alice-001 head~1\n  perdure rollback alice-001 @12 --note "the tool had lied"\n'
        "  perdure rollback trip-42",
        _rollback_arguments,
        steering.rollback,
    ),
    "verify": Command(
        "check every hash and every record",
        "Of one thread, or of the whole tenant and the\ndatabase file. Exits with 1 if there is a problem.",
        "  perdure verify\n  perdure verify alice-001\n  perdure verify --json | jq .problems",
        _verify_arguments,
        looking.verify,
    ),
    "prune": Command(
        "remove all but the newest checkpoints of a thread",
        "What a fork needs stays. Asks first\non a terminal; elsewhere it needs --yes.",
        "  perdure prune alice-001 --keep 100\n  perdure prune alice-001 --keep 100 --yes --json",
        _prune_arguments,
        changing.prune,
    ),
    "delete": Command(
        "delete a thread and its history",
        "What a fork of it needs stays. Asks first on a terminal;\nelsewhere it needs --yes.",
        "  perdure delete alice-001\n  perdure delete alice-001 --yes",
        _delete_arguments,
        changing.delete,
    ),
    "delete-run": Command(
        "delete a finished run and its history",
        "Its id is free then. What a fork of it or an unfinished\nparent needs is refused. Asks first on a terminal; "
        "elsewhere it needs --yes.",
        "  perdure delete-run trip-42\n  perdure delete-run trip-42 --yes",
        _delete_run_arguments,
        changing.delete_run,
    ),
    "stats": Command(
        "count threads, checkpoints and bytes",
        "And compare with storing every state in full as JSON.",
        "  perdure stats\n  perdure stats --tenant acme --json",
        _no_arguments,
        looking.stats,
    ),
    **KEEPING_COMMANDS,
    "health": HEALTH,
    **COPY_COMMANDS,
    "import-langgraph": Command(
        "take over the database of a LangGraph checkpointer",
        "SqliteSaver's or PostgresSaver's,\nalso while it is in use: it is only read. Ids, parents, metadata and "
        "pending writes stay as they\nare. Makes the store if there is none. Run again, it continues. Nothing that is "
        "stored is executed.",
        "  perdure import-langgraph checkpoints.sqlite --store agent.db\n"
        "  perdure import-langgraph postgresql://app@db/app --store postgresql://app@db/app --trust myapp.\n"
        "  perdure import-langgraph checkpoints.sqlite --store agent.db --thread alice-001 --thread bob-007",
        importing.arguments,
        importing.import_langgraph,
        opens=False,
    ),
    **RUN_COMMANDS,
    "start": START,
    "worker": WORKER,
    "repair": REPAIR,
    "doctor": DOCTOR,
    "keys": KEYS,
    "roles": ROLES,
    "drill": DRILL,
}

GROUPS = {
    "runs": ("runs", "run", "steps", "asks", "answer", "resolve", "send", "tail"),
    "steering runs": ("pause", "resume", "cancel", "rollback", "fork"),
    "running agents, changing their code": ("start", "worker", "drill", "replay", "check"),
    "threads": ("threads", "log", "show", "diff"),
    "what stays": ("retention", "compact", "pin", "unpin", "pins", "prune", "delete", "delete-run", "erase"),
    "the store": ("doctor", "health", "stats", "verify", "backup", "restore", "repair", "keys", "roles"),
    "moving": ("export", "import", "export-run", "import-run", "import-langgraph"),
}
