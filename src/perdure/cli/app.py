"""The table of commands, and `main`: from an argument list to an exit code.

The one place where errors become exit codes. A user's mistake is one line on stderr and never a traceback; an error
that is neither Perdure's nor click's is a defect and keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click

from perdure.cli.base import NO, OK, LazyGroup, common_options
from perdure.cli.parameters import REF_HELP
from perdure.errors import AnswerRefused, NonDeterministic, NotFound, PerdureError, RunMismatch, UsageError

USAGE, NOT_FOUND, FAILED, INTERRUPTED, PIPE_CLOSED = 2, 3, 4, 130, 141

EXIT_CODES = {
    0: "done",
    1: "the answer is no: problems were found, code diverges from a journal, states differ, a question was declined",
    2: "a usage error: an unknown command or option, no store named, --yes missing, an answer that is not allowed",
    3: "no such thread, checkpoint, path, run, step or question",
    4: "the store cannot be opened, or failed; the store or a backup is damaged",
    130: "interrupted (Ctrl-C)",
    141: "the reader of the output closed it",
}

HELP = f"""Inspect and operate the state of AI agents, in any Perdure store.

The store is --store URL (a path, sqlite:///path, postgresql://user@host/database), else $PERDURE_STORE, else
./agent.db. Every command has --help with examples, and --json.

A checkpoint (REF) is {REF_HELP}. A VALUE is JSON if it can be, else text; one that begins with a dash goes after --."""


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from perdure import __version__

        click.echo(f"perdure {__version__}")
        ctx.exit()


run = LazyGroup(
    "run",
    "Inspect and control one run.",
    {
        "Inspect": {"show": "runs:show_run", "tail": "runs:tail", "replay": "code:replay"},
        "Control": {
            "resolve": "run_control:resolve",
            "send": "run_control:send",
            "pause": "run_control:pause",
            "resume": "run_control:resume",
            "cancel": "run_control:cancel",
            "rollback": "run_control:rollback",
            "fork": "run_control:fork",
        },
        "Remove and move": {
            "delete": "run_control:delete",
            "erase": "run_control:erase",
            "transfer": "transfer:transfer_run",
            "archive": "archive:archive_run",
            "unarchive": "archive:unarchive_run",
        },
    },
)

thread = LazyGroup(
    "thread",
    "Change one thread.",
    {
        "History": {
            "fork": "thread_control:fork",
            "rollback": "thread_control:rollback",
            "verify": "thread_control:verify",
        },
        "Retention": {
            "pin": "thread_control:pin",
            "unpin": "thread_control:unpin",
            "pins": "thread_control:pins",
            "retention": "retention:thread_retention",
            "prune": "thread_control:prune",
        },
        "Remove and move": {
            "delete": "thread_control:delete",
            "erase": "thread_control:erase",
            "transfer": "transfer:transfer_thread",
            "archive": "archive:archive_thread",
            "unarchive": "archive:unarchive_thread",
        },
    },
)

store = LazyGroup(
    "store",
    "Operate a whole store.",
    {
        "State of the store": {
            "health": "health:health",
            "stats": "health:stats",
            "verify": "health:verify",
            "archives": "archive:archives",
        },
        "Retention": {"retention": "retention:store_retention", "compact": "retention:compact"},
        "Backup": {"backup": "backup:backup", "restore": "backup:restore", "repair": "repair:repair"},
        "Access": {"role": "roles:role", "check-role": "roles:check_role"},
        "Migration": {"transfer": "transfer:transfer_store", "import-langgraph": "transfer:import_langgraph"},
    },
)

keys = LazyGroup(
    "keys",
    """Manage the keys of encryption.

    A key file holds a key for each tenant, and only its owner may read it. Name it with --keys or $PERDURE_KEYS; with
    the variable set, all commands open encrypted stores.""",
    {
        "Commands": {
            "new": "keys:new",
            "list": "keys:list_",
            "rotate": "keys:rotate",
            "remove": "keys:remove",
            "forget": "keys:forget",
        },
    },
)

root = LazyGroup(
    "perdure",
    HELP,
    {
        "Runs": {
            "runs": "runs:runs",
            "steps": "runs:steps",
            "questions": "runs:questions",
            "answer": "run_control:answer",
            "run": "app:run",
        },
        "Code": {"worker": "worker:worker", "start": "worker:start", "check": "code:check", "drill": "code:drill"},
        "Threads": {
            "threads": "threads:threads",
            "log": "threads:log",
            "show": "threads:show",
            "diff": "threads:diff",
            "thread": "app:thread",
        },
        "Stores": {"doctor": "health:doctor", "store": "app:store", "keys": "app:keys"},
    },
    params=[
        *common_options(),
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version.",
        ),
    ],
    context_settings={"help_option_names": ["--help"], "max_content_width": 110},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # What the library logs (a damaged checkpoint that was passed over) the commands print in their own words.
    logging.getLogger("perdure").addHandler(logging.NullHandler())
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except PerdureError as error:
        return _complain(str(error), _code(error))
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "perdure"
        return _complain(f"{error.format_message().rstrip('.')}; see `{path} --help`", USAGE)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail then.
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None:
            return _complain(f"{error.filename}: {error.strerror}", FAILED)
        _discard_output()
        return _complain(f"the output cannot be written: {error.strerror or error}", FAILED)


def _run(argv: list[str]) -> int:
    try:
        with root.make_context("perdure", argv) as ctx:
            return root.invoke(ctx) or OK
    except click.exceptions.Exit as finished:
        return finished.exit_code


def _complain(text: str, code: int) -> int:
    from perdure.cli.output import complain

    complain(text)
    return code


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code(error: PerdureError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, NonDeterministic):
        return NO
    return USAGE if isinstance(error, UsageError | AnswerRefused | RunMismatch) else FAILED
