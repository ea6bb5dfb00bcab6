"""A tenant's own login role with any SQL it likes: it reads nothing of another tenant's, and changes nothing there.

Every attack is run as a role that is bound to `acme`. Whatever comes back (rows, notices, errors with their details,
plans, copied text) must not name the other tenant, `globex`; and what `globex` has is the same afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from role_kit import Roles, fill, roles_of, tenant_tables

import perdure


class Place:
    """A store with two tenants, and a connection of the attacker's."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        with perdure.open(roles.owner) as store:
            for name in ("acme", "globex"):
                fill(store.tenant(name), name)
        self.url, self.victim = roles.tenant("acme"), roles.tenant("globex")
        with roles.connect(roles.owner) as connection:
            connection.execute("ANALYZE")
            self.numbers = {name: number for number, name in connection.execute("SELECT tenant, name FROM tenant")}
            connection.execute("INSERT INTO blob (tenant, hash, body) SELECT tenant, 'globex', 'globex' FROM tenant")
            connection.execute("INSERT INTO meta (key, value) SELECT 'maintenance ' || tenant, '1' FROM tenant")
            connection.execute("INSERT INTO queue (queue, tokens, filled_at) VALUES ('globex', 0, 0)")
            # A schema of the attacker's own, as "$user" in the default search_path expects.
            me = sql.Identifier(roles.name("acme"))
            connection.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}").format(me, me))
        with perdure.open(roles.owner) as store:  # with a snapshot, triggers run as the owner
            self.snapshot = store.snapshot("before", note="before globex-thread was restored")
            self.epoch = self.snapshot._row.epoch
            for name in ("acme", "globex"):
                store.tenant(name).thread(f"{name}-fork").save({"secret": name})
        self.names = {
            "acme": str(self.numbers["acme"]),
            "globex": str(self.numbers["globex"]),
            "me": roles.name("acme"),
            "them": roles.name("globex"),
        }
        self.tables = tenant_tables(roles)

    def seen(self, *statements: str) -> str:
        """All that the attacker gets to see: every row, notice, and error, as text. Goes on after errors."""
        got: list[str] = []
        with self.roles.connect(self.url) as connection:
            connection.add_notice_handler(lambda notice: got.append(_told(notice)))
            for text in statements:
                try:
                    got += _results(connection, text.format(**self.names))
                except psycopg.Error as error:
                    got.append(f"{error.sqlstate} {_told(error.diag)}")
        return "\n".join(got)

    def fingerprint(self) -> list[Any]:
        """All that is not the attacker's."""
        found: list[Any] = []
        with self.roles.connect(self.roles.owner) as connection:
            for table in (*self.tables, "meta", "queue", "migration"):
                name = sql.Identifier(table)
                mine = sql.SQL(
                    "NOT coalesce(to_jsonb(t) @> {}, false) AND coalesce(to_jsonb(t) ->> 'key', '') NOT LIKE {}"
                )
                where = mine.format(
                    sql.Literal(f'{{"tenant": {self.names["acme"]}}}'), sql.Literal(f"%{self.names['acme']}")
                )
                query = sql.SQL(
                    "SELECT md5(coalesce(string_agg(t::text, ',' ORDER BY t::text), '')), count(*) FROM {} t WHERE "
                )
                found.append((table, connection.execute(query.format(name) + where).fetchone()))
            found.append(
                connection.execute(
                    """SELECT string_agg(c.relname || coalesce(c.relacl::text, '') || c.relowner || c.relrowsecurity
                        || c.relforcerowsecurity || c.relhastriggers || c.relhasrules, ',' ORDER BY c.relname)
                    FROM pg_class c WHERE c.relnamespace = 'perdure'::regnamespace"""
                ).fetchone()
            )
            found.append(connection.execute(RIGHTS).fetchone())
        return found


def _told(diag: Any) -> str:
    parts = (diag.message_primary, diag.message_detail, diag.message_hint, diag.context)
    return " ".join(str(part) for part in parts if part)


