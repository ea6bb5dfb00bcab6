"""A connection that sees an SQLite store as it was at a snapshot (`storage/versions.py`)."""

from __future__ import annotations

import apsw

from perdure.storage.domains import versioned_tables


def show(connection: apsw.Connection, epoch: int) -> None:
    """Show every versioned table as it was at an epoch to this connection.

    A temporary view hides the table of its name, and cannot be written to. The names of tables and columns are those
    that domains declare, never the file's.
    """
    for table in versioned_tables().values():
        columns = ", ".join(("tenant", *table.names))
        connection.execute(
            f"""CREATE TEMP VIEW {table.name} AS SELECT {columns} FROM main.{table.name} WHERE +stamp <= {epoch:d}
            UNION ALL SELECT {columns} FROM main.{table.name}_past WHERE stamp <= {epoch:d} AND died > {epoch:d}"""
        )
