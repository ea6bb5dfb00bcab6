"""The SQL that versions the tables of a store on PostgreSQL (`versions.py`), or brings that up to date.

Statements do nothing where what they make is there. The past is written by functions that run as the store's owner:
writers have no right to write it. So no role may attach such a function to a table of its own, and nothing in it is
looked up in a path that the caller chose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perdure.errors import OpenError
from perdure.storage.domains import OF_TENANT, RowPolicy, Table
from perdure.storage.table_sql import column_type, protect

_STORE = (
    # held: the newest snapshot that is kept; -1: none
    """CREATE TABLE IF NOT EXISTS epoch (one integer PRIMARY KEY CHECK (one = 1), epoch bigint NOT NULL,
        held bigint NOT NULL)""",
    "INSERT INTO epoch (one, epoch, held) VALUES (1, 1, -1) ON CONFLICT DO NOTHING",
)
_SNAPSHOTS = (
    # token: the epoch and chance; two stores with one epoch and two tokens have parted. manifest: JSON
    """CREATE TABLE IF NOT EXISTS snapshot (name text PRIMARY KEY, epoch bigint NOT NULL UNIQUE, token text NOT NULL,
        taken_at bigint NOT NULL, good integer NOT NULL, keep_until bigint, manifest text NOT NULL)""",
    # A note may name what belongs to one tenant.
    "CREATE TABLE IF NOT EXISTS snapshot_note (token text PRIMARY KEY, note text NOT NULL)",
)
# Snapshots are of all tenants: each may read at them; only those who work for all may take, release or annotate one.
_OPERATORS = RowPolicy("operators", "(SELECT may_see_every_tenant())")
_POLICIES = {"snapshot": (RowPolicy("readers", "true", reads_only=True), _OPERATORS), "snapshot_note": (_OPERATORS,)}
# FOR KEY SHARE takes ROW SHARE on the table until the transaction ends, and touches no row.
_KEEP = """CREATE OR REPLACE FUNCTION keep_{table}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $body$
    DECLARE
        now_epoch bigint;
        newest_kept bigint;
    BEGIN
        SELECT e.epoch, e.held INTO now_epoch, newest_kept FROM {schema}.epoch e
            LEFT JOIN (SELECT 1 AS one FROM {schema}.epoch WHERE false FOR KEY SHARE) AS writers ON true;
        IF TG_OP <> 'INSERT' AND OLD.stamp < now_epoch AND OLD.stamp <= newest_kept
            OR TG_OP = 'DELETE' AND newest_kept >= 0 AND {remembered} THEN
            INSERT INTO {schema}.{table}_past ({columns}, stamp, died) VALUES ({old}, OLD.stamp, now_epoch);
        END IF;
        IF TG_OP = 'DELETE' THEN
            RETURN OLD;
        END IF;
        NEW.stamp := now_epoch;
        RETURN NEW;
    END $body$"""
# The conditions stand outside of the union: only a union of bare tables can use their indexes in a join.
_VIEW = """CREATE OR REPLACE VIEW {at}.{table} WITH (security_invoker = true) AS SELECT {columns} FROM (
        SELECT {columns}, stamp, 9223372036854775807 AS died FROM {schema}.{table}
        UNION ALL SELECT {columns}, stamp, died FROM {schema}.{table}_past) versions
    WHERE stamp <= (SELECT nullif(current_setting('perdure.at', true), '')::bigint)
        AND died > (SELECT nullif(current_setting('perdure.at', true), '')::bigint)"""
# Roles that may read the store may read it at a snapshot; operators also take and release one. A role may delete its
# tenants' part of the past, since erasing does.
_GRANTS = """DO $grants$
DECLARE
    reader name;
BEGIN
    FOR reader IN SELECT DISTINCT r.rolname FROM pg_class c, aclexplode(c.relacl) a, pg_roles r
        WHERE c.oid = 'tenant'::regclass AND a.privilege_type = 'SELECT' AND r.oid = a.grantee
            AND r.oid <> c.relowner LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA {at} TO %I', reader);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA {at} TO %I', reader);
        EXECUTE format('GRANT %s ON epoch, snapshot, snapshot_note TO %I',
            CASE WHEN has_type_privilege(reader, 'sees_every_tenant', 'USAGE')
                THEN 'SELECT, INSERT, UPDATE, DELETE' ELSE 'SELECT' END, reader);
        EXECUTE format('GRANT SELECT, DELETE ON {past} TO %I', reader);
    END LOOP;
END $grants$"""


def version_postgres(schema: str, tables: Sequence[Table]) -> list[str]:
    if not re.fullmatch("[a-z_][a-z0-9_]*", schema):  # as stores are opened in
        raise OpenError(f"{schema!r} cannot be the schema of a store")
    quoted, at = f'"{schema}"', f'"{schema}_at"'
    texts = [*_STORE]
    # An empty schema that was left when a store was dropped may belong to another role.
    texts.append(f"DO $$ BEGIN IF to_regclass('snapshot') IS NULL THEN DROP SCHEMA IF EXISTS {at}; END IF; END $$")
    texts.append(f"CREATE SCHEMA IF NOT EXISTS {at}")
    for table in tables:
        texts += _past(table)
        names = ["tenant", *(column.name for column in sorted(table.columns, key=lambda column: column.since))]
        values = {
            "schema": quoted,
            "at": at,
            "table": table.name,
            "columns": ", ".join(names),
            "old": ", ".join(f"OLD.{name}" for name in names),
            "remembered": table.remembered.format(row="OLD"),
        }
        texts += [
            _KEEP.format(**values),
            f"REVOKE ALL ON FUNCTION keep_{table.name}() FROM PUBLIC",
            f"""CREATE OR REPLACE TRIGGER keep_past BEFORE INSERT OR UPDATE OR DELETE ON {table.name}
                FOR EACH ROW EXECUTE FUNCTION keep_{table.name}()""",
            _VIEW.format(**values),
        ]
    texts += _SNAPSHOTS
    for name, policies in _POLICIES.items():
        texts += _protect_again(name, policies)
    texts.append(_GRANTS.format(at=at, past=", ".join(f"{table.name}_past" for table in tables)))
    return texts


def _past(table: Table) -> list[str]:
    """Return the statements that make a table's past, with its indexes and policy."""
    name, past = table.name, f"{table.name}_past"
    texts = [
        f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS stamp bigint NOT NULL DEFAULT 0",
        f"CREATE TABLE IF NOT EXISTS {past} (LIKE {name})",
        f"ALTER TABLE {past} ADD COLUMN IF NOT EXISTS died bigint NOT NULL",
    ]
    texts += [  # rows of the past have the default of a column that is newer than they are
        f"ALTER TABLE {past} ADD COLUMN IF NOT EXISTS {new.name} {column_type(new, 'postgres')}"
        f" DEFAULT {new.default or 'NULL'}"
        for new in table.columns
        if new.since > table.since
    ]
    texts.append(f"CREATE INDEX IF NOT EXISTS {past}_key ON {past} ({', '.join(table.primary_key)})")
    texts += [
        f"CREATE INDEX IF NOT EXISTS {past}_by_{look[-1]} ON {past} (tenant, {', '.join(look)})"
        for look in table.looked_up
    ]
    if table.finds_changes:
        texts.append(f"CREATE INDEX IF NOT EXISTS {name}_stamp ON {name} (tenant, stamp)")
    return texts + _protect_again(past, (OF_TENANT,))


def _protect_again(table: str, policies: Sequence[RowPolicy]) -> list[str]:
    return [*(f"DROP POLICY IF EXISTS {policy.name} ON {table}" for policy in policies), *protect(table, policies)]