def _results(connection: psycopg.Connection[Any], text: str) -> list[str]:
    with connection.cursor() as cursor:
        if text.startswith("COPY") and "STDOUT" in text:
            with cursor.copy(text.encode()) as copy:
                return [bytes(part).decode() for part in copy]
        if text.startswith("COPY") and "STDIN" in text:
            with cursor.copy(text.encode()) as copy:
                copy.write(b"1\n")
            return []
        cursor.execute(text.encode())
        got: list[str] = []
        while True:
            if cursor.description is not None:
                got += [str(row) for row in cursor.fetchall()]
            else:
                got.append(f"{cursor.statusmessage}")
            if not cursor.nextset():
                return got


@pytest.fixture(scope="module")
def place(postgres_server: Any) -> Iterator[Place]:
    url = postgres_server.create_database("attacked")
    for roles in roles_of(url):
        yield Place(roles)
    postgres_server.drop_database("attacked")


SHADOW = (
    "CREATE TEMP TABLE tenant_role (role name, tenant bigint)",
    "INSERT INTO pg_temp.tenant_role VALUES (current_user, {globex})",
    "CREATE TYPE pg_temp.sees_every_tenant AS ENUM ()",
    "CREATE TYPE pg_temp.chooses_tenant AS ENUM ()",
    "CREATE FUNCTION pg_temp.has_type_privilege(regtype, text) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
    "CREATE FUNCTION pg_temp.visible_tenant() RETURNS bigint LANGUAGE sql AS 'SELECT {globex}::bigint'",
    "CREATE FUNCTION pg_temp.bound_tenant() RETURNS bigint LANGUAGE sql AS 'SELECT {globex}::bigint'",
    "CREATE FUNCTION pg_temp.may_see_every_tenant() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
    "SET search_path = pg_temp, perdure, pg_catalog",
    "SET perdure.tenant = '{globex}'",
)
LEAK = (
    """CREATE FUNCTION pg_temp.leak(anyelement) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS
    $$ BEGIN RAISE NOTICE 'leaked %', $1; RETURN true; END $$""",
    "CREATE FUNCTION pg_temp.same(text, text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS "
    "$$ BEGIN RAISE NOTICE 'compared % %', $1, $2; RETURN true; END $$",
    "CREATE OPERATOR pg_temp.=== (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_temp.same)",
)

RIGHTS = b"""SELECT (SELECT string_agg(typname || coalesce(typacl::text, ''), ',' ORDER BY typname) FROM pg_type
        WHERE typnamespace = 'perdure'::regnamespace),
    (SELECT string_agg(proname || coalesce(proacl::text, '') || coalesce(prosrc, ''), ',' ORDER BY proname) FROM pg_proc
        WHERE pronamespace = 'perdure'::regnamespace),
    (SELECT string_agg(rolname || rolsuper || rolcreaterole, ',' ORDER BY rolname) FROM pg_roles)"""
# What runs with the rights of whoever calls it: it takes what it sees, and gives the attacker the rights of all.
GREEDY = """BEGIN INSERT INTO {me}.loot SELECT current_user, tenant || ' ' || name FROM perdure.thread;
    GRANT USAGE ON TYPE perdure.sees_every_tenant TO {me}; RETURN true; EXCEPTION WHEN insufficient_privilege THEN
    RETURN true; END"""
LOOT = (
    "CREATE TABLE {me}.loot (who text, what text)",
    "GRANT ALL ON {me}.loot TO PUBLIC",
    "GRANT USAGE ON SCHEMA {me} TO PUBLIC",
)

