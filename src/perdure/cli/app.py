"""`main` runs a command and returns its exit code.

Only this module turns errors into exit codes. A user's mistake prints one line on stderr, never a traceback. An error
that is neither Perdure's nor click's is a defect and keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

# Each module adds its commands to a group when it is imported.
from perdure.cli import (
    actions,
    archive,
    backup,
    code,
    create,
    deployments,
    forensics,
    health,
    inspect,
    keys,
    memory,
    memory_copies,
    memory_indexes,
    regions,
    retention,
    roles,
    run_control,
    runs,
    schedules,
    snapshots,
    team_protocols,
    teams,
    thread_control,
    threads,
)
from perdure.cli.base import NO, OK, root
from perdure.cli.text import complain
from perdure.errors import AnswerRefused, NonDeterministic, NotFound, PerdureError, RunMismatch, UsageError

MODULES = (
    *(
        runs,
        run_control,
        code,
        schedules,
        deployments,
        threads,
        thread_control,
        memory,
        memory_copies,
        memory_indexes,
        create,
        health,
        inspect,
        retention,
        backup,
    ),
    *(actions, archive, snapshots, teams, team_protocols, forensics, roles, regions, keys),
)
USAGE, NOT_FOUND, FAILED, INTERRUPTED, PIPE_CLOSED = 2, 3, 4, 130, 141

EXIT_CODES = {
    0: "done",
    1: "the answer is no: a check found problems, code diverges from a journal, or you declined a confirmation",
    2: "a usage error: an unknown command or option, no store named, --yes missing, an answer that is not allowed",
    3: "no such thread, checkpoint, run, step, question, item or snapshot",
    4: "the store cannot be opened, an operation on it failed, or the store or a backup is damaged",
    130: "interrupted (Ctrl-C)",
    141: "the program that read the output closed the pipe",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Commands print in their own words what the library logs, such as a damaged checkpoint that it skipped.
    logging.getLogger("perdure").addHandler(logging.NullHandler())
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except PerdureError as error:
        return _complain(str(error), _code(error))
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "perdure"
        return _complain(f"{error.format_message().rstrip('.')}; see `{path} --help`", USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except click.Abort:  # Ctrl-C at a prompt: the message needs a new line
        sys.stderr.write("\n")
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout again at exit. That flush must not fail.
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
