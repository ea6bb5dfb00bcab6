"""PostgreSQL keeps tenants apart in the past as it does now, and only the operator moves epochs."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from role_kit import Roles, fill, roles_of, tenant_tables

import perdure
from perdure.errors import PerdureError
from perdure.forensics import sandbox


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    yield from roles_of(postgres_url)


def change(store: perdure.Store, name: str) -> None:
    store.thread(f"{name}-thread").save({"secret": f"{name} later"})
    store.memory("users", "alice").put(f"{name}-key", {"secret": f"{name} later"})
    store.answer(f"{name}-run", "yes")


@pytest.mark.parametrize("roles_first", [True, False])
def test_a_role_sees_and_erases_its_tenants_past_alone(roles: Roles, roles_first: bool) -> None:
    if roles_first:  # then the store's first snapshot gives them their rights
        _ = roles.app, roles.operator, roles.tenant("acme")
    with perdure.open(roles.owner) as store:
        for name in ("acme", "globex"):
            fill(store.tenant(name), name)
        store.snapshot("s")
        for name in ("acme", "globex"):
            change(store.tenant(name), name)
    for url in (roles.app, roles.tenant("acme")):
        with perdure.open(url, tenant="acme") as store:
            snapshot = store.get_snapshot("s")
            assert {info.name for info in snapshot.threads()} == {"acme-thread", "acme-fork"}
            assert snapshot.memory("users", "alice").get("acme-key").value == {"secret": "acme"}  # type: ignore[union-attr]
            assert snapshot.thread("acme-thread").load().state["secret"] == "acme"
            with sandbox(snapshot) as box:
                assert box.thread("acme-thread").load().state["secret"] == "acme"
                assert box.get_run("acme-run").status == "waiting"
                with pytest.raises(perdure.NotFound):
                    box.thread("globex-thread").load()
                with pytest.raises(perdure.NotFound):
                    box.get_run("globex-run")
            store.thread("acme-thread").save(
                {"secret": "written by the role"}
            )  # its triggers need no rights of its own
            with pytest.raises(PerdureError, match="operator role"):
                store.snapshot("not by an application")
            with pytest.raises(PerdureError):
                snapshot.release()
    with perdure.open(roles.tenant("acme"), tenant="acme") as store:
        store.ops.erase("acme-thread", forks=True)
        assert store.get_snapshot("s").threads() == []
    with roles.connect(roles.tenant("acme")) as connection:
        mine = {row[0] for row in connection.execute("SELECT tenant FROM tenant WHERE name = 'acme'")}
        for table in tenant_tables(roles):
            if table.endswith("_past"):
                gone = connection.execute(f"DELETE FROM {table} RETURNING tenant".encode())
                assert {row[0] for row in gone} <= mine
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(f"UPDATE {table} SET died = died".encode())
        for statement in (b"UPDATE epoch SET epoch = 1", b"DELETE FROM snapshot"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
    with perdure.open(roles.operator, tenant="globex") as store:
        assert {info.name for info in store.get_snapshot("s").threads()} == {"globex-thread", "globex-fork"}
        store.snapshot("by the operator").release()
        store.get_snapshot("s").release()
