"""A connection that sees an SQLite store as it was at a snapshot (`storage/versions.py`)."""

from __future__ import annotations

import apsw


def show(connection: apsw.Connection, epoch: int) -> None:
    """From here on this SQLite connection sees every versioned table as it was: a temporary view comes before the table
    of its name, and nothing can be written to a view."""
    found = connection.execute(
        """SELECT substr(t.name, 1, length(t.name) - 5), group_concat(c.name, ', ')
        FROM sqlite_schema t, pragma_table_info(t.name) c
        WHERE t.type = 'table' AND t.name LIKE '%\\_past' ESCAPE '\\' AND c.name NOT IN ('stamp', 'died')
        GROUP BY t.name"""
    ).fetchall()
    for table, columns in found:
        connection.execute(
            f"""CREATE TEMP VIEW {table} AS SELECT {columns} FROM main.{table} WHERE +stamp <= {epoch:d}
            UNION ALL SELECT {columns} FROM main.{table}_past WHERE stamp <= {epoch:d} AND died > {epoch:d}"""
        )
