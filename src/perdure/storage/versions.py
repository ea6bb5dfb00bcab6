"""Versioned tables: what a table held at an earlier epoch can still be read.

An *epoch* counts snapshots. Each row has the epoch of its last change (`stamp`); triggers set it, and copy the old row
to `<table>_past` with the epoch in which it `died`, if a snapshot that is still kept can see it. So

    a row is visible at snapshot S   ⇔   stamp <= S < died        (in the table itself nothing has died)

and a view of that shows the table as it was. The database does all of it: no statement of any layer knows of epochs,
and none can forget them. Columns, triggers and tables are made by a store's first snapshot; before, they cost nothing.

On PostgreSQL each writer holds ROW SHARE on the table `epoch` from its first change to its commit (`current_epoch`),
and taking a snapshot needs EXCLUSIVE: no transaction has changes on both sides of a snapshot. SQLite has one writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from perdure.storage.program import Batch, Program, Sql

# Further columns by which rows are looked up, besides the primary key: (tenant, …).
_LOOKUPS = {"thread": ("name",), "run": ("id",), "memory_space": ("path",), "memory_item": ("space", "key")}
_STAMPED = ("thread", "run", "memory_item", "label", "write")  # a difference starts from these: an index on the stamp
_INSTALLED = Sql(
    sqlite="SELECT 1 FROM sqlite_schema WHERE name = 'epoch'",
    postgres="SELECT 1 WHERE to_regclass('epoch') IS NOT NULL",
)
# A transaction that waits for a lock makes all others wait behind it. So it gives up soon, and is tried again.
SHORT_WAITS = Sql(sqlite="SELECT 1", postgres="SELECT set_config('lock_timeout', '100ms', true)")
# held: the newest snapshot that is kept, -1 if none is. token: two stores with one epoch and two tokens have parted.
_SQLITE = (
    "CREATE TABLE epoch (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, held INTEGER NOT NULL)",
    "INSERT INTO epoch (one, epoch, held) VALUES (1, 1, -1)",
    """CREATE TABLE snapshot (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL UNIQUE, token TEXT NOT NULL,
        taken_at INTEGER NOT NULL, note TEXT, good INTEGER NOT NULL, keep_until INTEGER, manifest TEXT NOT NULL
    ) WITHOUT ROWID""",
)


def installed() -> Program[bool]:
    """Whether the store has ever had a snapshot."""
    [rows] = yield Batch(_INSTALLED())
    return bool(rows)


def forget(*removals: tuple[str, str], **params: int) -> Program[None]:
    """Remove what snapshots keep of a table's rows: pairs of a table and a condition. Erasing does."""
    if (yield from installed()):
        yield Batch(*(Sql(f"DELETE FROM {table}_past WHERE {where}")(**params) for table, where in removals))


def install(tables: Sequence[str], dialect: str) -> Program[None]:
    """Version these tables, if they are not yet; in a transaction of its own on PostgreSQL, since it locks them. May
    raise Busy there: then it is worth another try."""
    if (yield from installed()):
        return
    if dialect == "postgres":
        yield Batch(SHORT_WAITS(), Sql(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")())
        if (yield from installed()):  # by another process that was first
            return
        text = (files("perdure.storage") / "schema" / "versions_postgres.sql").read_text("utf-8")
        yield Batch(Sql("SELECT set_config('perdure.tables', :tables, true)")(tables=" ".join(tables)))
        for statement in text.split(";;\n"):
            yield Batch(Sql(postgres=statement)())
        return
    columns = yield Batch(
        *(Sql("SELECT name, pk FROM pragma_table_info(:name) ORDER BY cid")(name=name) for name in tables)
    )
    texts = [*_SQLITE]
    for name, found in zip(tables, columns, strict=True):
        texts += _sqlite(name, [column for column, _ in found], [column for column, place in found if place])
    yield Batch(*(Sql(sqlite=text)() for text in texts))


def analyse(tables: Sequence[str]) -> Program[None]:
    """Let PostgreSQL take its samples of these tables: without, it joins the views of a snapshot by scanning them."""
    yield Batch(Sql(sqlite="SELECT 1", postgres=f"ANALYZE {', '.join(tables)}")())


def _sqlite(table: str, columns: Sequence[str], key: Sequence[str]) -> list[str]:
    old = ", ".join(f"OLD.{column}" for column in (*columns, "stamp"))
    new = " AND ".join(f"{column} = NEW.{column}" for column in key)
    keep = f"INSERT INTO {table}_past SELECT {old}, epoch FROM epoch WHERE held >= OLD.stamp"
    stamp = f"UPDATE OR FAIL {table} SET stamp = (SELECT epoch FROM epoch) WHERE {new}"
    texts = [
        f"ALTER TABLE {table} ADD COLUMN stamp INTEGER DEFAULT 0",
        f"CREATE TABLE {table}_past AS SELECT *, 0 AS died FROM {table} WHERE 0",
        f"CREATE INDEX {table}_past_key ON {table}_past ({', '.join(key)})",
        # The stamp is set by a statement of its own: an index that names it is then written once per snapshot only.
        # OR FAIL, and no NOT NULL: what cannot be undone in part needs no journal of the statement.
        f"CREATE TRIGGER {table}_made AFTER INSERT ON {table} WHEN NEW.stamp = 0 BEGIN {stamp}; END",
        # OF: setting the stamp alone calls no trigger again.
        f"""CREATE TRIGGER {table}_changed AFTER UPDATE OF {", ".join(columns)} ON {table}
            WHEN OLD.stamp < (SELECT epoch FROM epoch) BEGIN {keep}; {stamp}; END""",
        f"CREATE TRIGGER {table}_gone AFTER DELETE ON {table} BEGIN {keep}; END",
    ]
    if table in _LOOKUPS:
        texts.append(f"CREATE INDEX {table}_past_look ON {table}_past (tenant, {', '.join(_LOOKUPS[table])})")
    if table in _STAMPED:
        texts.append(f"CREATE INDEX {table}_stamp ON {table} (tenant, stamp)")
    return texts
