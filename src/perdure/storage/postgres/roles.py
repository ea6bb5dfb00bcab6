"""Roles of PostgreSQL for a store: the statements that give a role exactly the rights it needs, and no more.

Three kinds: `app` chooses its tenant for each transaction, `tenant` is bound to one, `operator` sees all of them
(`tenants.py` says what that means). Each list of statements takes away first what the role had on the store's
tables, so that a role of one kind can be made one of another. All names are quoted by psycopg; a password is never in
a statement: it goes to the server as its verifier.

Must never happen here: a right that row-level security does not cover (TRUNCATE, REFERENCES, TRIGGER) for a role that
is to be held to a tenant.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal, NamedTuple

from psycopg import sql

from perdure.errors import UsageError
from perdure.storage.migrate import migrations

Kind = Literal["app", "tenant", "operator"]
KINDS: tuple[Kind, ...] = ("app", "tenant", "operator")

_ALL = "SELECT, INSERT, UPDATE, DELETE"
# A tenant is made by its name, never changed; whom a role is bound to is the owner's business.
_LESS = {"tenant": "SELECT, INSERT", "tenant_role": "SELECT", "migration": "SELECT"}
_TYPES = {"app": "chooses_tenant", "operator": "sees_every_tenant"}
_MAINTAIN_SINCE = 170000  # the version of PostgreSQL in which somebody else than the owner can be let VACUUM
_MADE = re.compile(r"^CREATE (TABLE|SEQUENCE|FUNCTION) (\w+)", re.MULTILINE)

# Whoever the role could become by SET ROLE counts too.
_REACH = """SELECT x.rolname::text, x.rolsuper, x.rolbypassrls,
    EXISTS (SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(%(table)s) AND pg_has_role(x.oid, c.relowner, 'USAGE')),
    has_type_privilege(x.oid, %(every)s, 'USAGE'), has_type_privilege(x.oid, %(chooses)s, 'USAGE')
    FROM pg_roles x WHERE pg_has_role(%(role)s, x.oid, 'MEMBER') ORDER BY x.rolname = %(role)s DESC, x.rolname"""
_GRANTED = """SELECT pg_get_userbyid(a.grantee)::text FROM pg_type t, aclexplode(t.typacl) a
    WHERE t.oid = to_regtype(%s) AND a.grantee <> t.typowner AND a.grantee <> 0"""


class Place(NamedTuple):
    """Whose rights, and on what."""

    role: str
    schema: str
    database: str
    server_version: int


def place_of(connection: Any, schema: str, role: str = "") -> Place:
    """A role's rights on the store of this connection's database."""
    info = connection.info
    return Place(role, schema, str(info.dbname), int(info.server_version))


@cache
def _made(what: str) -> tuple[str, ...]:
    """The names of the tables, sequences or functions that the migrations make."""
    texts = [migration.text for migration in migrations("postgres")]
    return tuple(dict.fromkeys(name for text in texts for kind, name in _MADE.findall(text) if kind == what))


def tables() -> tuple[str, ...]:
    """Every table of a store."""
    return ("migration", *_made("TABLE"))


def grants(kind: Kind, place: Place) -> list[sql.Composed]:
    """What gives an existing role the rights of its kind on the tables as they are now. Needs their owner."""
    role, schema = sql.Identifier(place.role), sql.Identifier(place.schema)

    def made(text: str, **names: sql.Composable) -> sql.Composed:
        return sql.SQL(text).format(role=role, schema=schema, **names)

    def several(names: list[str]) -> sql.Composed:
        return sql.SQL(", ").join(sql.Identifier(place.schema, name) for name in names)

    by_rights: dict[str, list[str]] = {}
    for table in tables():
        rights = _LESS.get(table, _ALL)
        if kind == "tenant" and table == "tenant":
            rights = "SELECT"
        if kind == "operator" and place.server_version >= _MAINTAIN_SINCE:
            rights += ", MAINTAIN"
        by_rights.setdefault(rights, []).append(table)
    functions = sql.SQL(", ").join(
        sql.SQL("{}()").format(sql.Identifier(place.schema, name)) for name in _made("FUNCTION")
    )
    statements = [
        made("REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}"),
        made("REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM {role}"),
        made("REVOKE ALL ON SCHEMA {schema} FROM {role}"),
        made("REVOKE USAGE ON TYPE {types} FROM {role}", types=several(sorted(_TYPES.values()))),
        made("GRANT USAGE ON SCHEMA {schema} TO {role}"),
    ]
    for rights, names in by_rights.items():
        statements.append(made("GRANT {rights} ON {tables} TO {role}", rights=sql.SQL(rights), tables=several(names)))
    statements.append(made("GRANT USAGE ON SEQUENCE {all} TO {role}", all=several(list(_made("SEQUENCE")))))
    statements.append(made("GRANT EXECUTE ON FUNCTION {functions} TO {role}", functions=functions))
    if kind == "operator":  # a backup copies where they are
        statements.append(made("GRANT SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {role}"))
    if kind in _TYPES:
        statements.append(made("GRANT USAGE ON TYPE {type} TO {role}", type=several([_TYPES[kind]])))
    return statements


def binding(kind: Kind, place: Place, tenant: str | None) -> list[sql.Composed]:
    """What binds a role to a tenant, which is made if it is new; or frees it, if it is to be of another kind."""
    names: dict[str, sql.Composable] = {
        "bound": sql.Identifier(place.schema, "tenant_role"),
        "tenants": sql.Identifier(place.schema, "tenant"),
        "number": sql.Literal(f"{sql.Identifier(place.schema, 'number').as_string()}"),
        "role": sql.Literal(place.role),
        "name": sql.Literal(tenant or ""),
    }
    if kind != "tenant":
        return [sql.SQL("DELETE FROM {bound} WHERE role = {role}").format(**names)]
    return [
        sql.SQL(
            "INSERT INTO {tenants} (tenant, name) SELECT nextval({number}), {name} "
            "WHERE NOT EXISTS (SELECT 1 FROM {tenants} WHERE name = {name}) ON CONFLICT (name) DO NOTHING"
        ).format(**names),
        sql.SQL(
            "INSERT INTO {bound} (role, tenant) SELECT {role}, tenant FROM {tenants} WHERE name = {name} "
            "ON CONFLICT (role) DO UPDATE SET tenant = excluded.tenant"
        ).format(**names),
    ]


def making(place: Place, *, exists: bool, login: bool, pooled: bool) -> list[sql.Composed]:
    """What makes the role itself, and lets it connect. `pooled`: it must find the schema behind a pooler too."""
    names = {
        "role": sql.Identifier(place.role),
        "schema": sql.Identifier(place.schema),
        "database": sql.Identifier(place.database),
        "login": sql.SQL("LOGIN" if login else "NOLOGIN"),
    }
    statements = [] if exists else [sql.SQL("CREATE ROLE {role} {login}").format(**names)]
    statements.append(sql.SQL("GRANT CONNECT ON DATABASE {database} TO {role}").format(**names))
    if pooled:
        statements.append(
            sql.SQL("ALTER ROLE {role} IN DATABASE {database} SET search_path = {schema}").format(**names)
        )
    return statements


def password(connection: Any, role: str, secret: str) -> sql.Composed:
    """What sets a role's password, as the verifier that the server keeps: the password itself is not sent."""
    method = connection.execute("SHOW password_encryption").fetchone()[0]
    verifier = connection.pgconn.encrypt_password(secret.encode(), role.encode(), method.encode())
    return sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(verifier.decode()))


