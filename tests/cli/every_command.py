"""Every command with arguments that fit it, so that a new command is in these tests by itself."""

from __future__ import annotations

from collections.abc import Mapping

import click

from perdure.cli.base import Command, command_names, root


def commands() -> dict[str, Command]:
    """All commands by their full names: `runs`, `run show`."""
    return command_names(root)


def arguments(command: Command) -> list[click.Argument]:
    return [param for param in command.params if isinstance(param, click.Argument)]


def options(command: Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


def lines(values: Mapping[str, str]) -> dict[str, list[str]]:
    """A line for each command, without the store. `values` are the arguments by their name in the help (`FILE`)."""
    found = {}
    for name, command in commands().items():
        line = name.split()
        for argument in arguments(command):
            if argument.required or argument.nargs == -1:
                line.append(values.get(str(argument.metavar or argument.name).upper(), "x"))
        found[name] = [*line, "--yes"] if any("--yes" in option.opts for option in options(command)) else line
    return found
