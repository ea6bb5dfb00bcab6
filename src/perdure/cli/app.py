"""`main`: from an argument list to an exit code.

The one place where errors become exit codes. A user's mistake is one line on stderr and never a traceback; an error
that is not Perdure's is a defect and keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from perdure.cli.opening import open_existing, store_url
from perdure.cli.ordering import ordered
from perdure.cli.parser import build
from perdure.cli.render import Output, complain
from perdure.errors import AnswerRefused, NonDeterministic, NotFound, PerdureError, RunMismatch, UsageError

NO, USAGE, NOT_FOUND, FAILED, INTERRUPTED, PIPE_CLOSED = 1, 2, 3, 4, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code; `--help` and `--version` exit by themselves, as in argparse."""
    # What the library logs (a damaged checkpoint that was passed over) the commands say in their own words.
    logging.getLogger("perdure").addHandler(logging.NullHandler())
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except PerdureError as error:
        complain(str(error))
        return _code(error)
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has enough. Python flushes stdout once more at exit, which must not fail then.
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None:
            complain(f"{error.filename}: {error.strerror}")
            return FAILED
        complain(f"the output cannot be written: {error.strerror or error}")
        _discard_output()
        return FAILED


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = build()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    args, rest = parser.parse_known_args(ordered(given, parser))
    if rest:  # argparse itself names no command here
        raise UsageError(f"unrecognized arguments: {' '.join(rest)}; see `perdure {args.command} --help`")
    if args.command is None:
        parser.print_help()
        return 0
    args.store = store_url(args) if args.wants_store else args.store
    out = Output(json=args.json, color=not args.no_color)
    # With --json nothing else may come out there: what an app prints goes to stderr.
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        return _handled(args, out)


def _handled(args: Namespace, out: Output) -> int:
    code: int
    if not args.opens:
        code = args.handler(args, None, out)
        return code
    with open_existing(args) as store:
        code = args.handler(args, store, out)
    return code


def _code(error: PerdureError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, NonDeterministic):
        return NO
    return USAGE if isinstance(error, UsageError | AnswerRefused | RunMismatch) else FAILED
