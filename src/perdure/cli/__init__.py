"""The command line: `perdure COMMAND`; `cli/app.py` lists the commands.

A face over the library: it parses, asks, prints, and turns errors into one line and an exit code. No logic of stores,
threads or runs lives here, and no class named in a store is ever needed: states are read in raw form. It is the top
layer, and imports from any of those below.
"""

from __future__ import annotations

from perdure.cli.app import main

__all__ = ["main"]
