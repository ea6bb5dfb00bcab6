"""`perdure roles`: roles of PostgreSQL that the database holds to their tenants. Prints SQL; runs it with --apply."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from perdure import Store
from perdure.cli.command import Command
from perdure.cli.opening import schema
from perdure.cli.render import Output
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.storage.postgres_tenants import TenantSecurity

OK, NO = 0, 1


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="KIND",
        choices=("app", "tenant", "operator", "check"),
        help="app: chooses its tenant; tenant: bound to --tenant; operator: sees all; check: look at one's own role",
    )
    parser.add_argument("role", metavar="NAME", nargs="?", help="the role: made if there is none")
    parser.add_argument(
        "--apply", action="store_true", help="run the SQL, as the store's owner, instead of printing it"
    )
    parser.add_argument("--no-login", action="store_true", help="a new role cannot log in: a group for other roles")
    parser.add_argument("--pooler", action="store_true", help="also set the role's search_path, which PgBouncer needs")
    parser.add_argument(
        "--password-from-env", metavar="VAR", help="with --apply: set the password that is in this variable"
    )


def roles(args: Namespace, _store: Store | None, out: Output) -> int:
    from perdure.ops.roles import look_at_role, make_role

    where = schema(args, args.store)
    if args.what == "check":
        if args.role is not None or args.apply:
            raise UsageError("`perdure roles check` looks at the role of --store, and takes nothing else")
        return _check(look_at_role(args.store, **where), out)
    if args.role is None:
        raise UsageError(f"which role? `perdure roles {args.what} NAME`")
    made = make_role(
        args.store,
        args.what,
        args.role,
        tenant=args.tenant,
        login=not args.no_login,
        pooled=args.pooler,
        secret=_secret(args.password_from_env),
        apply=args.apply,
        **where,
    )
    if out.json:
        names = {"role": args.role, "kind": args.what, "tenant": args.tenant}
        out.document({**names, "applied": made.applied, "statements": made.statements})
    elif made.applied:
        bound = f", bound to tenant {args.tenant}" if args.what == "tenant" else ""
        out.line((f"role {args.role} is ready: {args.what}{bound}", "green"))
    else:
        for line in ("BEGIN", *made.statements, "COMMIT"):
            out.line((f"{line};", ""))
        out.message("nothing was changed: run this as the store's owner, or add --apply")
    return OK


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise UsageError(f"--password-from-env {variable}: there is no such variable, or it is empty")
    return found


def _check(found: TenantSecurity, out: Output) -> int:
    if out.json:
        roles = [{"kind": kind, "role": role, "tenant": tenant} for kind, role, tenant in found.roles]
        out.document(
            {
                "role": found.role,
                "sees": found.sees,
                "tenant": found.tenant,
                "held": found.held,
                "superuser": found.superuser,
                "bypasses_row_security": found.bypasses,
                "owner": found.owner,
                "tables": list(found.tables),
                "gaps": list(found.gaps),
                "rights": list(found.rights),
                "roles": roles,
            }
        )
        return OK if found.held else NO
    out.line((f"role {found.role}", "bold"), (_meaning(found), "green" if found.held else "yellow"))
    if found.gaps:
        out.line((f"no row-level security on {', '.join(found.gaps)}", "red"))
    else:
        out.line(("row-level security: enabled and forced on every table that has a tenant", "green"))
    for right in found.rights:
        out.line((f"reaches around it: {right}", "red"))
    for kind, role, tenant in found.roles:
        said = {"gone": f"bound to {tenant}, but there is no such role", "tenant": f"tenant {tenant}"}.get(kind, kind)
        out.line((f"  {role}", ""), (said, "red" if kind == "gone" else "dim"))
    return OK if found.held else NO


def _meaning(found: TenantSecurity) -> str:
    if found.sees == "bound":
        return f"bound to tenant {found.tenant}: no SQL of this role reaches another"
    if found.sees == "chosen":
        return "sees the tenant that it names in each transaction: held against mistakes, not against hostile SQL"
    why = "a superuser" if found.superuser else "BYPASSRLS" if found.bypasses else "the owner" if found.owner else ""
    return f"sees every tenant ({why or 'an operator'}): only Perdure's own statements keep them apart"


ROLES = Command(
    "make roles that PostgreSQL holds to their tenants",
    "Prints the SQL; --apply runs it. An\napp's role names its tenant in each transaction; a tenant's own role is "
    "bound to it whatever it says;\noperators see all (workers for all tenants, backups). `check` says what the role "
    "of --store can see,\nand exits with 1 if nothing holds it.",
    "  perdure roles app agents --store postgresql://owner@db/app --apply\n"
    "  perdure roles tenant acme_login --tenant acme --store postgresql://owner@db/app\n"
    "  perdure roles check --store postgresql://agents@db/app",
    arguments,
    roles,
    opens=False,
)
