"""Migrations: what declarations add, which of them a store needs, and that replaying them gives the newest schema."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import get_args

import apsw
import pytest

from perdure.errors import OpenError
from perdure.log.records import Record
from perdure.log.tables import RECORD
from perdure.runs.run_table import RUN, RunRow
from perdure.storage import migrate
from perdure.storage.domains import Domain, SchemaChange, Table
from perdure.storage.program import Dialect
from perdure.storage.sqlite import opening as sqlite_open
from perdure.storage.sqlite.driver import SqliteDriver


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_both_dialects_ship_the_same_versions(dialect: Dialect) -> None:
    shipped = migrate.migrations(dialect)
    assert [m.version for m in shipped] == list(range(1, migrate.newest(dialect) + 1))
    assert all((m.adds + m.changes).strip() for m in shipped)


def test_pending_is_what_was_not_applied() -> None:
    newest = migrate.newest("sqlite")
    assert [m.version for m in migrate.pending("sqlite", [])] == list(range(1, newest + 1))
    assert migrate.pending("sqlite", range(1, newest + 1)) == []


def test_a_newer_schema_is_refused_with_both_numbers() -> None:
    newest = migrate.newest("sqlite")
    with pytest.raises(OpenError, match=f"newer Perdure: schema {newest + 6}, this one knows {newest}; upgrade"):
        migrate.pending("sqlite", range(1, newest + 7))


@pytest.mark.parametrize("numbers", [(1, 3), (2,)])
def test_numbers_have_no_holes(numbers: tuple[int, ...]) -> None:
    changes = tuple(SchemaChange("SELECT 1", "SELECT 1", since=number) for number in numbers)
    with pytest.raises(OpenError, match="not numbered"):
        migrate._migrations("sqlite", (Domain("d", (), changes),))


@pytest.mark.parametrize(("table", "row"), [(RECORD, Record), (RUN, RunRow)])
def test_a_row_has_the_columns_of_its_table_in_their_order(table: Table, row: type[Record | RunRow]) -> None:
    assert row._fields == tuple(column.name for column in table.columns)


def schema(path: Path) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
    connection.close()
    return rows


def test_the_newest_schema_is_all_migrations_replayed_one_by_one(tmp_path: Path) -> None:
    SqliteDriver(tmp_path / "fresh.db").close()
    for migration in migrate.migrations("sqlite"):
        connection = apsw.Connection(str(tmp_path / "replayed.db"))  # each in a session of its own
        sqlite_open.apply(connection, migration)
        connection.close()
    assert schema(tmp_path / "replayed.db") == schema(tmp_path / "fresh.db")
    SqliteDriver(tmp_path / "replayed.db", create=False).close()


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "a.db"))
    broken = migrate.Migration(1, "CREATE TABLE meta (key, value); CREATE TABLE meta (again)")
    with pytest.raises(apsw.SQLError):
        sqlite_open.apply(connection, broken)
    assert list(connection.execute("SELECT name FROM sqlite_schema")) == []
    connection.close()
