"""Roles of PostgreSQL that the database confines to their tenants: store role, store check-role."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, cast

import click

from perdure.cli.base import NO, OK, Invocation, command, store_group
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.storage.postgres.tenants import TenantSecurity


@command(
    store_group,
    "Access",
    "perdure store role app agents --store postgresql://owner@db/app --apply\n"
    "perdure store role tenant acme_login --tenant acme --store postgresql://owner@db/app",
)
@click.argument("kind")
@click.argument("name")
@click.option("--apply", is_flag=True, help="Run the SQL, as the store's owner, instead of printing it.")
@click.option("--no-login", is_flag=True, help="A new role cannot log in: a group for other roles.")
@click.option("--pooler", is_flag=True, help="Also set the role's search_path, which PgBouncer needs.")
@click.option("--password-from-env", metavar="VAR", help="With --apply: set the password that is in this variable.")
@click.pass_obj
def role(
    cli: Invocation, kind: str, name: str, apply: bool, no_login: bool, pooler: bool, password_from_env: str | None
) -> None:
    """Create a role that PostgreSQL confines to tenants.

    KIND is app (names its tenant in each transaction), tenant (bound to --tenant) or operator (sees all: workers for
    all tenants, backups). Prints the SQL; --apply runs it.
    """
    from perdure.ops.roles import make_role

    if kind not in ("app", "tenant", "operator"):
        raise UsageError(f"{kind!r} is no kind of role: app, tenant or operator")
    tenant = cli.tenant
    made = make_role(
        cli.url,
        cast("Literal['app', 'tenant', 'operator']", kind),
        name,
        tenant=tenant,
        login=not no_login,
        pooled=pooler,
        secret=_secret(password_from_env),
        apply=apply,
        **cli.schema_of(cli.url),
    )
    if cli.json:
        cli.document(role=name, kind=kind, tenant=tenant, applied=made.applied, statements=made.statements)
    elif made.applied:
        bound = f", bound to tenant {tenant}" if kind == "tenant" else ""
        cli.line(f"role {name} is ready: {kind}{bound}")
    else:
        for line in ("BEGIN", *made.statements, "COMMIT"):
            cli.line(f"{line};")
        cli.message("nothing was changed: run this as the store's owner, or add --apply")


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise UsageError(f"--password-from-env {variable}: there is no such variable, or it is empty")
    return found


@command(store_group, "Access", "perdure store check-role --store postgresql://agents@db/app")
@click.pass_obj
def check_role(cli: Invocation) -> int:
    """Show which tenants the role of --store can see.

    Exits with 1 if the database does not confine it to one tenant at a time.
    """
    from perdure.ops.roles import look_at_role

    found = look_at_role(cli.url, **cli.schema_of(cli.url))
    if cli.json:
        roles = [{"kind": kind, "role": name, "tenant": tenant} for kind, name, tenant in found.roles]
        cli.document(found, held=found.held, roles=roles)
        return OK if found.held else NO
    cli.line(f"role {found.role}", _meaning(found))
    if found.gaps:
        cli.line(f"no row-level security on {', '.join(found.gaps)}")
    else:
        cli.line("row-level security: enabled and forced on every table that has a tenant")
    for right in found.rights:
        cli.line(f"bypasses it: {right}")
    for kind, name, tenant in found.roles:
        what = {"gone": f"bound to {tenant}, but there is no such role", "tenant": f"tenant {tenant}"}.get(kind, kind)
        cli.line(f"  {name}", what)
    return OK if found.held else NO


def _meaning(found: TenantSecurity) -> str:
    if found.sees == "bound":
        return f"bound to tenant {found.tenant}: no SQL of this role reaches another"
    if found.sees == "chosen":
        return "sees the tenant that it names in each transaction: guards against mistakes, not against hostile SQL"
    why = "a superuser" if found.superuser else "BYPASSRLS" if found.bypasses else "the owner" if found.owner else ""
    return f"sees every tenant ({why or 'an operator'}): only Perdure's own statements keep them apart"
