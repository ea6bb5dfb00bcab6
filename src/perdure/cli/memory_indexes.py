"""The commands that index items again, for another embedder or analyzer: `perdure memory reembed`, `reindex`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, memory_group, with_store
from perdure.cli.memory import embedder_option, open_with, scope_argument
from perdure.cli.parameters import Labels, namespace_text
from perdure.cli.text import plural
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store


@command(
    memory_group,
    "Control",
    "perdure memory reembed --embedder local\nperdure memory reembed users --embedder app.py:embed",
)
@scope_argument
@embedder_option
@click.pass_obj
def reembed(cli: Invocation, labels: Labels, embedder: str | None) -> None:
    """Embed the items that have no vector of the embedder.

    Run it after you changed the embedder, or after it failed. Until then, searches find these items by words only.
    After an interruption, run the same command again: it continues.
    """
    if embedder is None:
        raise UsageError("which embedder? Give --embedder local, or --embedder app.py:embed")
    with open_with(cli, embedder) as store, cli.progress("embedding") as progress:
        count = store.memory(*labels).reembed(progress=progress)
    cli.result(f"{plural(count, 'item')} embedded", namespace=namespace_text(labels), embedded=count)


@command(
    memory_group,
    "Control",
    "perdure memory reindex\nperdure memory reindex users/alice --json",
)
@scope_argument
@with_store
def reindex(cli: Invocation, store: Store, labels: Labels) -> None:
    """Cut the items again whose words another analyzer has cut.

    $PERDURE_WORDS names the analyzer (default: english), as `words` of your application's `perdure.open`. Run it after
    you changed that. Until then, each process cuts what it searches for itself. After an interruption, run the same
    command again: it continues.
    """
    with cli.progress("indexing") as progress:
        count = store.memory(*labels).reindex(progress=progress)
    cli.result(f"{plural(count, 'version')} indexed", namespace=namespace_text(labels), indexed=count)
