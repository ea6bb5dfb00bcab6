"""The command line: `holdfast threads | log | show | diff | fork | rollback | verify | prune | delete | stats`.

A face over the public API: it parses, asks, prints, and turns errors into one line and an exit code. No logic of stores
or threads lives here, nothing below `holdfast` and `holdfast.errors` is imported, and no class named in a store is ever
needed: states are read in raw form.
"""

from __future__ import annotations

from holdfast.cli.app import main

__all__ = ["main"]
