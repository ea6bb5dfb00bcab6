"""The command line: `perdure COMMAND`.

It parses, asks, prints, and turns errors into one line and an exit code. No logic of stores, threads or runs lives
here, and no class named in a store is ever needed: states are read in raw form.
"""

from __future__ import annotations

from perdure.cli.app import main

__all__ = ["main"]