READS: dict[str, tuple[str, ...]] = {
    "plain": (
        "SELECT * FROM thread",
        "SELECT * FROM run",
        "SELECT * FROM journal",
        "TABLE tenant",
        "TABLE tenant_role",
    ),
    "by number": ("SELECT * FROM thread WHERE tenant = {globex}", "SELECT * FROM tag WHERE tenant <> {acme}"),
    "the setting": (
        "SELECT set_config('perdure.tenant', '{globex}', false)",
        "SELECT set_config('perdure.tenant_name', 'glo' || 'bex', false) IS NULL",
        "SELECT name FROM thread",
        "SELECT name FROM tenant",
        "SET perdure.tenant = '{globex}'",
        "BEGIN; SET LOCAL perdure.tenant = '{globex}'; SELECT name FROM thread; COMMIT",
        "ALTER ROLE {me} SET perdure.tenant = '{globex}'",
        "SELECT name FROM thread",
    ),
    "other roles": (
        "SET ROLE postgres",
        "SET SESSION AUTHORIZATION postgres",
        "SELECT set_config('role', 'postgres', false)",
        "SELECT set_config('session_authorization', 'postgres', false)",
        "RESET ROLE; RESET SESSION AUTHORIZATION; RESET ALL",
        "SET search_path = perdure",
        "SELECT name FROM thread",
        "DISCARD ALL",
        "SELECT name FROM perdure.thread",
    ),
    "row_security off": ("SET row_security = off", "SELECT name FROM thread", "TABLE tenant", "DELETE FROM thread"),
    "views": (
        "CREATE TEMP VIEW mine AS SELECT * FROM perdure.thread",
        "SELECT * FROM mine",
        "CREATE TEMP VIEW barrier WITH (security_barrier) AS SELECT * FROM perdure.run",
        "SELECT id FROM barrier",
        "CREATE TEMP TABLE taken AS SELECT * FROM perdure.thread",
        "SELECT * FROM taken",
        "CREATE VIEW perdure.theirs AS SELECT * FROM perdure.thread",
        "CREATE MATERIALIZED VIEW perdure.stale AS SELECT * FROM perdure.thread",
    ),
    "blocks": (
        "DO $$ DECLARE r record; BEGIN FOR r IN SELECT * FROM thread LOOP RAISE NOTICE '%', r; END LOOP; END $$",
        "DO $$ DECLARE r record; BEGIN EXECUTE 'SET LOCAL ROLE postgres'; END $$",
        "DO $$ BEGIN PERFORM set_config('perdure.tenant', '{globex}', true);"
        " RAISE NOTICE '%', (SELECT string_agg(name, ',') FROM thread); END $$",
    ),
    "prepared": (
        "PREPARE p (bigint) AS SELECT name FROM thread WHERE tenant = $1",
        "EXECUTE p ({globex})",
        "PREPARE q AS SELECT name FROM thread",
        "EXECUTE q; EXECUTE q; EXECUTE q; EXECUTE q; EXECUTE q; EXECUTE q; EXECUTE q",
    ),
    "queries of all forms": (
        "WITH t AS MATERIALIZED (SELECT * FROM thread) SELECT * FROM t",
        "WITH RECURSIVE t AS (SELECT tenant, name FROM thread UNION SELECT o.tenant, o.name FROM thread o, t) TABLE t",
        "SELECT t.name, l.* FROM tenant t, LATERAL (SELECT name FROM thread WHERE tenant = t.tenant) l",
        "SELECT (SELECT string_agg(name, ',') FROM thread), array(SELECT name FROM run JOIN thread USING (tenant))",
        "SELECT name FROM thread TABLESAMPLE SYSTEM (100)",
        "SELECT ctid, xmin, tableoid, * FROM thread WHERE ctid >= '(0,0)'",
        "SELECT name FROM thread FOR UPDATE",
        "SELECT name FROM thread UNION ALL SELECT id FROM run UNION ALL SELECT question FROM ask",
        "SELECT json_agg(t) FROM thread t",
        "SELECT rank() OVER (ORDER BY name), name FROM thread",
        "BEGIN; DECLARE c CURSOR WITH HOLD FOR SELECT name FROM thread; COMMIT; FETCH ALL FROM c",
        "SELECT query_to_xml('SELECT * FROM perdure.thread', true, true, '')",
        "SELECT table_to_xml('perdure.thread', true, true, '')",
        "SELECT * FROM ts_stat('SELECT to_tsvector(name) FROM perdure.thread')",
    ),
    "plans": (
        "EXPLAIN (ANALYZE, VERBOSE) SELECT * FROM thread",
        "EXPLAIN SELECT * FROM thread WHERE name LIKE 'glo%'",
        "EXPLAIN (VERBOSE) DELETE FROM run",
    ),
    "leaking functions": (
        *LEAK,
        "SELECT count(*) FROM thread WHERE pg_temp.leak(name)",
        "SELECT count(*) FROM tenant WHERE pg_temp.leak(name)",
        "SELECT count(*) FROM ask WHERE pg_temp.leak(question) AND tenant = {globex}",
        "SELECT count(*) FROM thread WHERE name OPERATOR(pg_temp.===) 'x'",
        "SELECT count(*) FROM thread a JOIN thread b ON pg_temp.leak(b.name) AND a.name <> b.name",
        "UPDATE thread SET name = name WHERE pg_temp.leak(name)",
    ),
    "leaking errors": (
        "SELECT name::int FROM thread",
        "SELECT 1 / (CASE WHEN name LIKE 'globe_-%' THEN 0 ELSE 1 END) FROM thread",
        "SELECT name::int FROM tenant WHERE tenant = {globex}",
        "SELECT id::int FROM run WHERE tenant = {globex}",
    ),
    "shadows": (*SHADOW, "SELECT name FROM perdure.thread", "SELECT name FROM perdure.tenant", "TABLE perdure.run"),
    "definers": (
        "CREATE FUNCTION pg_temp.peek() RETURNS SETOF text LANGUAGE sql SECURITY DEFINER "
        "AS 'SELECT name FROM perdure.thread'",
        "SELECT * FROM pg_temp.peek()",
        "CREATE FUNCTION perdure.peek() RETURNS bigint LANGUAGE sql AS 'SELECT 1'",
        "CREATE OR REPLACE FUNCTION perdure.visible_tenant() RETURNS bigint LANGUAGE sql AS 'SELECT {globex}::bigint'",
    ),
    "operators inside the triggers of snapshots": (
        *LOOT,
        f"CREATE FUNCTION {{me}}.eq(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ {GREEDY} $$",
        f"CREATE FUNCTION {{me}}.ne(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ {GREEDY} $$",
        *(
            f"CREATE OPERATOR {{me}}.{sign} (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {{me}}.eq)"
            for sign in ("<", "<=", "=", ">", ">=")
        ),
        *(
            f"CREATE OPERATOR {{me}}.{sign} (LEFTARG = text, RIGHTARG = text, FUNCTION = {{me}}.ne)"
            for sign in ("=", "<>")
        ),
        "SET search_path = {me}, pg_catalog",
        "UPDATE perdure.thread SET metadata = metadata",
        "SELECT * FROM {me}.loot",
        "SELECT name FROM perdure.thread",
        "DROP TABLE {me}.loot",
    ),
    "casts inside the triggers of snapshots": (
        "CREATE TYPE pg_temp.evil AS (v text)",
        "CREATE TEMP TABLE loot (who text, what text)",
        "GRANT ALL ON loot TO PUBLIC",
        "CREATE FUNCTION pg_temp.go(e pg_temp.evil) RETURNS text LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO pg_temp.loot SELECT current_user, tenant || ' ' || name FROM perdure.thread; "
        "GRANT USAGE ON TYPE perdure.sees_every_tenant TO {me}; RETURN 'x'; END $$",
        "CREATE CAST (pg_temp.evil AS text) WITH FUNCTION pg_temp.go(pg_temp.evil) AS ASSIGNMENT",
        "CREATE TEMP TABLE y AS SELECT * FROM perdure.thread",
        "ALTER TABLE y ALTER name TYPE pg_temp.evil USING ROW(name)::pg_temp.evil",
        "UPDATE y SET stamp = 0",
        "CREATE TRIGGER k BEFORE DELETE ON y FOR EACH ROW EXECUTE FUNCTION perdure.keep_thread()",
        "DELETE FROM y",
        "SELECT * FROM loot",
        "SELECT name FROM perdure.thread",
    ),
    "the past": (
        "SELECT * FROM thread_past",
        "SELECT * FROM memory_item_past",
        "SELECT set_config('perdure.at', (SELECT max(epoch)::text FROM snapshot), false)",
        "SELECT * FROM perdure_at.thread",
        "SELECT * FROM perdure_at.memory_space",
        "SELECT * FROM snapshot",
        "SELECT * FROM snapshot_note",
    ),
    "copies": (
        "COPY thread TO STDOUT",
        "COPY (SELECT * FROM tag) TO STDOUT",
        "COPY tenant TO STDOUT",
        "COPY thread TO '/tmp/taken'",
        "COPY thread TO PROGRAM 'cat'",
        "SELECT pg_read_file('PG_VERSION')",
    ),
    "statistics": (
        "SELECT * FROM pg_stats WHERE schemaname = 'perdure'",
        "SELECT * FROM pg_statistic",
        "SELECT usename, query FROM pg_stat_activity WHERE usename <> current_user",
        "SELECT * FROM pg_stats_ext",
    ),
    "of the store": (
        "SELECT * FROM queue",
        "SELECT key FROM meta WHERE key LIKE '%{globex}'",
        "SELECT last_value FROM number",
    ),
}

