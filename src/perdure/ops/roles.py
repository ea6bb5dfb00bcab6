"""Roles for a store on PostgreSQL: `perdure store role` prints the SQL of `roles.sql`, or runs it.

A role of the kind `app` chooses its tenant for each transaction, `tenant` is bound to one, `operator` sees all of them.
The SQL is one transaction, which fails if the role could see more than its kind may.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Literal, get_args

from perdure.errors import UsageError
from perdure.storage.domains import all_tables
from perdure.storage.urls import is_postgres, need_postgres
from perdure.threads.checks import check_name

Kind = Literal["app", "tenant", "operator"]
_TIMEOUT_S = 30.0
_NAME_BYTES_MAX = 63  # PostgreSQL truncates longer names


def role_sql(kind: str, role: str, *, tenant: str | None = None, schema: str = "perdure") -> str:
    """Return the SQL that creates a role, or gives an existing role exactly the rights of its kind."""
    if kind not in get_args(Kind):
        raise UsageError(f"{kind!r} is no kind of role: app, tenant or operator")
    if not role or "\0" in role or len(role.encode()) > _NAME_BYTES_MAX or role.startswith("pg_"):
        raise UsageError(f"{role!r} cannot be a role: 1 to {_NAME_BYTES_MAX} bytes, not starting with pg_")
    if (kind == "tenant") != (tenant is not None):
        raise UsageError("--tenant NAME is for a role of the kind tenant, which needs it")
    values = {
        "{kind}": kind,
        "{role}": _quoted(role, '"'),
        "{role_text}": _quoted(role, "'"),
        "{schema}": _quoted(schema, '"'),
        "{read_only}": ", ".join(["migration", *_tables("read")]),
        "{add_only}": ", ".join(_tables("add")),
        "{tenant}": _quoted(check_name(tenant or "-", "tenant"), "'"),
    }
    text = re.sub(rf"(?m)^--{kind}: ", "", files("perdure.ops").joinpath("roles.sql").read_text())
    text = re.sub(r"(?m)^--\w+: .*\n", "", text)
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], text)


def _tables(roles_may: str) -> list[str]:
    return [table.name for table in all_tables().values() if table.roles_may == roles_may]


def make_role(url: str, kind: Kind, role: str, *, tenant: str | None = None, schema: str = "perdure") -> None:
    """Run the SQL of `role_sql` as the store's owner."""
    need_postgres()
    import psycopg

    from perdure.storage.postgres import errors, opening

    script = role_sql(kind, role, tenant=tenant, schema=schema)
    target = opening.parsed(url, schema=schema, timeout_s=_TIMEOUT_S, durability="full")
    connection, settings = opening.first_connection(target)
    try:
        opening.prepare_store(connection, target, create=False, pooled=not settings)
        connection.execute(script.encode())
    except psycopg.errors.InvalidRoleSpecification as error:
        raise UsageError(str(error.diag.message_primary)) from error
    except psycopg.Error as error:
        raise errors.translated(error, target, _TIMEOUT_S) from error
    finally:
        connection.close()


def check_role_url(url: str) -> None:
    if not is_postgres(url):
        raise UsageError("roles are PostgreSQL's: give --store postgresql://owner@host/database")


def _quoted(text: str, quote: str) -> str:
    """Quote an identifier or a string by standard SQL."""
    return f"{quote}{text.replace(quote, quote * 2)}{quote}"
