"""Every command of the parser with arguments that fit it, so that a new command is in these tests by itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from perdure.cli.parser import build


def parsers() -> dict[str, argparse.ArgumentParser]:
    [commands] = [action for action in build()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


def lines(values: Mapping[str, str]) -> dict[str, list[str]]:
    """A line for each command, without the store. `values` are the arguments by their name in the help (`FILE`)."""
    found = {}
    for name, parser in parsers().items():
        line = [name]
        for action in parser._actions:
            if not action.option_strings and action.nargs != "?":
                first = next(iter(action.choices)) if action.choices else "x"
                line.append(values.get(str(action.metavar), first))
        found[name] = [*line, "--yes"] if "--yes" in parser._option_string_actions else line
    return found
