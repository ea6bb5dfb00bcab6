"""The rows of one thread or run in a table that a domain has registered: read here, written to another store."""

from __future__ import annotations

from typing import Any, NamedTuple

from perdure.storage.columns import ARGS, COLUMNS
from perdure.storage.domains import OwnedTable
from perdure.storage.program import Rows, Sql, Statement


class TableCopy(NamedTuple):
    """The statements for a table, whose encrypted columns are opened and sealed on the way."""

    table: OwnedTable
    scope: str  # the column of the thread's or run's number
    select: Sql  # :tenant, :number, :limit, :offset
    insert: Sql
    drop: Sql  # :tenant, :number

    def rows(self, tenant: int, number: int, limit: int = 2**62, offset: int = 0) -> Statement:
        return self.select(tenant=tenant, number=number, limit=limit, offset=offset)

    def inserts(self, tenant: int, rows: Rows, **changed: Any) -> list[Statement]:
        """The rows in another store, under other numbers."""
        columns = self.table.columns
        changed = {name: value for name, value in changed.items() if name in columns}
        return [self.insert(tenant=tenant, **dict(zip(columns, row, strict=True)) | changed) for row in rows]


def table_copy(table: OwnedTable, scope: str, where: str = "1 = 1") -> TableCopy:
    columns, names = table.columns, ", ".join(table.columns)
    secret = {
        column.label.partition(".")[2]: column
        for column in COLUMNS
        if column.label.partition(".")[0] == table.name and column is not ARGS
    }
    this = f"FROM {table.name} WHERE tenant = :tenant AND {scope} = :number"
    return TableCopy(
        table,
        scope,
        Sql(
            f"SELECT {names} {this} AND {where} ORDER BY {', '.join(table.key)} LIMIT :limit OFFSET :offset",
            opens={
                columns.index(name): column.at(*(columns.index(str(by)) for by in column.by))
                for name, column in secret.items()
            },
        ),
        Sql(
            f"INSERT INTO {table.name} (tenant, {names}) VALUES (:tenant, {', '.join(f':{name}' for name in columns)})",
            seals=secret,
        ),
        Sql(f"DELETE {this}"),
    )