WRITES: dict[str, tuple[str, ...]] = {
    "updates": (
        "UPDATE thread SET name = 'taken' WHERE tenant = {globex}",
        "UPDATE thread SET tenant = {globex}",
        "UPDATE run SET status = 'cancelled' WHERE tenant <> {acme}",
        "WITH t AS (UPDATE thread SET name = 'taken' WHERE tenant = {globex} RETURNING *) SELECT * FROM t",
        "UPDATE tag SET value = 'x' FROM thread t WHERE t.tenant = {globex}",
        "UPDATE tenant SET name = 'x'",
        "UPDATE meta SET value = 'x'",
        "UPDATE queue SET concurrency = 0",
        "UPDATE migration SET version = 99",
    ),
    "deletes": (
        "DELETE FROM thread WHERE tenant = {globex}",
        "DELETE FROM run USING tenant t WHERE run.tenant = t.tenant AND t.tenant = {globex}",
        "DELETE FROM blob WHERE hash = 'globex' AND tenant <> {acme}",
        "DELETE FROM meta WHERE key = 'store'",
        "DELETE FROM meta WHERE key LIKE '%{globex}'",
        "DELETE FROM queue",
        "DELETE FROM tenant",
        "TRUNCATE thread",
        "TRUNCATE blob CASCADE",
    ),
    "inserts": (
        "INSERT INTO blob (tenant, hash, body) VALUES ({globex}, 'x', 'x')",
        "INSERT INTO blob (tenant, hash, body) VALUES ({globex}, 'globex', '') "
        "ON CONFLICT (tenant, hash) DO UPDATE SET body = ''",
        "INSERT INTO blob (tenant, hash, body) VALUES ({globex}, 'globex', '') ON CONFLICT DO NOTHING",
        "INSERT INTO pin (tenant, thread, name, tree, record, at) SELECT {globex}, 1, 'x', 1, 1, 1",
        "MERGE INTO blob b USING (SELECT {globex}::bigint AS tenant) s ON b.tenant = s.tenant "
        "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT (tenant, hash, body) VALUES (s.tenant, 'm', 'm')",
        "INSERT INTO copy (id, kind, place, tenant, at, bytes) VALUES ('x', 'backup', '/', NULL, 1, 1)",
        "INSERT INTO copy (id, kind, place, tenant, at, bytes) VALUES ('y', 'export', '/', {globex}, 1, 1)",
        "INSERT INTO meta (key, value) VALUES ('store', 'x') ON CONFLICT (key) DO UPDATE SET value = 'x'",
        "INSERT INTO meta (key, value) VALUES ('maintenance {globex}', '9') ON CONFLICT(key) DO UPDATE SET value = '9'",
        "INSERT INTO queue (queue, tokens, filled_at) VALUES ('mine', 0, 0)",
        "COPY blob (tenant) FROM STDIN",
    ),
    "bindings": (
        "INSERT INTO tenant_role (role, tenant) VALUES ('x', {globex})",
        "UPDATE tenant_role SET tenant = {globex}",
        "DELETE FROM tenant_role",
        "INSERT INTO tenant (tenant, name) VALUES (99, 'mine')",
    ),
    "the past": (
        "CREATE TEMP TABLE x AS SELECT * FROM perdure.memory_item; "
        "CREATE TRIGGER k BEFORE DELETE ON x FOR EACH ROW EXECUTE FUNCTION perdure.keep_memory_item(); "
        "UPDATE x SET tenant = {globex}, key = 'forged', stamp = 0; DELETE FROM x",
        "INSERT INTO thread_past SELECT t.*, 99 FROM thread t",
        "DELETE FROM thread_past WHERE tenant = {globex}",
        "DELETE FROM thread_past WHERE tenant <> {acme}",
        "UPDATE epoch SET epoch = 1",
        "UPDATE snapshot SET good = 1",
        "DELETE FROM snapshot",
        "INSERT INTO snapshot_note (token, note) SELECT token, 'mine' FROM snapshot",
        "ALTER FUNCTION perdure.keep_thread() SET search_path = {me}",
        "SELECT perdure.keep_thread()",
    ),
    "the tables themselves": (
        "ALTER TABLE thread DISABLE ROW LEVEL SECURITY",
        "ALTER TABLE thread NO FORCE ROW LEVEL SECURITY",
        "DROP POLICY tenants ON thread",
        "CREATE POLICY mine ON thread USING (true)",
        "ALTER POLICY tenants ON thread USING (true)",
        "ALTER TABLE thread OWNER TO {me}",
        "GRANT ALL ON thread TO {me}",
        "GRANT USAGE ON TYPE sees_every_tenant TO {me}",
        "ALTER TYPE sees_every_tenant OWNER TO {me}",
        "CREATE TRIGGER spy AFTER INSERT ON thread FOR EACH ROW EXECUTE FUNCTION run_is_due()",
        "CREATE RULE spy AS ON INSERT TO thread DO ALSO NOTHING",
        "CREATE INDEX spy ON thread (name)",
        "ALTER TABLE thread ADD COLUMN spy text",
        "CREATE TABLE probe (tenant bigint, hash bytea, FOREIGN KEY (tenant, hash) REFERENCES perdure.blob)",
        "CREATE TABLE child () INHERITS (thread)",
        "CREATE STATISTICS spy ON tenant, name FROM thread",
        "DROP TABLE thread",
        "ALTER ROLE {them} PASSWORD 'mine'",
        "GRANT {them} TO {me}",
        "ALTER ROLE {me} BYPASSRLS",
        "SELECT setval('number', 1)",
    ),
}


