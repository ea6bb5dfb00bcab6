"""A domain declares its tables, each once. Migrations, snapshots, rights, copies, erasing and repair follow from it.

What is added after a release says `since=` the next number; the greatest number is the version of the schema. What adds
nothing (filling a column, dropping an index) is a `SchemaChange`. A released declaration stays as it is. No SQL of a
lower layer names a table of an upper one: what scans a whole store asks the domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, NamedTuple

from perdure.storage.columns import EncryptedColumn
from perdure.storage.program import Flow, Program

# The modules that have a DOMAIN, the lowest layer first. They are imported when the domains are first asked for:
# whatever a process has imported, it knows every table of a store that it opens.
_MODULES = (
    "perdure.storage.store_tables",
    "perdure.log.domain",
    "perdure.runs.domain",
    "perdure.memory.domain",
    "perdure.teams.channel_tables",
)

# ordered: text that both databases order by its bytes. small: an int of two bytes. name: one of PostgreSQL's catalogue.
ColumnType = Literal["int", "small", "real", "text", "ordered", "bytes", "name"]
_PYTHON: dict[ColumnType, type] = {
    "int": int, "small": int, "real": float, "text": str, "ordered": str, "bytes": bytes, "name": str,
}  # fmt: skip


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: ColumnType
    null: bool = False
    # What identifies the row that an encrypted value belongs to: names of columns or parameters. None: not encrypted.
    encrypted: tuple[str, ...] | None = None
    hashed: bool = False  # the value ends with a hash of its own (`row_hashes.py`): nothing else covers it
    searched: bool = False  # encrypted one way, the same for the same value
    compressed: bool = False  # PostgreSQL need not try to compress it again
    identity: bool = False  # the database numbers the rows
    default: str | None = None  # SQL, for the rows that are there when the column is added
    check: str = ""
    since: int = 1

    @property
    def python_types(self) -> tuple[Any, ...]:
        """The types that a value of a sound row can have."""
        return (_PYTHON[self.type], type(None)) if self.null else (_PYTHON[self.type],)


class Index(NamedTuple):
    """An index. `on`: its columns as SQL, with the tenant."""

    name: str
    on: str
    unique: bool = False
    where: str = ""
    since: int = 1


class RowPolicy(NamedTuple):
    """Which rows a role of PostgreSQL may touch, as a condition in SQL."""

    name: str
    using: str
    reads_only: bool = False


OF_TENANT = RowPolicy("tenants", "(SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant())")


@dataclass(frozen=True)
class Table:
    """A table. If it is `of_tenant`, its first column and its key begin with `tenant`, the policy `OF_TENANT` protects
    it, and snapshots see it unless `versioned` is False."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]  # the primary key, without the tenant
    indexes: tuple[Index, ...] = ()
    refers_to: str = ""  # a table of the same domain, by the last column of the key
    of_tenant: bool = True
    # The column that numbers the thread or run that a row belongs to. Erasing that removes the row from snapshots.
    owner: Literal["", "thread", "run"] = ""
    moves: bool = False  # a copy of the owner in another store has the rows as they are, under its new number
    copied: bool = True  # a copy of the whole store has the rows; else they describe the database that they are in
    versioned: bool = True
    # A crash may lose the rows. They are in a file of their own in SQLite, and not logged in PostgreSQL. A transaction
    # that uses such a table says `volatile=True` and uses no other.
    volatile: bool = False
    unversioned: tuple[str, ...] = ()  # columns that snapshots and copies do not have
    looked_up: tuple[tuple[str, ...], ...] = ()  # further columns that rows of the past are looked up by
    finds_changes: bool = False  # a difference between snapshots starts from it, and needs an index on the stamp
    # A condition on `{row}`: deleted rows that meet it stay in the past as long as any snapshot is kept, though none
    # shows them. A restore asks them what has happened since.
    remembered: str = "false"
    # Why the runs of a tenant that has rows here cannot be rewound in this store alone; "": they can.
    ties_runs: str = ""
    holds_values: bool = False  # each row is a use of the large value that its `hash` names (`threads/externals.py`)
    policies: tuple[RowPolicy, ...] = ()  # for a table that is not of a tenant, or besides `OF_TENANT`
    roles_may: Literal["write", "add", "read"] = "write"  # what roles may do that do not own the store
    # SQLite keeps rows in the order of the key; "number": the key is the rowid; "heap": rows are too large for a key.
    layout: Literal["key", "number", "heap"] = "key"
    few_rows: bool = False  # a tenant has some ten: SQLite's planner does not take the table to be large
    fillfactor: int = 100  # PostgreSQL updates rows in place if their pages have room
    only: Literal["", "sqlite", "postgres"] = ""  # the database that has the table; "": both
    since: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that snapshots and copies have, without the tenant: the key first."""
        others = (column.name for column in self.columns if column.name not in (*self.key, *self.unversioned))
        return (*self.key, *others)

    @property
    def is_versioned(self) -> bool:
        return self.of_tenant and self.versioned

    @property
    def primary_key(self) -> tuple[str, ...]:
        return ("tenant", *self.key) if self.of_tenant else self.key

    def at_version(self, version: int) -> Table:
        """Return the table without the columns that later versions of the schema add."""
        return replace(self, columns=tuple(column for column in self.columns if column.since <= version))

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def encrypted(self, name: str) -> EncryptedColumn:
        """Return what statements name for an encrypted column (`Sql`: seals, opens)."""
        column = self.column(name)
        assert column.encrypted is not None, name
        kind: Literal["bytes", "text", "index"] = "bytes" if column.type == "bytes" else "text"
        return EncryptedColumn(
            f"{self.name}.{name}", "index" if column.searched else kind, column.encrypted, column.hashed
        )

    @cached_property
    def encrypted_columns(self) -> dict[str, EncryptedColumn]:
        return {column.name: self.encrypted(column.name) for column in self.columns if column.encrypted is not None}

    def opens(self, names: Sequence[str]) -> dict[int, EncryptedColumn]:
        """Return the encrypted columns of rows that have these columns (`Sql`: opens)."""
        return {
            names.index(name): column.at(*(names.index(str(by)) for by in column.by))
            for name, column in self.encrypted_columns.items()
            if name in names
        }


class SchemaChange(NamedTuple):
    """SQL of one version of the schema that no declaration of a table says: it runs after the tables have changed."""

    sqlite: str = ""
    postgres: str = ""
    since: int = 1


@dataclass(frozen=True, slots=True)
class Domain:
    """The tables of one subject, and hooks for the layers below. A hook that is None has nothing to say."""

    name: str
    tables: tuple[Table, ...]
    changes: tuple[SchemaChange, ...] = ()
    # The oldest record that open work needs of each thread, by its name: retention keeps that and all after it.
    held_threads: Callable[[int], Flow[dict[str, int]]] | None = None
    # The threads of a tree (tenant, tree) that open work is using: asked inside the transaction that would remove them.
    busy_threads: Callable[[int, int], Program[set[int]]] | None = None
    # Threads whose names begin so belong to the domain: retention leaves them to it.
    thread_prefix: str = ""
    # Remove what belongs to a thread (tenant, number) that was deleted. How many rows of the domain's main table.
    thread_deleted: Callable[[int, int], Flow[int]] | None = None


_registered: dict[str, Domain] = {}


def register(domain: Domain) -> None:
    """Add a domain, or replace the one of its name."""
    _registered[domain.name] = domain


def domains() -> tuple[Domain, ...]:
    """Return all domains, the lowest layer first."""
    known: dict[str, Domain] = {}
    for name in _MODULES:
        domain: Domain = import_module(name).DOMAIN
        known[domain.name] = domain
    return tuple((known | _registered).values())


def all_tables() -> dict[str, Table]:
    return {table.name: table for domain in domains() for table in domain.tables}


def versioned_tables(version: int | None = None) -> dict[str, Table]:
    """Return the tables that snapshots see. `version`: as that version of the schema has them."""
    tables = {name: table for name, table in all_tables().items() if table.is_versioned}
    if version is None:
        return tables
    return {name: table.at_version(version) for name, table in tables.items() if table.since <= version}
