"""Roles for a store on PostgreSQL: what `perdure store role` does. The SQL is in `storage/postgres/roles.py`.

A role is made, or given other rights, in one transaction, which is undone if the role could see more than its kind may
(because it is a superuser, or a member of another role). Needs the store's owner or a superuser.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import UsageError
from perdure.storage.urls import is_postgres, need_postgres
from perdure.threads.checks import check_name

if TYPE_CHECKING:
    from perdure.storage.postgres.roles import Kind

_TIMEOUT_S = 30.0
_NAME_BYTES_MAX = 63  # PostgreSQL cuts longer ones short


class RoleMade(NamedTuple):
    """The statements that make a role what it is to be, and whether they were run."""

    statements: list[str]
    applied: bool


def make_role(
    url: str,
    kind: Kind,
    role: str,
    *,
    tenant: str | None = None,
    pooled: bool = False,
    secret: str | None = None,
    apply: bool = False,
    schema: str = "perdure",
) -> RoleMade:
    """The SQL that makes a role, or gives an existing one exactly the rights of its kind; run only with `apply`.

    `secret` is a password for it: it is sent as a verifier, and is in no statement that is given back.
    """
    _check_url(url)
    need_postgres()
    from perdure.storage.postgres import roles as roles

    _check(kind, role, tenant)
    if secret is not None and not apply:
        raise UsageError("a password is never printed: give it with --apply, or set it with psql's \\password")
    with _connected(url, schema) as connection:
        place = roles.place_of(connection, schema, role)
        exists = roles.role_exists(connection, role)
        statements = [
            *roles.making(place, exists=exists, pooled=pooled),
            *roles.grants(kind, place),
            *roles.binding(kind, place, tenant),
        ]
        if apply:
            with connection.transaction():
                for statement in statements:
                    connection.execute(statement)
                if secret is not None:
                    connection.execute(roles.password(connection, role, secret))
                roles.check_reach(connection, kind, place)
        return RoleMade([statement.as_string(connection) for statement in statements], apply)


@contextmanager
def _connected(url: str, schema: str) -> Iterator[Any]:
    """A connection to a store that is up to date; what the server says is translated."""
    _check_url(url)
    import psycopg

    from perdure.storage.postgres import errors as postgres_errors
    from perdure.storage.postgres import opening as postgres_open

    target = postgres_open.parsed(url, schema=schema, timeout_s=_TIMEOUT_S, durability="full")
    connection, settings = postgres_open.first_connection(target)
    try:
        postgres_open.prepare_store(connection, target, create=False, pooled=not settings)
        yield connection
    except psycopg.Error as error:
        raise postgres_errors.translated(error, target, _TIMEOUT_S) from error
    finally:
        connection.close()


def _check_url(url: str) -> None:
    if not is_postgres(url):
        raise UsageError("roles are PostgreSQL's: give --store postgresql://owner@host/database")


def _check(kind: Kind, role: str, tenant: str | None) -> None:
    if not role or "\0" in role or len(role.encode()) > _NAME_BYTES_MAX or role.startswith("pg_"):
        raise UsageError(f"{role!r} cannot be a role: 1 to {_NAME_BYTES_MAX} bytes, not starting with pg_")
    if kind == "tenant":
        if tenant is None:
            raise UsageError("a role of one tenant needs --tenant NAME")
        check_name(tenant, "tenant")
    elif tenant is not None:
        raise UsageError(f"--tenant is for `perdure store role tenant`: a role of kind {kind} is bound to none")