@pytest.mark.parametrize("kind", READS)
def test_nothing_of_another_tenant_can_be_read(place: Place, kind: str) -> None:
    before = place.fingerprint()
    seen = place.seen(*READS[kind])
    assert "globex" not in seen.replace("'globex'", "").replace(place.names["them"], ""), seen
    if kind in ("plain", "the setting", "other roles", "views", "blocks", "prepared", "shadows", "definers", "copies"):
        assert "acme-thread" in seen  # it did look
    assert place.fingerprint() == before


@pytest.mark.parametrize("kind", WRITES)
def test_nothing_of_another_tenant_or_of_the_store_can_be_changed(place: Place, kind: str) -> None:
    before = place.fingerprint()
    for statement in WRITES[kind]:
        place.seen(statement)
        place.seen("BEGIN", statement, "COMMIT")
        place.seen("SET perdure.tenant = '{globex}'", statement)
        assert place.fingerprint() == before, statement


def test_every_row_that_can_be_seen_is_its_own(place: Place) -> None:
    with place.roles.connect(place.url) as connection:
        for table in place.tables:
            found = connection.execute(
                sql.SQL("SELECT DISTINCT tenant FROM {}").format(sql.Identifier(table))
            ).fetchall()
            assert found in ([], [(place.numbers["acme"],)]), table


