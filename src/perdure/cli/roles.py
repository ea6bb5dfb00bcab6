"""`perdure store role`: roles of PostgreSQL that the database confines to their tenants."""

from __future__ import annotations

import os
from typing import Literal, cast

import click

from perdure.cli.base import Invocation, command, store_group
from perdure.errors import UsageError


@command(
    store_group,
    "Access",
    "perdure store role app agents --store postgresql://owner@db/app --apply\n"
    "perdure store role tenant acme_login --tenant acme --store postgresql://owner@db/app",
)
@click.argument("kind")
@click.argument("name")
@click.option("--apply", is_flag=True, help="Run the SQL, as the store's owner, instead of printing it.")
@click.option("--pooler", is_flag=True, help="Also set the role's search_path, which PgBouncer needs.")
@click.option("--password-from-env", metavar="VAR", help="With --apply: set the password that is in this variable.")
@click.pass_obj
def role(cli: Invocation, kind: str, name: str, apply: bool, pooler: bool, password_from_env: str | None) -> None:
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
