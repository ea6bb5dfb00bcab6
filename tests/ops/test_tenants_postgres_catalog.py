"""Every right that the store gives in PostgreSQL, compared with what is meant: a new table, view, sequence or function
that a role could reach, and a function that runs as the owner, must be added here on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import sql
from role_kit import Roles, fill, look_at_role, roles_of

import perdure
from perdure.ops.roles import make_role
from perdure.storage.domains import versioned_tables

KINDS = ("app", "tenant", "operator")
READ, WRITE = "SELECT", "DELETE INSERT SELECT UPDATE"
# For app, tenant, operator. Row-level security narrows all of them.
STORE_TABLES = {
    "meta": (WRITE, WRITE, WRITE),
    "migration": (READ, READ, READ),
    "run_count": (WRITE, WRITE, WRITE),
    "memory_index": (WRITE, WRITE, WRITE),
    "emitted": (WRITE, WRITE, WRITE),
    "tenant": ("INSERT SELECT", READ, "INSERT SELECT"),
    "tenant_role": (READ, READ, READ),
    "tenant_key": (WRITE, WRITE, WRITE),
    "copy": (WRITE, WRITE, WRITE),
    "erased": (WRITE, WRITE, WRITE),
    "external": (WRITE, WRITE, WRITE),
    "external_use": (WRITE, WRITE, WRITE),
    "operator_action": (WRITE, WRITE, WRITE),
    "peer_key": (WRITE, WRITE, WRITE),
    "team_store": (WRITE, WRITE, WRITE),
    "team_view": (WRITE, WRITE, WRITE),
    "archived": (WRITE, WRITE, WRITE),
    "queue": (WRITE, WRITE, WRITE),
    "size_sample": (WRITE, WRITE, WRITE),
    "prepared": (WRITE, WRITE, WRITE),
    "decision": (WRITE, WRITE, WRITE),
    "epoch": (READ, READ, WRITE),
    "snapshot": (READ, READ, WRITE),
    "snapshot_note": (READ, READ, WRITE),
    "number": ("USAGE", "USAGE", "SELECT USAGE"),
    "body_id_seq": (None, None, READ),
}
PUBLIC_FUNCTIONS = {
    "bound_tenant",
    "chosen_tenant_name",
    "may_see_every_tenant",
    "serves_several_tenants",
    "visible_tenant",
}
GRANTS = """SELECT n.nspname || '.' || c.relname, coalesce(r.rolname, 'PUBLIC'),
        string_agg(a.privilege_type, ' ' ORDER BY a.privilege_type)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(c.relacl) a
    LEFT JOIN pg_roles r ON r.oid = a.grantee
    WHERE n.nspname LIKE 'perdure%' AND a.grantee <> c.relowner AND a.privilege_type <> 'MAINTAIN' GROUP BY 1, 2"""
FUNCTIONS = """SELECT p.proname::text, p.prosecdef, coalesce(p.proconfig, '{}'),
        ARRAY(SELECT a.grantee FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
            WHERE a.grantee <> p.proowner)
    FROM pg_proc p WHERE p.pronamespace::regnamespace::text LIKE 'perdure%'"""
OTHERS = {
    "schemas": """SELECT n.nspname::text, r.rolname::text, a.privilege_type FROM pg_namespace n, aclexplode(n.nspacl) a
        LEFT JOIN pg_roles r ON r.oid = a.grantee WHERE n.nspname LIKE 'perdure%' AND a.grantee <> n.nspowner""",
    "types": """SELECT t.typname::text, r.rolname::text, a.privilege_type FROM pg_type t, aclexplode(t.typacl) a
        LEFT JOIN pg_roles r ON r.oid = a.grantee
        WHERE t.typnamespace::regnamespace::text LIKE 'perdure%' AND a.grantee <> t.typowner""",
    "columns": """SELECT a.attname::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace::regnamespace::text LIKE 'perdure%' AND a.attacl IS NOT NULL""",
    "defaults": "SELECT defaclobjtype::text FROM pg_default_acl",
    "views with the rights of their owner": """SELECT c.relname::text FROM pg_class c WHERE c.relkind IN ('v', 'm')
        AND c.relnamespace::regnamespace::text LIKE 'perdure%'
        AND NOT coalesce('security_invoker=true' = ANY (c.reloptions), false)""",
    "tables without forced row-level security": """SELECT c.relname::text FROM pg_class c WHERE c.relkind IN ('r', 'p')
        AND c.relnamespace = 'perdure'::regnamespace AND NOT (c.relrowsecurity AND c.relforcerowsecurity)""",
}


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    yield from roles_of(postgres_url)


@pytest.mark.parametrize("roles_first", [True, False])
def test_the_catalog_grants_what_is_meant_and_nothing_else(roles: Roles, roles_first: bool) -> None:
    """Rights come from `store role`, and from the first snapshot for the roles that are there already."""
    with perdure.open(roles.owner) as store:
        fill(store.tenant("acme"), "acme")
        if not roles_first:
            store.snapshot("s")
        _ = roles.app, roles.operator, roles.tenant("acme")
        if roles_first:
            store.snapshot("s")
    names = [roles.name(what) for what in ("app", "acme", "operator")]
    expected: dict[tuple[str, str], str] = {}
    for table in versioned_tables():
        for role in names:  # of the past, erasing removes a tenant's own part
            expected[f"perdure.{table}", role] = WRITE
            expected[f"perdure.{table}_past", role] = "DELETE SELECT"
            expected[f"perdure_at.{table}", role] = READ
    for table, three in STORE_TABLES.items():
        expected |= {(f"perdure.{table}", role): right for role, right in zip(names, three, strict=True) if right}

    def rows(query: str) -> list[Any]:
        with roles.connect(roles.owner) as connection:
            return connection.execute(query.encode()).fetchall()

    assert {(relation, role): right for relation, role, right in rows(GRANTS)} == expected
    functions = rows(FUNCTIONS)
    assert {name: grantees for name, *_, grantees in functions if grantees} == {key: [0] for key in PUBLIC_FUNCTIONS}
    assert {name for name, definer, *_ in functions if definer} == {f"keep_{table}" for table in versioned_tables()}
    # Those without a path have bodies that were resolved when they were made.
    paths = {name: config[0] for name, _, config, _ in functions if config}
    assert set(paths.values()) == {"search_path=pg_catalog, pg_temp"}
    assert {name for name, *_ in functions} - paths.keys() == PUBLIC_FUNCTIONS
    found = {name: set(rows(query)) for name, query in OTHERS.items()}
    assert found == {
        "schemas": {(schema, role, "USAGE") for schema in ("perdure", "perdure_at") for role in names},
        "types": {("chooses_tenant", names[0], "USAGE"), ("sees_every_tenant", names[2], "USAGE")},
        "columns": set(),
        "defaults": set(),
        "views with the rights of their owner": set(),
        "tables without forced row-level security": {("migration",), ("epoch",)},
    }


def test_a_right_to_run_code_as_the_owner_is_noticed(roles: Roles) -> None:
    """As a broad GRANT of a database's administrator gives it."""
    url = roles.tenant("acme")
    with perdure.open(roles.owner) as store:
        store.snapshot("s")
    assert look_at_role(url).held
    role = sql.Identifier(roles.name("acme"))
    roles.execute(sql.SQL("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA perdure TO {}").format(role))
    assert "EXECUTE on keep_thread" in look_at_role(url).rights
    make_role(roles.owner, "tenant", roles.name("acme"), tenant="acme")
    assert look_at_role(url).held
