"""A connection that sees an SQLite store as it was at a snapshot (`storage/versions.py`)."""

from __future__ import annotations

import apsw

from perdure.storage.domains import versioned_tables


def show(connection: apsw.Connection, epoch: int) -> None:
    """Let this SQLite connection see every versioned table as it was: a temporary view comes before the table of its
    name, and nothing can be written to a view. Tables and columns are those that domains declare, not the file's."""
    for table in versioned_tables().values():
        columns = ", ".join(("tenant", *table.names))
        connection.execute(
            f"""CREATE TEMP VIEW {table.name} AS SELECT {columns} FROM main.{table.name} WHERE +stamp <= {epoch:d}
            UNION ALL SELECT {columns} FROM main.{table.name}_past WHERE stamp <= {epoch:d} AND died > {epoch:d}"""
        )
