"""Open a store on PostgreSQL: its URL, its connections' settings, its schema and migrations.

Settings are sent as a startup parameter. PgBouncer refuses that: then the role's own `search_path` must lead to the
schema (`ALTER ROLE app SET search_path = perdure`), which is checked. So behind a pooler a store works or refuses to
open. Migrations use transaction-level locks, because a pooler breaks those of sessions.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from typing import Any, Literal

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from perdure.errors import OpenError, UsageError
from perdure.storage.domains import versioned_tables
from perdure.storage.migrate import CREATE_TABLE, Migration, pending
from perdure.storage.postgres.errors import ConnectionTarget, not_opened
from perdure.storage.urls import is_postgres
from perdure.storage.versions_postgres import version_postgres

Durability = Literal["full", "normal", "replicated"]
_SYNCHRONOUS_COMMIT = {"full": "on", "normal": "off", "replicated": "remote_apply"}
SERVER_VERSION_MIN = 150000  # the first with security_invoker views, which snapshots need
_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,59}")  # the schema of snapshots appends "_at"


class Connection(psycopg.Connection[Any]):
    """A blocking connection that a pool owns. Garbage collection closes it, only in the process that opened it."""

    def __del__(self, _warn: Any = None) -> None:
        pass


def parsed(
    url: str, *, schema: str, timeout_s: float, durability: Durability, read_only: bool = False
) -> ConnectionTarget:
    """Return the target of a URL, with the settings of each connection. Messages never show the URL's password."""
    if not _SCHEMA.fullmatch(schema):
        raise UsageError(
            f"a schema's name is up to 60 lower-case letters, digits and _, not starting with pg_: {schema!r}"
        )
    if durability not in _SYNCHRONOUS_COMMIT:
        raise UsageError(f'durability is "full", "normal" or "replicated", not {durability!r}')
    if not timeout_s > 0:
        raise UsageError(f"timeout_s must be positive, not {timeout_s}")
    fields: dict[str, Any] | None = None
    if setting := re.search(r"[?&](schema|currentSchema|search_path)=", url):  # other libraries allow these
        raise OpenError(
            f"the schema is no part of the URL: leave {setting[1]}= out of it, and give it as schema=… (--schema)"
        )
    if is_postgres(url):
        try:
            fields = conninfo_to_dict(url.strip())
        except psycopg.Error:
            pass  # its text quotes the part of the URL that it could not parse, which may be the password
    if fields is None or not _plausible(fields):
        raise OpenError(
            "the URL is not one of PostgreSQL; it looks like postgresql://user:password@host:5432/database, or "
            '"host=localhost dbname=agents user=app". Write @ : / and other special characters of a password in a URL '
            "as %40 %3A %2F"
        )
    timeout_ms = max(1, int(timeout_s * 1000))
    settings = {
        "search_path": schema,
        "statement_timeout": timeout_ms,
        "lock_timeout": timeout_ms,
        # A process that is suspended inside a transaction must not hold its locks for ever.
        "idle_in_transaction_session_timeout": timeout_ms,
        # Always explicit, because some servers set their own default.
        "synchronous_commit": _SYNCHRONOUS_COMMIT[durability],
    }
    if read_only:
        settings["default_transaction_read_only"] = "on"
    options = " ".join([str(fields.pop("options", "") or ""), *(f"-c {k}={v}" for k, v in settings.items())])
    defaults = {
        "application_name": "perdure",
        "connect_timeout": max(2, int(timeout_s)),
        "tcp_user_timeout": timeout_ms,
        "keepalives_idle": 30,
    }
    return ConnectionTarget(
        conninfo=make_conninfo("", **{**defaults, **fields, "client_encoding": "utf8"}),
        options=options.strip(),
        host=str(fields.get("host") or "the local socket"),
        port=str(fields.get("port") or 5432),
        database=str(fields.get("dbname") or fields.get("user") or "(default)"),
        user=str(fields.get("user") or "(default)"),
        schema=schema,
    )


def _plausible(options: dict[str, Any]) -> bool:
    """Return False if part of a password seems to be in the host, port or database, which messages show."""
    if any("@" in str(options.get(part) or "") for part in ("host", "dbname")):
        return False
    return str(options.get("port") or "0").replace(",", "").isdigit()


def first_connection(target: ConnectionTarget) -> tuple[Connection, bool]:
    """Connect. Return the connection, and whether the server accepted the settings at startup."""
    try:
        try:
            return Connection.connect(target.conninfo, options=target.options, autocommit=True), True
        except psycopg.OperationalError as error:
            if "unsupported startup parameter" not in str(error):  # a pooler refuses the one with the settings
                raise
        return Connection.connect(target.conninfo, autocommit=True), False
    except psycopg.Error as error:
        raise not_opened(error, target) from error


