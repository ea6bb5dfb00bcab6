"""Versioned tables: what a table held at an earlier epoch can still be read.

An *epoch* counts snapshots. Each row has the epoch of its last change (`stamp`); triggers set it, and copy the old row
to `<table>_past` with the epoch in which it `died`, if a snapshot that is still kept can see it. So

    a row is visible at snapshot S   ⇔   stamp <= S < died        (in the table itself nothing has died)

and a view of that shows the table as it was. Some deleted rows are kept although no snapshot can see them: the intents
of effects, runs and threads (`Table.remembered`). So a restore knows which effects began since, also if their
entries were removed. The database does all of it: no statement of any layer knows of epochs, and none can forget them.

All of that is derived from what domains declare (`Table`). A store's first snapshot makes it; before, it costs nothing.
A migration of the schema brings it up to date in its own transaction (`reconcile_sqlite`, `version_postgres`): a new
table is versioned, and a new column gets its place in the past, with its default for older rows.

On PostgreSQL each writer holds ROW SHARE on the table `epoch` from its first change to its commit (`keep_…`),
and taking a snapshot needs EXCLUSIVE: no transaction has changes on both sides of a snapshot. SQLite has one writer.
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
# A transaction that waits for a lock makes all others wait behind it. So it gives up soon, and is tried again.
SHORT_WAITS = Sql(sqlite="SELECT 1", postgres="SELECT set_config('lock_timeout', '100ms', true)")
# held: the newest snapshot that is kept, -1 if none is. token: two stores with one epoch and two tokens have parted.
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
    """Whether the store has ever had a snapshot."""
    [rows] = yield Batch(_INSTALLED())
    return bool(rows)


def forget(*removals: tuple[str, str], **params: int) -> Program[None]:
    """Remove what snapshots keep of a table's rows: pairs of a table and a condition. Erasing does."""
    if (yield from installed()):
        yield Batch(*(Sql(f"DELETE FROM {table}_past WHERE {where}")(**params) for table, where in removals))


def install(tables: Sequence[Table], dialect: str) -> Program[None]:
    """Version these tables, if they are not yet; in a transaction of its own on PostgreSQL, since it locks them. May
    raise Busy there: then it is worth another try."""
    if (yield from installed()):
        return
    if dialect == "postgres":
        names = ", ".join(table.name for table in tables)
        yield Batch(SHORT_WAITS(), Sql(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")())
        if (yield from installed()):  # by another process that was first
            return
        [[(schema,)]] = yield Batch(Sql(postgres="SELECT current_schema()::text")())
        yield Batch(*(Sql(postgres=text)() for text in version_postgres(schema, tables)))
    else:
        yield Batch(*(Sql(sqlite=text)() for text in _version_sqlite(tables)))


def reconcile_sqlite(tables: Sequence[Table], version: int) -> Program[None]:
    """Bring what snapshots need up to date in a store that has had one: inside of the migration to this version, which
    has the tables."""
    if (yield from installed()):
        yield Batch(*(Sql(sqlite=text)() for text in _version_sqlite(tables, version)))


def analyse(tables: Sequence[str]) -> Program[None]:
    """Let PostgreSQL take its samples of these tables: without, it joins the views of a snapshot by scanning them."""
    yield Batch(Sql(sqlite="SELECT 1", postgres=f"ANALYZE {', '.join(tables)}")())


def _version_sqlite(tables: Sequence[Table], version: int | None = None) -> list[str]:
    return [*_SQLITE, *(text for table in tables for text in _sqlite(table, version))]


def _sqlite(owned: Table, version: int | None) -> list[str]:
    """Return the statements that make a table's past, triggers and indexes. `version`: they are there as of the version
    before, and are brought up to date."""
    table, columns = owned.name, ["tenant", *(column.name for column in owned.columns)]
    key = owned.key if owned.layout == "number" else owned.primary_key
    if version in (None, owned.since):
        texts = [
            f"ALTER TABLE {table} ADD COLUMN stamp INTEGER DEFAULT 0",
            f"CREATE TABLE {table}_past AS SELECT *, 0 AS died FROM {table} WHERE 0",
        ]
    else:  # rows of the past have the default of a column that is newer than they are
        texts = [
            f"ALTER TABLE {table}_past ADD COLUMN {new.name} {column_type(new, 'sqlite')}"
            f" DEFAULT {new.default or 'NULL'}"
            for new in owned.columns
            if new.since == version
        ]
    names = ", ".join((*columns, "stamp", "died"))
    old = ", ".join(f"OLD.{column}" for column in (*columns, "stamp"))
    keep = f"INSERT INTO {table}_past ({names}) SELECT {old}, epoch FROM epoch WHERE held >= OLD.stamp"
    this = " AND ".join(f"{column} = NEW.{column}" for column in key)
    stamp = f"UPDATE OR FAIL {table} SET stamp = (SELECT epoch FROM epoch) WHERE {this}"
    texts += [f"DROP TRIGGER IF EXISTS {table}_{event}" for event in ("made", "changed", "gone")]
    texts += [
        # The stamp is set by a statement of its own: an index that names it is then written once per snapshot only.
        # OR FAIL, and no NOT NULL: what cannot be undone in part needs no journal of the statement.
        f"CREATE TRIGGER {table}_made AFTER INSERT ON {table} WHEN NEW.stamp = 0 BEGIN {stamp}; END",
        # OF: setting the stamp alone calls no trigger again.
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