def test_a_role_cannot_write_into_its_past(place: Place) -> None:
    """Whatever it says of `stamp`: a row that is made or changed now is not seen at a snapshot taken before."""
    place.seen(
        "INSERT INTO blob (tenant, hash, body, stamp) VALUES ({acme}, 'forged', 'forged', 0)",
        "UPDATE blob SET body = 'changed', stamp = 0 WHERE hash = 'globex'",
        "INSERT INTO blob (tenant, hash, body) VALUES ({acme}, 'globex', '') "
        "ON CONFLICT (tenant, hash) DO UPDATE SET body = 'again', stamp = 0",
    )
    now = place.seen("SELECT encode(hash, 'escape'), encode(body, 'escape') FROM blob ORDER BY hash")
    assert now == "('forged', 'forged')\n('globex', 'again')"
    then = place.seen(
        f"SELECT set_config('perdure.at', '{place.epoch}', false) IS NULL",
        "SELECT encode(hash, 'escape'), encode(body, 'escape') FROM perdure_at.blob",
    )
    assert then == "(False,)\n('globex', 'globex')"


def test_a_role_of_a_tenant_reads_no_notes_of_snapshots(place: Place) -> None:
    assert place.snapshot.note == "before globex-thread was restored"
    with perdure.open(place.url, tenant="acme") as store:
        assert [(one.name, one.note) for one in store.snapshots()] == [("before", None)]


