"""The command that creates a store."""

from __future__ import annotations

import click

from perdure.cli.base import Invocation, command, store_group
from perdure.errors import UsageError


@command(
    store_group,
    "State of the store",
    "perdure store create agent.db\nperdure store create postgresql://owner@db/app --schema agents",
)
@click.argument("url", required=False)
@click.pass_obj
def create(cli: Invocation, url: str | None) -> None:
    """Create a store, or bring an existing one up to date.

    URL is a path or postgresql://user@host/database; by default the store that --store or $PERDURE_STORE names. The
    user of PostgreSQL must be allowed to create the schema (--schema, by default perdure). The store is encrypted if
    $PERDURE_KEYS names a key file. The content of an existing store stays as it is.
    """
    from perdure.storage.urls import redacted

    if cli.tenant is not None:
        raise UsageError("a store is created for all tenants: leave out --tenant")
    if url is not None and cli.store is not None:
        raise UsageError("name the store once: as URL, or by --store")
    url = cli.url if url is None else url
    cli.open(url, create=True).close()
    cli.result(f"the store at {url} is ready", url=redacted(url))
