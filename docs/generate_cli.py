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

`perdure` inspects and operates a store: threads with their checkpoints, runs of durable functions with their steps,
and long-term memory. It needs none of your classes. `perdure store create URL` makes a store, and so does an import;
elsewhere a typo in a path is an error, not a new file.

Results go to stdout; messages, questions and progress bars to stderr. Times in tables are local, in JSON UTC. Control
characters are shown as escapes, so that a stored text cannot steer your terminal. A command that removes something
asks first on a terminal, and needs `--yes` elsewhere.

With `--json` stdout has JSON and nothing else. Lists are a document per line: commands with a plural name
(`runs`, `thread pins`), `log`, `check`, `run tail`, `memory search`, `memory get --history`, `snapshot diff`, `snapshot
incident` and `audit`. Everything else is one document. Values
that JSON cannot hold become text: times in ISO form, bytes as `<3 bytes: 6162ff>` (the first 32), `nan` and
`inf`. Tuples and sets become lists, and your classes `{"<type>": "travel.Plan", …}`.

A `VALUE` is JSON if it can be, and text otherwise: `LH400`, `true`, `'{"seat": 4}'`. What begins with a dash goes
after `--`.

A `NAMESPACE` of memory is its labels with slashes between them, `users/alice`, or `/` for everything. In a label `%2F`
stands for a slash and `%25` for a percent sign.
"""

CHECKPOINTS = """\
## Naming a checkpoint

Wherever a command takes a `REF`:

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
    head = "## Options of all commands\n\nThey may stand before or after the command.\n"
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
