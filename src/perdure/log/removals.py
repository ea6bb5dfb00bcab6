"""From when on a store knows everything that there was: triggers write down until when a deleted row was current.

They see every deletion, of any cause: retention, erasing, a restore, a move to another store.
"""

from __future__ import annotations

from perdure.storage.domains import SchemaChange
from perdure.storage.program import SERVER_NOW, Batch, Program, Sql

_SQLITE_NOW = "CAST(unixepoch('now', 'subsec') * 1000 AS INTEGER) * 1000 + 1000"  # SQLite's clock has milliseconds
_UNTIL = Sql("SELECT kind, max(until_at) FROM removal WHERE tenant = :tenant GROUP BY kind")


def noticing_removals(table: str, until: str = "{now}", where: str = "1 = 1") -> SchemaChange:
    """Return the triggers of a table. `until`: until when a row was current; `where`: whether it was. {row} is the row.

    Only the latest time is kept. On PostgreSQL a row that another transaction has just written stays beside it, so that
    no deletion waits for another one.
    """
    in_sqlite = until.format(row="OLD", now=_SQLITE_NOW)
    later = f"SELECT 1 FROM removal WHERE tenant = OLD.tenant AND kind = '{table}' AND until_at >= {in_sqlite}"
    in_postgres, condition = until.format(row="gone", now=SERVER_NOW), where.format(row="gone")
    return SchemaChange(
        sqlite=f"""CREATE TRIGGER {table}_removed AFTER DELETE ON {table} WHEN {where.format(row="OLD")} BEGIN
            INSERT INTO removal (tenant, kind, until_at) SELECT OLD.tenant, '{table}', {in_sqlite}
                WHERE NOT EXISTS ({later});
            DELETE FROM removal WHERE tenant = OLD.tenant AND kind = '{table}' AND until_at < {in_sqlite}; END""",
        postgres=f"""
DO $do$ BEGIN EXECUTE format($made$
CREATE FUNCTION notice_removed_{table}() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO %1$I.removal (tenant, kind, until_at)
        SELECT gone.tenant, '{table}', max({in_postgres}) FROM gone WHERE {condition} GROUP BY gone.tenant
        ON CONFLICT DO NOTHING;
    DELETE FROM %1$I.removal WHERE ctid IN (
        SELECT r.ctid FROM %1$I.removal r WHERE r.kind = '{table}' AND r.until_at < (
            SELECT max(l.until_at) FROM %1$I.removal l WHERE l.tenant = r.tenant AND l.kind = r.kind)
        FOR UPDATE SKIP LOCKED);
    RETURN NULL;
END $$;
$made$, current_schema()); END $do$;
REVOKE ALL ON FUNCTION notice_removed_{table}() FROM PUBLIC;
CREATE TRIGGER {table}_removed AFTER DELETE ON {table} REFERENCING OLD TABLE AS gone FOR EACH STATEMENT
    EXECUTE FUNCTION notice_removed_{table}()""",
    )


def known_from(tenant: int) -> Program[dict[str, int]]:
    """Return from when on all rows of a table are known, by the table's name; 0 if none was ever removed."""
    [rows] = yield Batch(_UNTIL(tenant=tenant))
    return {"thread": 0, "run": 0, "memory_item": 0} | dict(rows)
