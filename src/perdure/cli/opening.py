"""Which store a command is about, and with what it is opened: from the options of all commands or the environment.

A store is only ever opened, never made, unless a command says that it may make one: a typo must not make a file.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import perdure
from perdure.cli.looking import sqlite_file
from perdure.errors import OpenError, UsageError
from perdure.storage.urls import is_postgres

if TYPE_CHECKING:
    from perdure import Store

DEFAULT_FILE = "agent.db"


def store_url(args: Namespace) -> str:
    """Which store a command is about. Raises UsageError."""
    given: str | None = args.store if args.store is not None else os.environ.get("PERDURE_STORE") or None
    if given is not None:
        return given
    if os.path.exists(DEFAULT_FILE):
        return DEFAULT_FILE
    raise UsageError(f"which store? Give --store URL, or set PERDURE_STORE, or go where there is a file {DEFAULT_FILE}")


def options(args: Namespace, url: str) -> dict[str, Any]:
    """What a store at this URL is opened with: its keys, its object store, its schema. Not the tenant."""
    made: dict[str, Any] = {"keys": "env"} if os.environ.get("PERDURE_KEYS") else {}
    return {**made, **schema(args, url)}


def schema(args: Namespace, url: str) -> dict[str, str]:
    """The schema of PostgreSQL that the store is in: --schema, else $PERDURE_SCHEMA. A file has none."""
    if args.schema is not None and not is_postgres(url):
        raise UsageError("--schema is for PostgreSQL, and this store is a file: leave it out")
    name = args.schema if args.schema is not None else os.environ.get("PERDURE_SCHEMA")
    return {"schema": name} if name and is_postgres(url) else {}


def tenant(args: Namespace) -> dict[str, str]:
    """Whose threads and runs: --tenant."""
    return {} if args.tenant is None else {"tenant": args.tenant}


def open_existing(args: Namespace, **more: Any) -> Store:
    """Open the store that a command is about. `more`: further options of `perdure.open`."""
    url = store_url(args)
    path = sqlite_file(url)
    if path is not None and not os.path.exists(path):
        raise OpenError(f"there is no store at {path}; check --store or PERDURE_STORE")
    return perdure.open(url, **{"create": False, **options(args, url), **tenant(args), **more})
