"""The command line: `perdure COMMAND`.

Commands parse arguments, call the library, print results, and turn errors into one line and an exit code. No logic of
stores, threads or runs lives here. Commands read states in raw form, so they need none of the user's classes.
"""

from __future__ import annotations

from perdure.cli.app import main

__all__ = ["main"]
