"""Scripts and commands in children of a fork server: processes of their own that start no interpreter."""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

from perdure.testing.processes import Say


class _Said(io.TextIOBase):
    """Says every whole line that is printed."""

    def __init__(self, say: Say) -> None:
        self._say, self._rest = say, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)


def script(say: Say, path: str, *arguments: str) -> None:
    """Run a file as `python path arguments` does. Its lines are said."""
    sys.argv = [path, *arguments]
    with redirect_stdout(_Said(say)):
        runpy.run_path(path, run_name="__main__")


def command(say: Say, folder: str, *arguments: str) -> None:
    """Run `perdure arguments` in a folder. Its exit code and what it wrote are said."""
    from perdure.cli import main

    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    say([code, out.getvalue(), err.getvalue()])


def wait(say: Say) -> None:
    """Wait until it is killed."""
    say("here")
    signal.pause()
