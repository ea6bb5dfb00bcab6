"""`perdure store role`: PostgreSQL roles that the database confines to their tenants."""

from __future__ import annotations

from typing import Any, cast

import click

from perdure.cli.base import Invocation, command, store_group


@command(
    store_group,
    "Access",
    "perdure store role app agents --store postgresql://owner@db/app --apply\n"
    "perdure store role tenant acme_login --tenant acme --store postgresql://owner@db/app",
)
@click.argument("kind")
@click.argument("name")
@click.option("--apply", is_flag=True, help="Run the SQL, as the store's owner, instead of printing it.")
@click.pass_obj
def role(cli: Invocation, kind: str, name: str, apply: bool) -> None:
    """Create a role that PostgreSQL confines to tenants.

    KIND is app (names its tenant in each transaction), tenant (bound to --tenant) or operator (sees all tenants: for
    backups and workers of all tenants). Prints the SQL; --apply runs it. Set the role's password with psql's
    \\password.
    """
    from perdure.ops.roles import Kind, check_role_url, make_role, role_sql

    check_role_url(cli.url)
    place: dict[str, Any] = {"tenant": cli.tenant, **cli.schema_of(cli.url)}
    script = role_sql(kind, name, **place)
    if apply:
        make_role(cli.url, cast("Kind", kind), name, **place)
    if cli.json:
        cli.document(role=name, kind=kind, tenant=cli.tenant, applied=apply, sql=script)
    elif apply:
        bound = f", bound to tenant {cli.tenant}" if kind == "tenant" else ""
        cli.line(f"role {name} is ready: {kind}{bound}")
    else:
        for line in script.splitlines():
            cli.line(line)
        cli.message("nothing was changed: run this as the store's owner, or add --apply")
