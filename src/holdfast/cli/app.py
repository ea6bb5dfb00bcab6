"""`main`: from an argument list to an exit code.

The one place where errors become exit codes. A user's mistake is one line on stderr and never a traceback; an error
that is not Holdfast's is a defect and keeps its traceback. A store is only ever opened, never made (but by an import):
a typo must not make a file.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import holdfast
from holdfast.cli.command import objects_option
from holdfast.cli.looking import sqlite_file
from holdfast.cli.parser import build
from holdfast.cli.render import Output, complain
from holdfast.errors import AnswerRefused, HoldfastError, NonDeterministic, NotFound, OpenError, UsageError

DEFAULT_FILE = "agent.db"
NO, USAGE, NOT_FOUND, FAILED, INTERRUPTED, PIPE_CLOSED = 1, 2, 3, 4, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code; `--help` and `--version` exit by themselves, as in argparse."""
    # What the library logs (a damaged checkpoint that was passed over) the commands say in their own words.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except HoldfastError as error:
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
        complain(f"the output cannot be written: {error.strerror or error}")
        _discard_output()
        return FAILED


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = build()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    args.store = store_url(args) if args.wants_store else args.store
    out = Output(json=args.json, color=not args.no_color)
    code: int
    if not args.opens:
        code = args.handler(args, None, out)
        return code
    with _open(args) as store:
        code = args.handler(args, store, out)
    return code


def _code(error: HoldfastError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, NonDeterministic):
        return NO
    return USAGE if isinstance(error, UsageError | AnswerRefused) else FAILED


def store_url(args: argparse.Namespace) -> str:
    """Which store a command is about. Raises UsageError."""
    given: str | None = args.store if args.store is not None else os.environ.get("HOLDFAST_STORE") or None
    if given is not None:
        return given
    if os.path.exists(DEFAULT_FILE):
        return DEFAULT_FILE
    raise UsageError(
        f"which store? Give --store URL, or set HOLDFAST_STORE, or go where there is a file {DEFAULT_FILE}"
    )


def _open(args: argparse.Namespace) -> holdfast.Store:
    path = sqlite_file(args.store)
    if path is not None and not os.path.exists(path):
        raise OpenError(f"there is no store at {path}; check --store or HOLDFAST_STORE")
    options: dict[str, Any] = {"keys": "env"} if os.environ.get("HOLDFAST_KEYS") else {}
    if args.tenant is not None:
        options["tenant"] = args.tenant
    return holdfast.open(args.store, create=False, **options, **objects_option(args))
