"""Writes docs/reference/cli.md from the commands and their help: `python docs/generate_cli.py`."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from perdure.cli.app import EXIT_CODES
from perdure.cli.base import Command, command_names, common_options, root

PAGE = Path(__file__).parent / "reference" / "cli.md"

INTRODUCTION = """\
# The command line

<!-- Written by docs/generate_cli.py. Edit that file, or the help of the commands. -->

This page lists every command of `perdure`, with its options and examples. The commands inspect and operate a store:
threads with their checkpoints, runs of durable functions with their steps, and long-term memory. They need none of your
classes. `perdure store create URL` creates a store, and so does an import. All other commands refuse a path that does
not exist.

Commands print results to stdout, and messages, questions and progress to stderr. Tables show local times, JSON shows
UTC. Control characters are escaped, so stored text cannot steer your terminal. A command that removes something asks
for confirmation. Without a terminal it needs `--yes`.

With `--json`, stdout has JSON and nothing else. These commands print a document per line: those with a plural name
(`runs`, `thread pins`), `log`, `check`, `run tail`, `memory search`, `memory get --history`, `snapshot diff`, `snapshot
incident` and `audit`. All others print one document. Values that JSON cannot hold become text: times in ISO form, bytes
as `<3 bytes: 6162ff>` (the first 32), `nan` and `inf`. Tuples and sets become lists. Your classes become
`{"<type>": "travel.Plan", …}`.

A `VALUE` is read as JSON if it is valid JSON, and as text otherwise: `LH400`, `true`, `'{"seat": 4}'`. Put `--` before
a value that begins with a dash.

Write a `NAMESPACE` of memory as labels with slashes between them: `users/alice`. `/` means everything. In a label,
write `%2F` for a slash and `%25` for a percent sign.
"""

CHECKPOINTS = """\
## How to name a checkpoint

Commands that take a `REF` accept these forms:

| REF | which checkpoint |
|---|---|
| `0s852p2dtw2en` | the one with this id |
| `head` | the newest |
| `head~3`, `head~` | 3 before it, 1 before it; also `@12~3` and `0s852p2dtw2en~3` |
| `@12` | step 12 on the branch that leads to the head |
| `1f1e1546-0222-6b9e-8001-f399cc60d864` | in a LangGraph thread: the one with this `checkpoint_id`, in full |
"""


def page() -> str:
    """docs/reference/cli.md."""
    with click.Context(root, info_name="perdure") as ctx:
        commands = command_names(root)
        parts = [INTRODUCTION, _table_of_commands(commands), _common(ctx), CHECKPOINTS, _exit_codes()]
        parts += [_command(name, command, ctx) for name, command in commands.items()]
    return "\n".join(parts)


def _table_of_commands(commands: dict[str, Command]) -> str:
    rows = [
        f"| [`{name}`](#perdure-{name.replace(' ', '-')}) | {command.get_short_help_str(200)} |"
        for name, command in commands.items()
    ]
    return "\n".join(["| command | |", "|---|---|", *rows, ""])


def _common(ctx: click.Context) -> str:
    head = "## Options of all commands\n\nWrite them before or after the command.\n"
    return "\n".join([head, *_parameters(common_options(), ctx), ""])


def _exit_codes() -> str:
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(["## Exit codes\n", "| code | meaning |", "|---|---|", *rows, ""])


def _command(name: str, command: Command, parent: click.Context) -> str:
    with click.Context(command, info_name=name, parent=parent) as ctx:
        own = command.own_params
        usage = " ".join(["perdure", name, *command.collect_usage_pieces(ctx)])
        parts = [f"## `perdure {name}`\n", f"`{usage}`\n", inspect.cleandoc(command.help or ""), ""]
        parts += _parameters(own, ctx)
    return "\n".join([*parts, *([""] if own else []), "```sh", *command.examples, "```", ""])


def _parameters(params: list[click.Parameter], ctx: click.Context) -> list[str]:
    records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if not records:
        return []
    rows = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in records]
    return ["| parameter | meaning |", "|---|---|", *rows]


if __name__ == "__main__":
    PAGE.write_text(page())
