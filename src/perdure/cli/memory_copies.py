"""The commands that copy items of memory as lines of JSON: `perdure memory export`, `perdure memory import`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, cast

import click

from perdure.cli.base import Invocation, command, memory_group, with_store
from perdure.cli.parameters import Labels, namespace, namespace_text
from perdure.cli.text import plural

if TYPE_CHECKING:
    from perdure import Store
    from perdure.memory.copies import Form


@command(
    memory_group,
    "Control",
    "perdure memory export users/alice alice.jsonl\nperdure memory export users/alice - | jq .value",
)
@click.argument("labels", metavar="NAMESPACE", type=namespace)
@click.argument("file", type=click.File("w", encoding="utf-8"))
@with_store
def export(cli: Invocation, store: Store, labels: Labels, file: IO[str]) -> None:
    """Write the items of a namespace and of those below it to a file, as lines of JSON.

    The file - is standard output. Histories and vectors are not written: `perdure store backup` copies everything.
    """
    lines = store.memory(*labels).export_lines()
    file.writelines(f"{line}\n" for line in lines)
    cli.message(f"{plural(len(lines), 'item')} of {namespace_text(labels)} exported")


@command(
    memory_group,
    "Control",
    "perdure memory import users/alice alice.jsonl\nperdure memory import / mem0.json --form mem0",
)
@click.argument("labels", metavar="NAMESPACE", type=namespace)
@click.argument("file", type=click.File("r", encoding="utf-8", lazy=True))
@click.option(
    "--form",
    type=click.Choice(["perdure", "items", "mem0"]),
    default="perdure",
    show_default=True,
    help="perdure: of `memory export`; items: namespace, key, value, as of LangGraph's stores; mem0: of its get_all.",
)
@with_store
def import_(cli: Invocation, store: Store, labels: Labels, file: IO[str], form: str) -> None:
    """Put the items of a file below a namespace.

    The file has an item per line; one of mem0 may also be one document. If a line cannot be read, nothing is imported.
    Items that are there with the same content stay as they are, so you may repeat the command.
    """
    text = file.read()
    lines: list[Any] = text.splitlines()
    if form == "mem0":
        with suppress(ValueError):  # it has a line per memory
            lines = [json.loads(text)]
    count = store.memory(*labels).import_lines(lines, form=cast("Form", form))
    cli.result(f"{plural(count, 'item')} imported", namespace=namespace_text(labels), imported=count)
