"""Roles for the tests of tenants: made as `perdure store role` makes them, with names of their own, and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql

import perdure
from perdure.ops.roles import Kind, make_role
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.postgres.tenants import TenantSecurity, tenant_security
from perdure.storage.program import Transaction


class Roles:
    """The roles of one database: `roles.app` is the URL of the application's, `roles.tenant("acme")` of a tenant's."""

    def __init__(self, url: str) -> None:
        self.owner = url
        self.database = url.rsplit("/", 1)[1]
        self._made: list[str] = []
        perdure.open(url).close()

    @property
    def app(self) -> str:
        return self._role("app", "app")

    @property
    def operator(self) -> str:
        return self._role("operator", "operator")

    def tenant(self, name: str) -> str:
        return self._role("tenant", name, name)

    def name(self, what: str) -> str:
        return f"{what}_{self.database}"

    def url(self, role: str) -> str:
        parts = urlsplit(self.owner)
        return f"postgresql://{quote(role)}@{parts.hostname}:{parts.port}{parts.path}"

    def plain(self, what: str, attributes: str = "LOGIN") -> str:
        """A role that Perdure has given nothing. Its name."""
        role = self.name(what)
        self.execute(sql.SQL("CREATE ROLE {} {}").format(sql.Identifier(role), sql.SQL(attributes)))
        self._made.append(role)
        return role

    def execute(self, statement: sql.Composed | str) -> None:
        """As the superuser."""
        with self.connect(self.owner) as connection:
            connection.execute(statement.encode() if isinstance(statement, str) else statement)

    def connect(self, url: str, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(url, autocommit=True, options="-c search_path=perdure", **options)

    def _role(self, kind: Kind, what: str, tenant: str | None = None) -> str:
        role = self.name(what)
        if role not in self._made:
            self._made.append(role)
            make_role(self.owner, kind, role, tenant=tenant)
        return self.url(role)

    def drop(self) -> None:
        with self.connect(self.owner) as connection:
            for role in reversed(self._made):
                if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone():
                    connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(role)))
                    connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def roles_of(url: str) -> Iterator[Roles]:
    """A store, and roles for it: what a fixture yields."""
    made = Roles(url)
    yield made
    made.drop()


TENANT_TABLES = """SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = 'perdure'::regnamespace
    AND c.relkind IN ('r', 'p') AND EXISTS (SELECT 1 FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attname = 'tenant' AND NOT a.attisdropped) ORDER BY 1"""


def tenant_tables(roles: Roles) -> list[str]:
    """Every table that has a tenant, as the catalog says."""
    with roles.connect(roles.owner) as connection:
        return [str(name) for (name,) in connection.execute(TENANT_TABLES.encode())]


def look_at_role(url: str, *, schema: str = "perdure") -> TenantSecurity:
    """How tenants are kept apart for the role of this URL."""
    driver = PostgresDriver(url, create=False, schema=schema)
    try:
        found: TenantSecurity = driver.run(Transaction(tenant_security))
        return found
    finally:
        driver.close()


def fill(store: perdure.Store, word: str) -> None:
    """Something in as many tables as the public API reaches, with `word` in all of it."""
    store.memory("users", "alice").put(f"{word}-key", {"secret": word})
    store.memory(f"{word}-space").put("theme", word)

    @perdure.step(name=f"look {word}")
    def look() -> str:
        return word

    @perdure.durable(name=f"agent {word}")
    def agent() -> str:
        found = look()
        return perdure.ask(f"{word}?") if found else ""

    thread = store.thread(f"{word}-thread", metadata={"who": word})
    for number in range(3):
        thread.save({"secret": word, "number": number}, note=word)
    thread.fork(name=f"{word}-fork")
    store.start(agent, id=f"{word}-run")
    perdure.Worker(store, [agent]).run(until_idle=True)
