"""The command that serves the web inspector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, root, sqlite_file
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

_PAGE_BYTES = 512  # of SQLite, at least: a store's file is a multiple of it


@command(
    root,
    "Stores",
    "perdure inspect\nperdure inspect backup.db --read-only\n"
    "perdure inspect --host 0.0.0.0 --allow-host agents.example.com --who-header X-Forwarded-User",
)
@click.argument("url", metavar="[STORE]", required=False)
@click.option("--port", metavar="N", type=click.IntRange(0, 65_535), default=8765, help="The port (0: a free one).")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Listen here; others than this machine can ask.")
@click.option(
    "--allow-host", "allow_hosts", metavar="NAME", multiple=True,
    help="A name, with its port if there is one, by which browsers reach the inspector (may be repeated).",
)  # fmt: skip
@click.option("--root-path", metavar="PATH", default="", help="The prefix under which a proxy serves it: /perdure.")
@click.option("--read-only", is_flag=True, help="Show, and change nothing; the database refuses writes, too.")
@click.option("--all-tenants", is_flag=True, help="Show every tenant of the store.")
@click.option("--reveal", is_flag=True, help="Show values under keys that look secret.")
@click.option(
    "--who-header", metavar="NAME", help="The header in which a proxy says who acts (default: your login name)."
)
@click.pass_obj
def inspect(
    cli: Invocation,
    url: str | None,
    port: int,
    host: str,
    allow_hosts: tuple[str, ...],
    root_path: str,
    read_only: bool,
    all_tenants: bool,
    reveal: bool,
    who_header: str | None,
) -> None:
    """Serve web pages that show a store, answer questions and settle doubts.

    STORE is a store, a backup or a bundle; the last is shown as its snapshot was. Prints a link with a token: its
    holder can read and change the store. Only this machine can reach it, unless --host and --allow-host say otherwise.
    Set --who-header only behind a proxy that always sets this header itself. Needs the extra `inspect`.
    """
    from perdure.inspector.server import serve
    from perdure.inspector.view import Settings

    cli.store = url or cli.store
    prefix = f"/{root_path.strip('/')}" if root_path.strip("/") else ""
    if prefix and not all(part and part.replace("-", "").replace("_", "").isalnum() for part in prefix[1:].split("/")):
        raise UsageError(f"--root-path {root_path}: a path of letters, digits, - and _, such as /perdure")
    path = sqlite_file(cli.url)
    is_bundle = path is not None and _is_bundle(path)
    settings = Settings(
        name=_name(cli.url),
        store_options=_store_options(cli, path),
        read_only=read_only or is_bundle,
        all_tenants=all_tenants,
        reveal=reveal,
        root_path=prefix,
        who_header=who_header,
    )
    with _opened(cli, is_bundle, read_only) as store:
        serve(store, settings, host=host, port=port, allow_hosts=allow_hosts)


@contextmanager
def _opened(cli: Invocation, is_bundle: bool, read_only: bool) -> Iterator[Store]:
    from perdure.ops import open_bundle

    if is_bundle:
        tenant = {} if cli.tenant is None else {"tenant": cli.tenant}
        with open_bundle(cli.url, **cli.options(cli.url), **tenant) as snapshot:
            yield snapshot.store
    else:
        with cli.open(read_only=read_only) as store:
            yield store


def _is_bundle(path: str) -> bool:
    """Return whether a file is a bundle: behind its pages stands a line of JSON."""
    if not os.path.isfile(path) or os.path.getsize(path) % _PAGE_BYTES == 0:
        return False
    with open(path, "rb") as file:
        return file.read(15) == b"SQLite format 3"


def _name(url: str) -> str:
    from perdure.storage.urls import is_postgres, redacted

    return redacted(url).partition("?")[0] if is_postgres(url) else os.path.basename(sqlite_file(url) or url)


def _store_options(cli: Invocation, path: str | None) -> tuple[str, ...]:
    """Return the options that commands need to reach the same store and tenant. A URL may have a password."""
    store = () if cli.store is None else ("--store", "URL" if path is None else os.path.abspath(path))
    schema = () if cli.schema is None else ("--schema", cli.schema)
    tenant = () if cli.tenant is None else ("--tenant", cli.tenant)
    return (*store, *schema, *tenant)
