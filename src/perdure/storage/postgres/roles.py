"""Roles of PostgreSQL for a store: the statements that give a role exactly the rights it needs, and no more.

Three kinds: `app` chooses its tenant for each transaction, `tenant` is bound to one, `operator` sees all of them
(`tenants.py` says what that means). Each list of statements takes away first what the role had on the store's
tables, so that a role of one kind can be made one of another. All names are quoted by psycopg; a password is never in
a statement: it goes to the server as its verifier.

Must never happen here: a right that row-level security does not cover (TRUNCATE, REFERENCES, TRIGGER) for a role that
is to be held to a tenant.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from psycopg import sql

from perdure.errors import UsageError

Kind = Literal["app", "tenant", "operator"]

_MAINTAIN_SINCE = 170000  # the version of PostgreSQL in which another role than the owner can be let VACUUM
# A tenant is made by its name, never changed; which tenant a role is bound to is the owner's business.
_GRANTS = (
    "REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}",
    "REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM {role}",
    "REVOKE ALL ON SCHEMA {schema} FROM {role}",
    "REVOKE USAGE ON TYPE {chooses}, {every} FROM {role}",
    "GRANT USAGE ON SCHEMA {schema} TO {role}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
    "REVOKE INSERT, UPDATE, DELETE ON {migration}, {tenant_role} FROM {role}",
    "REVOKE UPDATE, DELETE ON {tenant} FROM {role}",
    "GRANT USAGE ON SEQUENCE {number} TO {role}",
    "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}",
)
_OF_KIND = {
    "app": ("GRANT USAGE ON TYPE {chooses} TO {role}",),
    "tenant": ("REVOKE INSERT ON {tenant} FROM {role}",),
    "operator": (
        "GRANT USAGE ON TYPE {every} TO {role}",
        "GRANT SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",  # a backup copies where they are
    ),
}

# Roles that this one could become by SET ROLE count too.
_REACH = """SELECT x.rolname::text, x.rolsuper, x.rolbypassrls,
    EXISTS (SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(%(table)s) AND pg_has_role(x.oid, c.relowner, 'USAGE')),
    has_type_privilege(x.oid, %(every)s, 'USAGE'), has_type_privilege(x.oid, %(chooses)s, 'USAGE')
    FROM pg_roles x WHERE pg_has_role(%(role)s, x.oid, 'MEMBER') ORDER BY x.rolname = %(role)s DESC, x.rolname"""


class RoleGrant(NamedTuple):
    """Whose rights, and on what."""

    role: str
    schema: str
    database: str
    server_version: int


def place_of(connection: Any, schema: str, role: str = "") -> RoleGrant:
    """A role's rights on the store of this connection's database."""
    info = connection.info
    return RoleGrant(role, schema, str(info.dbname), int(info.server_version))


def grants(kind: Kind, place: RoleGrant) -> list[sql.Composed]:
    """What gives an existing role the rights of its kind on the tables as they are now. Needs their owner."""
    own = {name: name for name in ("migration", "tenant", "tenant_role", "number")}
    own |= {"chooses": "chooses_tenant", "every": "sees_every_tenant"}
    names = {name: sql.Identifier(place.schema, known) for name, known in own.items()}
    names |= {"role": sql.Identifier(place.role), "schema": sql.Identifier(place.schema)}
    texts = [*_GRANTS, *_OF_KIND[kind]]
    if kind == "operator" and place.server_version >= _MAINTAIN_SINCE:
        texts.append("GRANT MAINTAIN ON ALL TABLES IN SCHEMA {schema} TO {role}")
    return [sql.SQL(text).format(**names) for text in texts]


def binding(kind: Kind, place: RoleGrant, tenant: str | None) -> list[sql.Composed]:
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


def making(place: RoleGrant, *, exists: bool, pooled: bool) -> list[sql.Composed]:
    """What makes the role itself, and lets it connect. `pooled`: it must find the schema behind a pooler too."""
    names = {
        "role": sql.Identifier(place.role),
        "schema": sql.Identifier(place.schema),
        "database": sql.Identifier(place.database),
    }
    statements = [] if exists else [sql.SQL("CREATE ROLE {role} LOGIN").format(**names)]
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


def check_reach(connection: Any, kind: Kind, place: RoleGrant) -> None:
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
