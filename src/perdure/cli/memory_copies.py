"""The commands that copy items of memory as lines of JSON: `perdure memory export`, `perdure memory import`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import click

from perdure.cli.base import Invocation, command, memory_group, with_store
from perdure.cli.parameters import Labels, namespace, namespace_text
from perdure.cli.text import plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.memory.copies import Form


@command(
    memory_group,
    "Control",
    "perdure memory export users/alice > alice.jsonl\nperdure memory export users/alice | jq .value",
)
@click.argument("labels", metavar="NAMESPACE", type=namespace)
@with_store
def export(cli: Invocation, store: Store, labels: Labels) -> None:
    """Print the items of a namespace and of those below it, a JSON document per line.

    Histories and vectors are left out: `perdure store backup` copies everything.
    """
    for line in store.memory(*labels).export_lines():
        cli.json_line(json.loads(line))


@command(
    memory_group,
    "Control",
    "perdure memory import users/alice alice.jsonl\nperdure memory import / mem0.json --form mem0",
)
@click.argument("labels", metavar="NAMESPACE", type=namespace)
@click.argument("file")
@click.option(
    "--form",
    type=click.Choice(["perdure", "items", "mem0"]),
    default="perdure",
    show_default=True,
    help="perdure: of `memory export`; items: namespace, key, value, as of LangGraph's stores; mem0: of its get_all.",
)
@with_store
def import_(cli: Invocation, store: Store, labels: Labels, file: str, form: str) -> None:
    """Put the items of a file below a namespace.

    The file has an item per line; one of mem0 may also be one document. If a line cannot be read, nothing is imported.
    Items that are there with the same content stay as they are, so you may repeat the command. The file - is standard
    input.
    """
    try:
        with click.open_file(file, encoding="utf-8") as source:
            text = source.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8: {error}") from error
    lines: list[Any] = text.splitlines()
    if form == "mem0":
        with suppress(ValueError):  # it has a line per memory
            lines = [json.loads(text)]
    count = store.memory(*labels).import_lines(lines, form=cast("Form", form))
    cli.result(f"{plural(count, 'item')} imported", namespace=namespace_text(labels), imported=count)