def prepare_store(connection: Connection, target: ConnectionTarget, *, create: bool, pooled: bool) -> str:
    """Check the server, bring the schema up to date, and return the store's id."""
    if connection.pgconn.server_version < SERVER_VERSION_MIN:
        version = connection.info.server_version // 10000
        raise OpenError(f"{target} runs PostgreSQL {version}; Perdure needs 15 or newer")
    if connection.info.parameter_status("server_encoding") != "UTF8":
        raise OpenError(f"{target} does not store UTF8 text; create the database with ENCODING 'UTF8'")
    applied = _applied(connection, target)
    if applied is None and not create:
        raise OpenError(
            f'{target} has no Perdure store in schema "{target.schema}": check the URL and the schema (schema=…, '
            "--schema), or make the store: perdure.open(url) does, and `perdure store create URL`"
        )
    waiting = _pending(applied, target)
    if waiting and not create:
        raise OpenError(
            f'the store in schema "{target.schema}" of {target} needs an update: open it once as its owner, with '
            "perdure.open(url) or `perdure store create URL`"
        )
    if waiting:
        try:
            _migrate(connection, target, applied, waiting)
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_the_owner(error, target, is_new=applied is None) from error
    if pooled:
        _check_search_path(connection, target)
    return _store_id(connection, target)


def _migrate(
    connection: Connection, target: ConnectionTarget, applied: list[int] | None, waiting: list[Migration]
) -> None:
    while waiting:
        # One transaction each. It reads the versions after it has the lock: another process may have applied some.
        with connection.transaction():
            _lock(connection, target)
            if applied is None:
                _create_schema(connection, target)
            waiting = _pending(_applied(connection, target), target)
            if waiting:
                _apply(connection, waiting.pop(0))
        applied = _applied(connection, target)


def _not_the_owner(error: psycopg.Error, target: ConnectionTarget, *, is_new: bool) -> OpenError:
    need = "is not there yet" if is_new else "needs an update"
    said = error.diag.message_primary or type(error).__name__
    return OpenError(
        f'the store in schema "{target.schema}" of {target} {need}, and this role may not do it ({said}): open it once '
        "as its owner, with this version of Perdure"
    )


def _table(target: ConnectionTarget, name: str) -> sql.Identifier:
    return sql.Identifier(target.schema, name)


def _applied(connection: Connection, target: ConnectionTarget) -> list[int] | None:
    """Return the applied versions, or None if there is no store."""
    [table] = connection.execute("SELECT to_regclass(%s)", (f"{target.schema}.migration",)).fetchone() or (None,)
    if table is None:
        return None
    rows = connection.execute(sql.SQL("SELECT version FROM {}").format(_table(target, "migration")))
    return [int(version) for (version,) in rows]


def _pending(applied: list[int] | None, target: ConnectionTarget) -> list[Migration]:
    try:
        return pending("postgres", applied or [])
    except OpenError as error:
        raise OpenError(f'the store in schema "{target.schema}" of {target}: {error}') from error


def _lock(connection: Connection, target: ConnectionTarget) -> None:
    key = int.from_bytes(blake2b(f"perdure {target.schema}".encode(), digest_size=8).digest(), signed=True)
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (key,))
    # A migration may take longer than a statement should.
    connection.execute("SET LOCAL statement_timeout = 0")
    connection.execute(sql.SQL("SET LOCAL search_path = {}").format(sql.Identifier(target.schema)))


def _create_schema(connection: Connection, target: ConnectionTarget) -> None:
    # IF NOT EXISTS needs the CREATE privilege even if the schema exists.
    [schema] = connection.execute("SELECT to_regnamespace(%s)", (target.schema,)).fetchone() or (None,)
    if schema is None:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(target.schema)))
    connection.execute(CREATE_TABLE.encode())


def _apply(connection: Connection, migration: Migration) -> None:
    # Without parameters: only then may a text hold several statements.
    connection.execute(migration.adds.encode())
    [has_snapshots] = connection.execute("SELECT to_regclass('epoch') IS NOT NULL").fetchone() or (False,)
    if has_snapshots:  # snapshots must include the new tables and columns
        [schema] = connection.execute("SELECT current_schema()::text").fetchone() or ("",)
        for statement in version_postgres(schema, [*versioned_tables(migration.version).values()]):
            connection.execute(statement.encode())
    connection.execute(migration.changes.encode())
    connection.execute(
        "INSERT INTO migration (version, applied_at) "
        "VALUES (%s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)",
        (migration.version,),
    )


def _check_search_path(connection: Connection, target: ConnectionTarget) -> None:
    [schema] = connection.execute("SELECT current_schema()").fetchone() or (None,)
    if schema != target.schema:
        raise OpenError(
            f'{target}: a pooler refused the session\'s settings, and the role finds "{schema}". Run once: '
            f"ALTER ROLE {target.user} SET search_path = {target.schema}; and open with prepare=False"
        )


def _store_id(connection: Connection, target: ConnectionTarget) -> str:
    table = _table(target, "meta")
    look = sql.SQL("SELECT value FROM {} WHERE key = 'store'").format(table)
    row = connection.execute(look).fetchone()
    if row is None:
        make = sql.SQL("INSERT INTO {} (key, value) VALUES ('store', %s) ON CONFLICT DO NOTHING").format(table)
        connection.execute(make, (os.urandom(16).hex(),))
        row = connection.execute(look).fetchone()
    return str(row[0]) if row else ""