def role_exists(connection: Any, role: str) -> bool:
    return connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone() is not None


def check_reach(connection: Any, kind: Kind, place: Place) -> None:
    """Raise UsageError if a role can see more than its kind may: by itself, or as a role that it is a member of."""
    if kind == "operator":
        return
    found = connection.execute(
        _REACH,
        {
            "role": place.role,
            "table": f"{place.schema}.thread",
            "every": f"{place.schema}.sees_every_tenant",
            "chooses": f"{place.schema}.chooses_tenant",
        },
    )
    for name, superuser, bypasses, owner, every, chooses in found:
        why = "is a superuser" if superuser else "has BYPASSRLS" if bypasses else ""
        why = why or ("owns the tables" if owner else "sees every tenant" if every else "")
        if not why and chooses and kind == "tenant":
            why = "may choose its tenant"
        if why:
            whom = f'"{name}"' if name == place.role else f'"{place.role}" is a member of "{name}", which'
            raise UsageError(
                f"the role {whom} {why}: row-level security would not hold it. Nothing was changed; use another role"
            )


def renew_grants(connection: Any, place: Place) -> None:
    """Give the roles that a store has the rights on tables that a migration has made. As the owner."""
    known: list[tuple[Kind, str]] = [("tenant", role) for role in _bound_roles(connection, place.schema)]
    for kind, type_ in (("app", "chooses_tenant"), ("operator", "sees_every_tenant")):
        rows = connection.execute(_GRANTED, (f"{place.schema}.{type_}",)).fetchall()
        known += [(kind, str(role)) for (role,) in rows]  # type: ignore[misc]
    for kind, role in known:
        for statement in grants(kind, place._replace(role=role)):
            connection.execute(statement)


def _bound_roles(connection: Any, schema: str) -> list[str]:
    table = sql.Identifier(schema, "tenant_role")
    rows = connection.execute(
        sql.SQL("SELECT b.role::text FROM {} b JOIN pg_roles r ON r.rolname = b.role").format(table)
    )
    return [str(role) for (role,) in rows]
