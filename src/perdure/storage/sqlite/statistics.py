"""Statistics for SQLite's planner that describe the tables of a store as large.

Without statistics SQLite assumes that a tenant has ten rows, and reads all of them where an index leads to one. So
would real statistics of a store that is still small. A new store gets these before it has any row.
"""

from __future__ import annotations

from collections.abc import Collection

import apsw

_TENANTS = 100
_ROWS, _FEW_ROWS = 10**6, 10**4  # of a tenant, in a table and in a partial index
_SMALL = "100 10 1"
_INDEXES = """SELECT t.name, i.name, i.origin, i.partial, (SELECT count(*) FROM pragma_index_info(i.name))
    FROM pragma_table_list t, pragma_index_list(t.name) i
    WHERE t.schema = 'main' AND substr(t.name, -5) <> '_past'
        AND EXISTS (SELECT 1 FROM pragma_table_info(t.name) c WHERE c.name = 'tenant')"""


def write_statistics(connection: apsw.Connection, small: Collection[str]) -> None:
    """Describe all tables of tenants as large, except `small`. It runs in the transaction that makes the tables."""
    connection.execute("ANALYZE meta")  # makes the table of statistics
    connection.execute("DELETE FROM sqlite_stat1")
    for table, index, origin, partial, columns in connection.execute(_INDEXES).fetchall():
        # The statistics of a primary key have the table's name if the key is the table itself.
        name = table if origin == "pk" else index
        text = _SMALL if table in small else describe(int(str(columns)), partial=bool(partial))
        connection.execute("INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (?, ?, ?)", (table, name, text))
    connection.execute("ANALYZE sqlite_schema")  # loads the statistics


def describe(columns: int, *, partial: bool = False) -> str:
    """Return the statistics of an index that begins with the tenant: its rows, and how many of them share a prefix."""
    rows = _FEW_ROWS if partial else _ROWS
    shared = [max(1, rows // 10 ** (6 * at // max(1, columns - 1))) for at in range(columns)]
    return " ".join(map(str, (_TENANTS * rows, *shared)))
