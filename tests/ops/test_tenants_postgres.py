"""Tenants that PostgreSQL keeps apart: what each kind of role sees, and that nothing was forgotten."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from role_kit import Roles, fill, look_at_role, tenant_tables
from statements import named_statements
from tcp_proxy import WireProxy

import perdure
from perdure.cli import main
from perdure.errors import OpenError, UsageError
from perdure.ops.roles import make_role
from perdure.storage.migrate import migrations
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.testing.postgres_server import PostgresServer, _binaries

# Not a tenant's: which store it is, which schema, what queues allow, how large it is. Its columns are not its rows.
OF_THE_STORE = {"decision", "meta", "migration", "prepared", "queue", "size_sample"}


@pytest.fixture
def two(roles: Roles) -> Roles:
    """A store in which two tenants have something, written by its owner."""
    with perdure.open(roles.owner) as store:
        for name in ("acme", "globex"):
            fill(store.tenant(name), name)
    return roles


# --- nothing was forgotten


def test_every_table_with_a_tenant_is_protected_against_its_owner_too(roles: Roles) -> None:
    with roles.connect(roles.owner) as connection:
        found = connection.execute(
            """SELECT c.relname::text, c.relrowsecurity, c.relforcerowsecurity,
                (SELECT count(*) FROM pg_policy p WHERE p.polrelid = c.oid AND p.polpermissive)
            FROM pg_class c WHERE c.relnamespace = 'perdure'::regnamespace AND c.relkind IN ('r', 'p')"""
        ).fetchall()
    state = {name: (enabled, forced, policies > 0) for name, enabled, forced, policies in found}
    assert set(tenant_tables(roles)) | OF_THE_STORE == set(state)
    assert {name for name, protected in state.items() if protected != (True, True, True)} == {"migration"}


def test_no_function_runs_with_its_owners_rights_and_no_view_hides_a_table(roles: Roles) -> None:
    with roles.connect(roles.owner) as connection:
        [definers] = connection.execute(
            "SELECT count(*) FROM pg_proc WHERE pronamespace = 'perdure'::regnamespace AND prosecdef"
        ).fetchone() or (None,)
        [views] = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'perdure'::regnamespace AND relkind IN ('v', 'm')"
        ).fetchone() or (None,)
        # What the policies call was resolved when it was made: a search_path cannot change what it means.
        texts = connection.execute(
            """SELECT p.proname::text FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
            WHERE p.pronamespace = 'perdure'::regnamespace AND l.lanname = 'sql' AND p.prosqlbody IS NULL"""
        ).fetchall()
    assert (definers, views, texts) == (0, 0, [])


def test_every_statement_on_a_tenants_rows_says_whose() -> None:
    """The driver tells the server by the parameter `tenant`; without it the application's role would find nothing.
    (The doctor is about the whole store, and says so to a role that does not see it.)"""
    texts = "".join(migration.adds for migration in migrations("postgres"))
    of_tenants = set(re.findall(r"^CREATE TABLE (\w+)", texts, re.MULTILINE)) - OF_THE_STORE
    silent: set[str] = set()
    for name, statement in named_statements():
        if name.startswith("perdure.ops.doctor") or re.search(r":tenant(_name)?\b", statement.postgres):
            continue
        if of_tenants & set(re.findall(r"(?:FROM|JOIN|INTO|UPDATE)\s+(\w+)", statement.postgres, re.IGNORECASE)):
            silent.add(name)
    assert silent == KNOWN_TO_BE_ABOUT_ALL


# Each is for those who see all tenants, or is given the tenant beside what its text needs.
KNOWN_TO_BE_ABOUT_ALL = {
    "perdure.ops.overview._TENANTS",  # the names of tenants, for those who see them
    "perdure.transfers.transfer._KEYS",  # whether anything in the store is encrypted
    "perdure.runs.journal.claiming._RUNNING",  # what a queue allows: counted over all tenants that the worker sees
    "perdure.runs.journal.claiming._TENANTS",
    "perdure.transfers.catalogue._RESTORED",  # copies of the whole store
    "perdure.ops.health._COPIES",  # these too: they are known to every role
    "perdure.transfers.fencing._TASKS",  # a store that continues an earlier point in time is fenced as a whole
    "perdure.transfers.fencing._RUNNING",
    "perdure.transfers.fencing._FENCES",
    "perdure.transfers.fencing._GENERATIONS",
    "perdure.transfers.whole.USED",  # a whole store is copied by its owner or an operator
    "perdure.regions.replication.USED",
    "perdure.regions.replication._ERASED",
    "perdure.regions.promotion._CUT",
    "perdure.regions.drill._COUNT_RUNS",  # two servers of its own
    "perdure.transfers.verify._TENANTS",  # restored and repaired stores are checked as a whole
    "perdure.storage.postgres.tenants._BOUND_HERE",
    "perdure.testing.clock._NEXT",  # a test sets the time of a whole store
    "perdure.testing.clock._QUEUES",
}


# --- the application's role


def test_without_a_tenant_the_application_sees_nothing(two: Roles) -> None:
    with two.connect(two.app) as connection:
        for table in tenant_tables(two):
            found = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))).fetchone()
            assert found == (0,), table
        assert connection.execute("SELECT key FROM meta").fetchall() == [("store",)]
        for statement in ("UPDATE thread SET name = 'taken'", "DELETE FROM run", "DELETE FROM tenant_role"):
            try:
                assert connection.execute(statement.encode()).rowcount == 0, statement
            except psycopg.errors.InsufficientPrivilege:
                assert "tenant_role" in statement


def test_with_a_tenant_it_sees_that_one_and_writes_no_others_rows(two: Roles) -> None:
    with two.connect(two.app) as connection:
        numbers = _numbers(two)
        connection.execute("SELECT set_config('perdure.tenant', %s, false)", [str(numbers["acme"])])
        assert connection.execute("SELECT DISTINCT name FROM thread ORDER BY 1").fetchall() == [
            ("acme-fork",),
            ("acme-thread",),
        ]
        assert connection.execute("SELECT name FROM tenant").fetchall() == [("acme",)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            connection.execute("UPDATE thread SET tenant = %s", [numbers["globex"]])
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            connection.execute("INSERT INTO blob (tenant, hash, body) VALUES (%s, '', '')", [numbers["globex"]])
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            connection.execute("INSERT INTO tenant (tenant, name) VALUES (99, 'new')")


def _numbers(roles: Roles) -> dict[str, int]:
    with roles.connect(roles.owner) as connection:
        return {name: number for number, name in connection.execute("SELECT tenant, name FROM tenant")}


def test_two_tenants_through_the_application_see_only_their_own(roles: Roles) -> None:
    with perdure.open(roles.app, tenant="acme") as acme, perdure.open(roles.app, tenant="globex") as globex:
        for store, name in ((acme, "acme"), (globex, "globex"), (acme.tenant("third"), "third")):
            fill(store, name)
        for store, name in ((acme, "acme"), (globex, "globex"), (globex.tenant("third"), "third")):
            assert sorted(info.name for info in store.threads()) == [f"{name}-fork", f"{name}-thread"]
            assert [info.id for info in store.runs()] == [f"{name}-run"]
            assert store.thread(f"{name}-thread").load().state == {"secret": name, "number": 2}
            assert store.ops.verify().ok
        [question] = acme.questions()
        acme.answer(question.run, "yes")
        assert globex.questions()[0].run == "globex-run"


def test_a_tenants_own_statement_cannot_be_pointed_at_another(two: Roles) -> None:
    """What protects against a mistake: a number that belongs to somebody else finds nothing under our setting."""
    numbers = _numbers(two)
    look = Sql("SELECT name FROM thread WHERE tenant = :other")
    driver = PostgresDriver(two.app)

    def program() -> Program[list[tuple[Any, ...]]]:
        [rows] = yield Batch(look(tenant=numbers["acme"], other=numbers["globex"]), last=True)
        return rows

    assert driver.run(Transaction(program)) == []
    driver.close()


def test_one_transaction_may_be_about_several_tenants_each_under_its_own(two: Roles) -> None:
    numbers = _numbers(two)
    mine = Sql("SELECT count(*) FROM thread WHERE tenant = :tenant")
    every = Sql("SELECT count(*) FROM thread")
    driver = PostgresDriver(two.app)

    def program(last: bool) -> Program[list[Any]]:
        acme, globex = numbers["acme"], numbers["globex"]
        found = yield Batch(mine(tenant=acme), every(), mine(tenant=globex), every(tenant=globex), mine(tenant=acme))
        more = yield Batch(every(), mine(tenant=acme), last=last)
        return [rows[0][0] for rows in (*found, *more)]

    async def later() -> Any:
        return await driver.arun(Transaction(lambda: program(True), write=True))

    assert driver.run(Transaction(lambda: program(True))) == [2] * 7
    assert driver.run(Transaction(lambda: program(False), write=True)) == [2] * 7
    assert asyncio.run(later()) == [2] * 7
    driver.close()


@pytest.mark.parametrize("prepare", [True, False])
def test_a_save_stays_one_round_trip(roles: Roles, postgres_server: PostgresServer, prepare: bool) -> None:
    app = roles.name("app")
    assert roles.app
    with WireProxy(postgres_server.port) as proxy:
        url = proxy.url(roles.database).replace("//postgres@", f"//{app}@")
        with perdure.open(url, tenant="acme", prepare=prepare) as store:
            thread = store.thread("t")
            thread.save({"n": 0})
            for number in range(1, 4):
                proxy.reset()
                thread.save({"n": number})
                assert (proxy.turns, proxy.syncs) == (1, 1), proxy.kinds
            if prepare:
                # Bind, Describe, Execute for the setting and for the save; one Sync.
                assert "".join(proxy.kinds) == "BDEBDES"


def test_the_setting_ends_with_its_transaction(roles: Roles) -> None:
    setting = Sql("SELECT current_setting('perdure.tenant', true), current_setting('perdure.tenant_name', true)")
    with perdure.open(roles.app, tenant="acme", pool_size=1) as store:
        store.thread("t").save({"n": 1})
        store.thread("t").load()
        driver: Any = store._context.driver

        def program() -> Program[list[tuple[Any, ...]]]:
            [rows] = yield Batch(setting(), last=True)
            return rows

        assert set(driver.run(Transaction(program))[0]) <= {"", None}


def test_what_is_about_all_tenants_is_refused_not_answered_with_nothing(roles: Roles) -> None:
    with perdure.open(roles.app) as store, pytest.raises(UsageError, match="perdure store role operator"):
        perdure.Worker(store, [], all_tenants=True).run(until_idle=True)


# --- operators, owners, superusers


def test_operators_work_for_all_tenants(two: Roles) -> None:
    @perdure.durable(name="for operators")
    def greet(who: str) -> str:
        return f"hello {who}"

    with perdure.open(two.app) as app:
        for name in ("acme", "globex"):
            app.tenant(name).start(greet, name, id="greet")
    with perdure.open(two.operator) as store:
        worker = perdure.Worker(store, [greet], all_tenants=True)
        worker.run(until_idle=True)
        assert worker.counts == {"done": 2}
        assert store.tenant("acme").get_run("greet").result() == "hello acme"
    with two.connect(two.operator) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("UPDATE tenant_role SET tenant = 1")


def test_operators_make_backups_and_others_are_refused(two: Roles, tmp_path: Path) -> None:
    with perdure.open(two.operator) as store:
        assert store.ops.backup(tmp_path / "all.backup").bytes > 0
    for url in (two.app, two.tenant("acme")):
        with perdure.open(url, tenant="acme") as store, pytest.raises(UsageError, match="operator"):
            store.ops.backup(tmp_path / "part.backup")


def test_a_dump_carries_the_policies_and_the_rights(two: Roles, postgres_server: PostgresServer) -> None:
    acme, app = two.tenant("acme"), two.app
    program, there = _binaries(), f"restored_{two.database}"
    dumped = subprocess.run([program / "pg_dump", two.owner], capture_output=True, check=True).stdout
    url = postgres_server.create_database(there)
    try:
        subprocess.run(
            [program / "psql", "-v", "ON_ERROR_STOP=1", "-q", url], input=dumped, capture_output=True, check=True
        )
        with two.connect(app.rsplit("/", 1)[0] + f"/{there}") as connection:
            assert connection.execute("SELECT count(*) FROM thread").fetchone() == (0,)
        with perdure.open(acme.rsplit("/", 1)[0] + f"/{there}", tenant="acme") as store:
            assert sorted(info.name for info in store.threads()) == ["acme-fork", "acme-thread"]
            assert store.ops.verify().ok
    finally:
        postgres_server.drop_database(there)


def test_an_owner_who_is_no_superuser_goes_on_as_before(roles: Roles) -> None:
    owner = roles.plain("owner")
    roles.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(*map(sql.Identifier, (roles.database, owner))))
    with perdure.open(roles.url(owner), schema="theirs") as store:
        store.thread("t").save({"n": 1})
        store.tenant("acme").thread("t").save({"n": 2})
        assert store.thread("t").load().state == {"n": 1}
        assert store.ops.verify().ok
    found = look_at_role(roles.url(owner), schema="theirs")
    assert (found.sees, found.owner, found.superuser, found.gaps) == ("everything", True, False, ())
    make_role(roles.url(owner), "app", roles.plain("their_app"), schema="theirs")
    with perdure.open(roles.url(roles.name("their_app")), schema="theirs", tenant="acme") as store:
        assert store.thread("t").load().state == {"n": 2}


def test_the_owner_can_be_held_too(two: Roles) -> None:
    """FORCE: an owner that gives its right away sees nothing either."""
    owner = two.plain("held_owner")
    two.execute(
        f"""DO $$ DECLARE each record; BEGIN
        FOR each IN SELECT relname FROM pg_class WHERE relnamespace = 'perdure'::regnamespace AND relkind = 'r' LOOP
            EXECUTE format('ALTER TABLE perdure.%I OWNER TO {owner}', each.relname);
        END LOOP; END $$"""
    )
    two.execute(f"GRANT USAGE ON SCHEMA perdure TO {owner}")
    with two.connect(two.url(owner)) as connection:
        assert connection.execute("SELECT count(*) FROM thread").fetchone() == (0,)
    two.execute(f"ALTER TYPE perdure.sees_every_tenant OWNER TO {owner}")
    with two.connect(two.url(owner)) as connection:
        assert connection.execute("SELECT count(*) FROM thread").fetchone() == (4,)
    two.execute("ALTER TYPE perdure.sees_every_tenant OWNER TO postgres")


# --- opening


def test_a_role_that_may_see_nothing_is_refused(roles: Roles) -> None:
    role = roles.plain("stranger")
    with pytest.raises(OpenError, match=r"permission denied for schema perdure.*perdure store role"):
        perdure.open(roles.url(role))
    roles.execute(f"GRANT USAGE ON SCHEMA perdure TO {role}")
    roles.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA perdure TO {role}")
    with pytest.raises(OpenError, match="may see no tenant at all"):
        perdure.open(roles.url(role))
    with roles.connect(roles.url(role)) as connection:
        assert connection.execute("SELECT count(*) FROM tenant").fetchone() == (0,)


def test_a_role_that_may_not_make_or_update_the_schema_says_who_can(roles: Roles) -> None:
    with pytest.raises(OpenError, match=r"is not there yet.*open it once as its owner"):
        perdure.open(roles.app, schema="other")
    roles.execute(f"DELETE FROM perdure.migration WHERE version = {len(migrations('postgres'))}")
    with pytest.raises(OpenError, match=r"needs an update.*open it once as its owner"):
        perdure.open(roles.app)


def test_a_bound_role_opens_its_tenant_only(roles: Roles) -> None:
    url = roles.tenant("acme")
    with perdure.open(url, tenant="acme") as store:
        fill(store, "acme")
        assert store.ops.verify().ok
        with pytest.raises(UsageError, match=r"bound to the tenant 'acme'.*tenant='acme'"):
            store.tenant("globex").thread("t").save({})
    with perdure.open(url) as store, pytest.raises(UsageError, match="bound to the tenant 'acme'"):
        store.threads()


# --- the commands


def test_roles_prints_sql_that_can_be_run_and_changes_nothing(roles: Roles, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = roles.name("o'\"; DROP TABLE thread; --")
    assert main(["store", "role", "tenant", hostile, "--tenant", "a'; --", "--store", roles.owner]) == 0
    text = capsys.readouterr().out
    assert "PASSWORD" not in text
    with roles.connect(roles.owner) as connection:
        assert connection.execute("SELECT count(*) FROM pg_roles WHERE rolname = %s", [hostile]).fetchone() == (0,)
        roles._made.append(hostile)
        connection.execute(text.encode())
        assert connection.execute("SELECT role::text FROM tenant_role").fetchall() == [(hostile,)]
    with perdure.open(roles.url(hostile), tenant="a'; --") as store:
        store.thread("t").save({"n": 1})


def test_the_doctor_says_what_holds_a_role(roles: Roles, capsys: pytest.CaptureFixture[str]) -> None:
    def says(url: str) -> str:
        main(["doctor", "--store", url, "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        return next(str(one["message"]) for one in findings if one["check"] == "roles")

    assert "to one tenant at a time" in says(roles.app)
    assert "to tenant 'acme'" in says(roles.tenant("acme"))
    assert "sees all tenants" in says(roles.owner)
    assert "is an operator and sees all tenants" in says(roles.operator)


def test_roles_check_finds_what_reaches_around_it(roles: Roles) -> None:
    app = roles.name("app")
    assert look_at_role(roles.app).held
    roles.execute(f"GRANT TRUNCATE ON perdure.thread TO {app}")
    roles.execute(f"GRANT CREATE ON SCHEMA perdure TO {app}")
    strong = roles.plain("strong", "BYPASSRLS")
    roles.execute(f"GRANT {strong} TO {app}")
    roles.execute("ALTER TABLE perdure.run NO FORCE ROW LEVEL SECURITY")
    found = look_at_role(roles.app)
    assert not found.held
    assert found.gaps == ("run",)
    assert found.rights == (
        "TRUNCATE, REFERENCES or TRIGGER on thread",
        "CREATE on the schema",
        f"membership of {strong}",
    )


@pytest.mark.parametrize("attributes", ["LOGIN SUPERUSER", "LOGIN BYPASSRLS"])
def test_a_role_that_nothing_can_hold_is_refused(roles: Roles, attributes: str) -> None:
    role = roles.plain("strong", attributes)
    with pytest.raises(UsageError, match="Nothing was changed"):
        make_role(roles.owner, "tenant", role, tenant="acme")
    member = roles.plain("member")
    roles.execute(f"GRANT {role} TO {member}")
    with pytest.raises(UsageError, match=f'can become "{role}"'):
        make_role(roles.owner, "app", member)
    with roles.connect(roles.owner) as connection:
        assert connection.execute("SELECT count(*) FROM tenant_role").fetchone() == (0,)


def test_a_role_can_be_made_one_of_another_kind(roles: Roles) -> None:
    role = roles.plain("changing")
    for kind, sees in (("operator", "everything"), ("app", "chosen"), ("tenant", "bound"), ("app", "chosen")):
        make_role(roles.owner, kind, role, tenant="acme" if kind == "tenant" else None)  # type: ignore[arg-type]
        assert look_at_role(roles.url(role)).sees == sees


@pytest.mark.parametrize(
    "given",
    [
        ["store", "role", "app"],
        ["store", "role", "tenant", "x"],
        ["store", "role", "app", "x", "--tenant", "acme"],
        ["store", "role", "app", "pg_x"],
        ["store", "role", "app", ""],
        ["store", "role", "nonsense"],
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(roles: Roles, given: list[str]) -> None:
    assert main([*given, "--store", roles.owner]) == 2


def test_roles_are_postgresqls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "role", "app", "x", "--store", "agent.db"]) == 2
    assert "roles are PostgreSQL's" in capsys.readouterr().err
