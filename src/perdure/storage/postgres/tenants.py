"""The tenants that a role of PostgreSQL may access, and the setting that names the tenant of a statement.

The database enforces the rules (`storage/rights.py`). For a role that chooses its tenant, the setting is sent before
each statement with a parameter `tenant`, in the same pipeline. It is local to its transaction: a pooler cannot pass it
on. A statement about all tenants has `tenant=None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perdure.errors import OpenError, UsageError
from perdure.storage.postgres.errors import ConnectionTarget
from perdure.storage.program import Batch, Program, Sql, Statement

Sees = Literal["everything", "chosen", "bound", "nothing"]

_SET_TENANT = {
    "tenant": Sql("SELECT set_config('perdure.tenant', :tenant, true)"),
    "tenant_name": Sql("SELECT set_config('perdure.tenant_name', :tenant_name, true)"),
}
_KIND = """SELECT current_user::text, row_security_active('tenant'),
    has_type_privilege('sees_every_tenant', 'USAGE'), has_type_privilege('chooses_tenant', 'USAGE')"""
_BOUND = "SELECT t.name FROM tenant_role r JOIN tenant t ON t.tenant = r.tenant WHERE r.role = current_user"

_ROLE = Sql(
    postgres="""SELECT r.rolname::text, r.rolsuper, r.rolbypassrls,
        EXISTS (SELECT 1 FROM pg_class c WHERE c.relnamespace = to_regnamespace(current_schema())
            AND c.relname = 'tenant' AND pg_has_role(c.relowner, 'USAGE')),
        has_type_privilege('sees_every_tenant', 'USAGE'), has_type_privilege('chooses_tenant', 'USAGE'),
        has_schema_privilege(current_schema(), 'CREATE')
    FROM pg_roles r WHERE r.rolname = current_user"""
)
_TABLES = Sql(
    postgres="""SELECT c.relname::text,
        c.relrowsecurity AND c.relforcerowsecurity AND EXISTS (SELECT 1 FROM pg_policy p WHERE p.polrelid = c.oid),
        has_table_privilege(c.oid, 'TRUNCATE, REFERENCES, TRIGGER')
    FROM pg_class c WHERE c.relnamespace = to_regnamespace(current_schema()) AND c.relkind IN ('r', 'p')
    AND EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tenant' AND NOT a.attisdropped)
    ORDER BY c.relname"""
)
# Roles that this one could become by SET ROLE to see more.
_BECOMES = Sql(
    postgres="""SELECT x.rolname::text FROM pg_roles x WHERE pg_has_role(x.oid, 'MEMBER') AND x.rolname <> current_user
    AND (x.rolsuper OR x.rolbypassrls OR has_type_privilege(x.oid, 'sees_every_tenant', 'USAGE')
        OR (has_type_privilege(x.oid, 'chooses_tenant', 'USAGE') AND NOT has_type_privilege('chooses_tenant', 'USAGE')))
    ORDER BY x.rolname"""
)
_BOUND_HERE = Sql(postgres=_BOUND)
# Functions that triggers call with the owner's rights: this role could attach them to a table of its own.
_DEFINERS = Sql(
    postgres="""SELECT p.proname::text FROM pg_proc p WHERE p.pronamespace = to_regnamespace(current_schema())
    AND p.prosecdef AND has_function_privilege(p.oid, 'EXECUTE') ORDER BY p.proname"""
)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A role that may access one tenant at a time: any one if `tenant` is None, else only that one."""

    role: str
    tenant: str | None

    def with_tenant_settings(
        self, statements: Sequence[Statement], current: dict[str, Any]
    ) -> tuple[Sequence[Statement], set[int]]:
        """Insert set_config before each statement that needs it. Return all statements, and the indexes of these.

        current: the settings of the running transaction. They are updated.
        """
        if self.tenant is not None:
            for _, params in statements:
                self._check_name(params.get("tenant_name", self.tenant))
            return statements, set()
        sent: list[Statement] = []
        asides: set[int] = set()
        for statement in statements:
            params = statement.params
            for name, set_tenant in _SET_TENANT.items():
                if name not in params:
                    continue
                value = params[name]
                if value is None:
                    raise self._only_one()
                if current.get(name) != value:
                    asides.add(len(sent))
                    sent.append(set_tenant(**{name: value}))
                    current[name] = value
            sent.append(statement)
        return sent, asides

    def _check_name(self, name: Any) -> None:
        if name != self.tenant:
            raise UsageError(
                f'the role "{self.role}" is bound to the tenant {self.tenant!r} and sees no other, not {name!r}: '
                f"open the store with tenant={self.tenant!r}"
            )

    def _only_one(self) -> UsageError:
        return UsageError(
            f'the role "{self.role}" sees one tenant at a time, and this is about all of them: use an operator\'s role '
            "(`perdure store role operator NAME` makes one), or do it tenant by tenant"
        )


def tenancy_of(connection: Any, target: ConnectionTarget) -> Tenancy | None:
    """Return what the connected role may access, None for everything. Raises OpenError if that is nothing."""
    role, is_held, every, chooses = connection.execute(_KIND).fetchone()
    if every or not is_held:
        return None
    if chooses:
        return Tenancy(role, None)
    bound = connection.execute(_BOUND).fetchone()
    if bound is None:
        raise OpenError(
            f"{target} may see no tenant at all. As the store's owner, run once: `perdure store role app {role}` for "
            f"the application's role, or `perdure store role tenant {role} --tenant NAME` for a role of one tenant"
        )
    return Tenancy(role, str(bound[0]))


@dataclass(frozen=True, slots=True)
class TenantSecurity:
    """How the database separates tenants for the connected role. `gaps` and `rights` should be empty."""

    role: str
    sees: Sees
    tenant: str | None  # the one it is bound to
    superuser: bool
    owner: bool  # of the tables, itself or as a member
    gaps: tuple[str, ...]  # tables with a tenant: not enabled, not forced, or without a policy
    rights: tuple[str, ...]  # rights by which a role that is held to a tenant could reach others

    @property
    def held(self) -> bool:
        """Return whether the database holds this role to one tenant at a time."""
        return self.sees in ("chosen", "bound") and not self.gaps and not self.rights


def tenant_security() -> Program[TenantSecurity]:
    """Return how the database separates tenants for the connected role: `driver.run(Transaction(tenant_security))`."""
    [role], tables = yield Batch(_ROLE(), _TABLES())
    name, superuser, bypasses, owner, every, chooses, creates = role
    tenant: str | None = None
    sees: Sees = "everything" if superuser or bypasses or every else "chosen" if chooses else "nothing"
    if sees == "nothing":
        [bound] = yield Batch(_BOUND_HERE())
        tenant = str(bound[0][0]) if bound else None
        sees = "bound" if bound else "nothing"
    rights: list[str] = []
    if sees != "everything":
        # None of these is subject to row-level security.
        rights = [f"TRUNCATE, REFERENCES or TRIGGER on {table}" for table, _, risky in tables if risky]
        rights += ["CREATE on the schema"] if creates else []
        rights += ["ownership of the tables"] if owner else []
        becomes, definers = yield Batch(_BECOMES(), _DEFINERS())
        rights += [f"membership of {other}" for (other,) in becomes]
        rights += [f"EXECUTE on {name}" for (name,) in definers]
    return TenantSecurity(
        role=str(name),
        sees=sees,
        tenant=tenant,
        superuser=bool(superuser),
        owner=bool(owner),
        gaps=tuple(str(table) for table, safe, _ in tables if not safe),
        rights=tuple(rights),
    )
