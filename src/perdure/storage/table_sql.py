"""The SQL that creates the tables that domains declare (`domains.py`), for both databases.

Migrations (`migrate.py`) run it. Names come from declarations alone, never from data or from a store.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.storage.domains import OF_TENANT, Column, Domain, Index, RowPolicy, Table
from perdure.storage.program import Dialect

_TYPES: dict[Dialect, dict[str, str]] = {
    "sqlite": {
        "int": "INTEGER", "small": "INTEGER", "real": "REAL", "text": "TEXT", "ordered": "TEXT", "bytes": "BLOB",
    },
    "postgres": {
        "int": "bigint", "small": "smallint", "real": "double precision", "text": "text",
        "ordered": 'text COLLATE "C"', "bytes": "bytea", "name": "name",
    },
}  # fmt: skip
_TENANT = Column("tenant", "int")


def column_type(column: Column, dialect: Dialect) -> str:
    """Return the type of a column, as a cast names it."""
    return _TYPES[dialect][column.type].partition(" COLLATE")[0]


def additions(domains: Sequence[Domain], dialect: Dialect, version: int) -> list[str]:
    """Return the statements that add the tables, columns and indexes of a version."""
    tables = _tables(domains, dialect)
    texts = [create_table(table, dialect) for table in tables if table.since == version]
    for table in tables:
        added = [column for column in table.columns if column.since == version > table.since]
        texts += [f"ALTER TABLE {table.name} ADD COLUMN {_column(column, dialect)}" for column in added]
        texts += [_create_index(table, index) for index in table.indexes if _since(table, index) == version]
        if dialect == "postgres":
            texts += _storage(table, version)
    return texts


def changes(domains: Sequence[Domain], dialect: Dialect, version: int) -> list[str]:
    """Return the other statements of a version, which run after its additions."""
    due = [change for domain in domains for change in domain.changes if change.since == version]
    texts = [text for change in due if (text := change.sqlite if dialect == "sqlite" else change.postgres)]
    if dialect == "postgres":  # last: policies call functions that a change has made
        new = [table for table in _tables(domains, dialect) if table.since == version]
        texts += [text for table in new for text in protect(table.name, policies_of(table))]
    return texts


def _tables(domains: Sequence[Domain], dialect: Dialect) -> list[Table]:
    return [
        table
        for domain in domains
        for table in domain.tables
        if table.only in ("", dialect) and not (table.volatile and dialect == "sqlite")
    ]


def create_table(table: Table, dialect: Dialect) -> str:
    """Return the statement that makes a table, with the columns that it had at first."""
    numbered = dialect == "sqlite" and table.layout == "number"
    columns = [column for column in table.columns if column.since <= table.since]
    if table.of_tenant:
        columns.insert(0, _TENANT)
    parts = [_column(column, dialect, numbered and (column.name,) == table.key) for column in columns]
    if not numbered:
        parts.append(f"PRIMARY KEY ({', '.join(table.primary_key)})")
    if table.refers_to:
        by = ", ".join((table.primary_key[0], table.key[-1]))
        parts.append(f"FOREIGN KEY ({by}) REFERENCES {table.refers_to} ({by})")
    unlogged = "UNLOGGED " if table.volatile and dialect == "postgres" else ""
    text = f"CREATE {unlogged}TABLE {table.name} ({', '.join(parts)})"
    if dialect == "sqlite":
        return text + (" WITHOUT ROWID" if table.layout == "key" else "")
    return text + (f" WITH (fillfactor = {table.fillfactor})" if table.fillfactor < 100 else "")


def _column(column: Column, dialect: Dialect, numbered: bool = False) -> str:
    text = f"{column.name} {_TYPES[dialect][column.type]}"
    if numbered:
        text += " PRIMARY KEY"
    elif column.identity and dialect == "postgres":
        text += " GENERATED ALWAYS AS IDENTITY"
    elif not column.null:
        text += " NOT NULL"
    if column.default is not None:
        text += f" DEFAULT {column.default}"
    return text + (f" CHECK ({column.check})" if column.check else "")


def _since(table: Table, part: Index | Column) -> int:
    return max(table.since, part.since)


def _create_index(table: Table, index: Index) -> str:
    where = f" WHERE {index.where}" if index.where else ""
    return f"CREATE {'UNIQUE ' * index.unique}INDEX {index.name} ON {table.name} ({index.on}){where}"


def _storage(table: Table, version: int) -> list[str]:
    # CREATE TABLE takes STORAGE from PostgreSQL 16 on.
    return [
        f"ALTER TABLE {table.name} ALTER COLUMN {column.name} SET STORAGE EXTERNAL"
        for column in table.columns
        if column.compressed and _since(table, column) == version
    ]


def policies_of(table: Table) -> tuple[RowPolicy, ...]:
    return ((OF_TENANT, *table.policies)) if table.of_tenant else table.policies


def protect(table: str, policies: Sequence[RowPolicy]) -> list[str]:
    """Return the statements that let PostgreSQL show roles the rows of these policies alone."""
    # FORCE: for the owner too, who passes by a right that it can give away.
    return [
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
        *(
            f"CREATE POLICY {policy.name} ON {table}{' FOR SELECT' * policy.reads_only} USING ({policy.using})"
            for policy in policies
        ),
    ]


def versions(domains: Sequence[Domain]) -> list[int]:
    """Return the numbers that declarations name as their version of the schema."""
    numbers = {change.since for domain in domains for change in domain.changes}
    for table in (table for domain in domains for table in domain.tables):
        numbers |= {table.since, *(column.since for column in table.columns), *(index.since for index in table.indexes)}
    return sorted(numbers)