def test_keys_tell_nothing_of_what_others_have(place: Place) -> None:
    """Whether a row is there or not, the answer is the same: policies are asked before keys and foreign keys."""
    there = "INSERT INTO blob (tenant, hash, body) VALUES ({globex}, 'globex', '')"
    not_there = "INSERT INTO blob (tenant, hash, body) VALUES ({globex}, 'nothing', '')"
    assert place.seen(there) == place.seen(not_there)
    there = "INSERT INTO run_blob (tenant, run, hash) VALUES ({globex}, 1, 'globex')"
    not_there = "INSERT INTO run_blob (tenant, run, hash) VALUES ({globex}, 1, 'nothing')"
    assert place.seen(there) == place.seen(not_there)
    there, not_there = (f"INSERT INTO tenant (tenant, name) VALUES (77, '{name}')" for name in ("globex", "nobody"))
    assert place.seen(there) == place.seen(not_there)
    # Its own foreign keys lead to its own rows only.
    assert "23503" in place.seen("INSERT INTO run_blob (tenant, run, hash) VALUES ({acme}, 1, 'nothing')")


def test_what_is_heard_says_nothing_of_whom(place: Place) -> None:
    with place.roles.connect(place.url) as connection:
        connection.execute("LISTEN perdure_perdure")
        with perdure.open(place.victim, tenant="globex") as store:

            @perdure.durable(name="heard by others")
            def agent() -> None:
                return None

            store.start(agent, id="heard")
        [heard] = connection.notifies(timeout=10, stop_after=1)
    assert heard.payload == ""


def test_the_tenant_still_works_after_all_this(place: Place) -> None:
    with perdure.open(place.url, tenant="acme") as store:
        store.thread("more").save({"n": 1})
        assert store.thread("acme-thread").load().state == {"secret": "acme", "number": 2}
    with perdure.open(place.victim, tenant="globex") as store:
        assert store.thread("globex-thread").load().state == {"secret": "globex", "number": 2}
        assert "globex-run" in [info.id for info in store.runs()]
