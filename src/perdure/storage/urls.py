"""Choose and open the driver for a URL. The PostgreSQL driver and psycopg are imported only when a URL needs them.

A PostgreSQL URL may hold a password. It is never taken for a file name, and messages show only `redacted(url)`.
"""

from __future__ import annotations

import os
import re
from typing import Any

from perdure.errors import UsageError
from perdure.storage.program import Driver

# Matches a URL or a libpq connection string (host=… dbname=…). Misspelt URLs match too, because they may hold a
# password: postgresql:/…, user:password@host/database, quotes or a blank in front. The patterns here are strings, so
# that they are compiled on first use, not when Perdure is imported.
_POSTGRES = (
    r"(?is)postgres(?:ql)?:|.*postgres(?:ql)?:/|[^/\s:@]+:[^/\s]*@[^/\s]+/|(?:.*[\s;])?password\s*=|\s*(?:host|hostaddr|port|dbname|user"
    r"|passfile|service|sslmode|options|application_name|connect_timeout|target_session_attrs)\s*="
)
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.:-]*"
# A password may hold blanks, quotes, and an @ that should have been written as %40. So these mask too much rather than
# too little.
_IN_URL = r"(?i)((?:://|postgres(?:ql)?:/?)[^\s:/?#@]*:)[^@]*@(?:\S*@)?"
_IN_STRING = r"(?is)(passw(?:or)?d\s*=\s*|pwd\s*=\s*)(?:'.*'|'.*|(?:[^\s&\\]|\\.)*)"
_HINT = 'a path such as "agent.db", ":memory:", or "postgresql://user@host/database"'


def open_driver(url: str | os.PathLike[str], **options: Any) -> Driver:
    """Open a driver for a path, `sqlite:///path`, `:memory:`, `postgresql://…` or `host=… dbname=…`."""
    from perdure.storage.prepared import remembered  # late: commands look at URLs before they open one

    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"a store's URL is {_HINT}, not {redacted(repr(url))}")
    try:
        if is_postgres(text):
            from perdure.storage.postgres.driver import PostgresDriver

            return remembered(PostgresDriver(text, **options))
        from perdure.storage.sqlite.driver import SqliteDriver

        return remembered(SqliteDriver(sqlite_path(text), **options))
    except TypeError as error:
        _, unexpected, option = str(error).partition("unexpected keyword argument ")
        if unexpected:
            kind = "PostgreSQL" if is_postgres(text) else "SQLite"
            raise UsageError(f"open(): no option {option} for {kind}; help(perdure.open) lists them") from error
        raise


def is_postgres(url: str | os.PathLike[str]) -> bool:
    """Return whether this is a PostgreSQL URL or a libpq connection string."""
    return re.match(_POSTGRES, os.fspath(url)) is not None


def redacted(text: str) -> str:
    """Mask the passwords of all URLs and connection strings in a text, for messages."""
    return re.sub(_IN_STRING, r"\1***", re.sub(_IN_URL, r"\1***@", text))


def refuse_hdfs(place: str) -> None:
    """Raise UsageError if a place is in HDFS."""
    if place.startswith(("hdfs://", "webhdfs://")):
        raise UsageError(
            f"{redacted(place)!r}: HDFS is not supported. Keep the store on a local disk, and write copies to an "
            "object store, or to a local file for `hdfs dfs -put`"
        )


def need_postgres() -> None:
    """Raise OpenError, which says what to install, if the PostgreSQL driver cannot be imported."""
    import perdure.storage.postgres.driver  # noqa: F401


def sqlite_path(url: str | os.PathLike[str]) -> str:
    """Return the file path of a path or an `sqlite://` URL. Raise UsageError if SQLite cannot open such a name."""
    text = os.fspath(url)
    path = _path(text)
    if "\0" in path:
        raise UsageError(f"{redacted(text)!r} cannot be a file: it holds a NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{redacted(text)!r} cannot be a file: SQLite wants names in UTF-8; rename it") from None
    return path


def _path(url: str) -> str:
    if url.startswith("sqlite://"):
        from urllib.parse import unquote  # imported late: rarely needed

        path = url.removeprefix("sqlite://")
        if not path.startswith("/") or len(path) == 1:
            raise UsageError(f"{redacted(url)!r} names no file: sqlite:///relative.db or sqlite:////absolute.db")
        return unquote(path[1:])
    refuse_hdfs(url)
    scheme, separator, _ = url.partition("://")
    if separator:  # the message does not show the URL: it may hold a password
        kind = f"{scheme}://" if re.fullmatch(_SCHEME, scheme) else "such"
        raise UsageError(f"no driver for {kind} URLs; a store's URL is {_HINT}, without quotes or blanks around it")
    return url
