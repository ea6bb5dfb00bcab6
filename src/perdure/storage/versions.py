"""Versioned tables: they keep old rows, so that a snapshot can be read after later changes.

An *epoch* counts snapshots. Triggers set `stamp`, the epoch of a row's last change, and copy an old row that a snapshot
can see to `<table>_past`, with the epoch in which it `died`. A row is visible at snapshot S if stamp <= S < died. On
PostgreSQL a lock on table `epoch` keeps a transaction from having changes on both sides of a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.storage.domains import Table
from perdure.storage.program import Batch, Program, Sql
from perdure.storage.sqlite.statistics import describe
from perdure.storage.table_sql import column_type
from perdure.storage.versions_postgres import version_postgres

_INSTALLED = Sql(
    sqlite="SELECT 1 FROM sqlite_schema WHERE name = 'epoch'",
    postgres="SELECT 1 WHERE to_regclass('epoch') IS NOT NULL",
)
# A transaction that waits for a table lock makes all later ones wait behind it. So it gives up soon, and is retried.
SHORT_WAITS = Sql(sqlite="SELECT 1", postgres="SELECT set_config('lock_timeout', '100ms', true)")
# held: the epoch of the newest existing snapshot, -1 if there is none. token: if two stores have different tokens for
# one epoch, their histories have diverged.
_SQLITE = (
    """CREATE TABLE IF NOT EXISTS epoch (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL,
        held INTEGER NOT NULL)""",
    "INSERT OR IGNORE INTO epoch (one, epoch, held) VALUES (1, 1, -1)",
    """CREATE TABLE IF NOT EXISTS snapshot (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL UNIQUE, token TEXT NOT NULL,
        taken_at INTEGER NOT NULL, good INTEGER NOT NULL, keep_until INTEGER, manifest TEXT NOT NULL
    ) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS snapshot_note (token TEXT PRIMARY KEY, note TEXT NOT NULL) WITHOUT ROWID",
)


def installed() -> Program[bool]:
    """Return whether the store has ever had a snapshot."""
    [rows] = yield Batch(_INSTALLED())
    return bool(rows)


def forget(*removals: tuple[str, str], **params: int) -> Program[None]:
    """Delete past rows of tables, for erasing. `removals`: pairs of a table and a condition."""
    if (yield from installed()):
        yield Batch(*(Sql(f"DELETE FROM {table}_past WHERE {where}")(**params) for table, where in removals))


def install(tables: Sequence[Table], dialect: str) -> Program[None]:
    """Create the past tables and triggers, unless they exist.

    On PostgreSQL run it in a transaction of its own, because it locks the tables. It may raise Busy there: retry it."""
    if (yield from installed()):
        return
    if dialect == "postgres":
        names = ", ".join(table.name for table in tables)
        yield Batch(SHORT_WAITS(), Sql(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")())
        if (yield from installed()):  # another process was first
            return
        [[(schema,)]] = yield Batch(Sql(postgres="SELECT current_schema()::text")())
        yield Batch(*(Sql(postgres=text)() for text in version_postgres(schema, tables)))
    else:
        yield Batch(*(Sql(sqlite=text)() for text in _version_sqlite(tables)))


def reconcile_sqlite(tables: Sequence[Table], version: int) -> Program[None]:
    """Update the past tables and triggers of a store that has had a snapshot.

    Runs inside the migration to `version`. `tables`: all versioned tables of that version."""
    if (yield from installed()):
        yield Batch(*(Sql(sqlite=text)() for text in _version_sqlite(tables, version)))


def analyse(tables: Sequence[str]) -> Program[None]:
    """Run ANALYZE on these tables. Without it, PostgreSQL joins the views of a snapshot by scanning them."""
    yield Batch(Sql(sqlite="SELECT 1", postgres=f"ANALYZE {', '.join(tables)}")())


def _version_sqlite(tables: Sequence[Table], version: int | None = None) -> list[str]:
    return [*_SQLITE, *(text for table in tables for text in _sqlite(table, version))]


def _sqlite(owned: Table, version: int | None) -> list[str]:
    """Return the statements that create a table's past, triggers and indexes.

    With a `version`, they exist as of the version before it, and the statements update them."""
    table, columns = owned.name, ["tenant", *(column.name for column in owned.columns)]
    key = owned.key if owned.layout == "number" else owned.primary_key
    if version in (None, owned.since):
        texts = [
            f"ALTER TABLE {table} ADD COLUMN stamp INTEGER DEFAULT 0",
            f"CREATE TABLE {table}_past AS SELECT *, 0 AS died FROM {table} WHERE 0",
        ]
    else:  # past rows that are older than a column get its default
        texts = [
            f"ALTER TABLE {table}_past ADD COLUMN {new.name} {column_type(new, 'sqlite')}"
            f" DEFAULT {new.default or 'NULL'}"
            for new in owned.columns
            if new.since == version
        ]
    names = ", ".join((*columns, "stamp", "died"))
    old = ", ".join(f"OLD.{column}" for column in (*columns, "stamp"))
    keep = f"INSERT INTO {table}_past ({names}) SELECT {old}, epoch FROM epoch WHERE held >= OLD.stamp"
    same_row = " AND ".join(f"{column} = NEW.{column}" for column in key)
    stamp = f"UPDATE OR FAIL {table} SET stamp = (SELECT epoch FROM epoch) WHERE {same_row}"
    texts += [f"DROP TRIGGER IF EXISTS {table}_{event}" for event in ("made", "changed", "gone")]
    texts += [
        # A separate statement sets the stamp, so that an index on it is written only once per snapshot.
        # With OR FAIL and without NOT NULL, SQLite needs no statement journal.
        f"CREATE TRIGGER {table}_made AFTER INSERT ON {table} WHEN NEW.stamp = 0 BEGIN {stamp}; END",
        # OF …: setting only the stamp does not fire the trigger again.
        f"""CREATE TRIGGER {table}_changed AFTER UPDATE OF {", ".join(columns)} ON {table}
            WHEN OLD.stamp < (SELECT epoch FROM epoch) BEGIN {keep}; {stamp}; END""",
        f"""CREATE TRIGGER {table}_gone AFTER DELETE ON {table}
            BEGIN {keep} OR held >= 0 AND {owned.remembered.format(row="OLD")}; END""",
        f"CREATE INDEX IF NOT EXISTS {table}_past_key ON {table}_past ({', '.join(key)})",
    ]
    texts += [
        f"CREATE INDEX IF NOT EXISTS {table}_past_by_{look[-1]} ON {table}_past (tenant, {', '.join(look)})"
        for look in owned.looked_up
    ]
    if owned.finds_changes:
        texts += [
            f"CREATE INDEX IF NOT EXISTS {table}_stamp ON {table} (tenant, stamp)",
            f"DELETE FROM sqlite_stat1 WHERE idx = '{table}_stamp'",
            f"INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('{table}', '{table}_stamp', '{describe(2)}')",
        ]
    return texts
