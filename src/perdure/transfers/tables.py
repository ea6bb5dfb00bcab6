"""The statements that read the rows of one thread or run, and write them to another store under other numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from perdure.storage.domains import Table
from perdure.storage.program import Rows, Sql, Statement


class TableCopy(NamedTuple):
    """The statements that copy rows of a table. They decrypt columns when reading, and encrypt them when writing."""

    table: Table
    select: Sql  # :tenant, :number, :limit, :offset
    insert: Sql
    drop: Sql  # :tenant, :number

    def rows(self, tenant: int, number: int, limit: int = 2**62, offset: int = 0) -> Statement:
        return self.select(tenant=tenant, number=number, limit=limit, offset=offset)

    def inserts(self, tenant: int, rows: Rows, **changed: Any) -> list[Statement]:
        """Return the statements that write rows to another store. `changed` has new values of columns."""
        columns = self.table.names
        changed = {name: value for name, value in changed.items() if name in columns}
        return [self.insert(tenant=tenant, **dict(zip(columns, row, strict=True)) | changed) for row in rows]


def table_copy(table: Table, where: str = "1 = 1") -> TableCopy:
    """Return the statements for those rows of one thread or run (`Table.owner`) that meet a condition."""
    columns, names = table.names, ", ".join(table.names)
    source = f"FROM {table.name} WHERE tenant = :tenant AND {table.owner} = :number"
    return TableCopy(
        table,
        Sql(
            f"SELECT {names} {source} AND {where} ORDER BY {', '.join(table.key)} LIMIT :limit OFFSET :offset",
            opens=table.opens(columns),
        ),
        insert_into(table),
        Sql(f"DELETE {source}"),
    )


def insert_into(table: Table, otherwise: str = "") -> Sql:
    """Return the statement that writes a row with all its columns. `otherwise` is its ON CONFLICT clause."""
    names = ("tenant", *table.names)
    return Sql(
        f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)}){otherwise}",
        seals=table.encrypted_columns,
    )
