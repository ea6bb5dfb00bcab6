"""From a URL to a driver. The PostgreSQL driver, and psycopg with it, is imported only when it is asked for."""

from __future__ import annotations

import os
from typing import Any

from holdfast.errors import UsageError
from holdfast.storage.program import Driver

_POSTGRES = ("postgresql://", "postgres://")
_HINT = 'a path such as "agent.db", ":memory:", or "postgresql://user@host/database"'


def open_driver(url: str | os.PathLike[str], **options: Any) -> Driver:
    """A driver for a path, `sqlite:///path`, `:memory:` or `postgresql://…`."""
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"a store's URL is {_HINT}, not {url!r}")
    try:
        if is_postgres(text):
            from holdfast.storage.postgres import PostgresDriver

            return PostgresDriver(text, **options)
        from holdfast.storage.sqlite import SqliteDriver

        return SqliteDriver(sqlite_path(text), **options)
    except TypeError as error:
        _, unexpected, option = str(error).partition("unexpected keyword argument ")
        if unexpected:
            kind = "PostgreSQL" if is_postgres(text) else "SQLite"
            raise UsageError(f"open(): {option} is not an option of {kind} stores") from error
        raise


def is_postgres(url: str) -> bool:
    return url.startswith(_POSTGRES)


def need_postgres() -> None:
    """Raise OpenError, which says what to install, if there is no driver for PostgreSQL."""
    import holdfast.storage.postgres  # noqa: F401


def sqlite_path(url: str) -> str:
    """The path that a URL means for SQLite."""
    if url == ":memory:":
        return url
    if url.startswith("sqlite://"):
        rest = url.removeprefix("sqlite://")
        if not rest.startswith("/"):
            raise UsageError(f"{url!r} names no file: sqlite:///relative.db or sqlite:////absolute.db")
        from urllib.parse import unquote  # imported late: hardly ever needed

        path = unquote(rest[1:])
        if not path:
            raise UsageError(f"{url!r} names no file: {_HINT}")
        return path
    scheme, separator, _ = url.partition("://")
    if separator:
        raise UsageError(f"no driver for {scheme}:// URLs; a store's URL is {_HINT}")
    return url
