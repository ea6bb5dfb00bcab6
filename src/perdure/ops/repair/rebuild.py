"""A new SQLite store from the pages of a damaged one: every row that can be read, in a file whose trees are whole.

Rows are taken as they are; whether they mean something is looked at later, by their hashes. What does
not fit into a table (a key that is there already, a column that must not be empty) and pages that cannot be read are
kept in the table `quarantine`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import orjson

from perdure.log.quarantine import as_json
from perdure.storage import migrate
from perdure.storage.program import Progress
from perdure.storage.sqlite.file_lock import LOCK_ENDS
from perdure.storage.sqlite.opening import APPLICATION_ID, PAGE_BYTES, apply, make_file
from perdure.storage.sqlite.salvage import Column, PageFile, Row, Salvage, Shape, lost_leaves, walk
from perdure.transfer.files import SIDE_FILES

_BATCH = 1000
_JUMP = 1 << 20
_OWN = ("migration",)  # what the new file has of its own
_NUMBERED = (("thread", "thread"), ("run", "run"), ("tenant", "tenant"), ("erased", "thread"))
_KINDS = {"INT": "INTEGER", "TEX": "TEXT", "BLO": "BLOB", "REA": "REAL", "BIG": "INTEGER"}


@dataclass
class Rebuilt:
    """What came of it."""

    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    rows: int = 0


def new_file(path: Path) -> apsw.Connection:
    """An empty store that no other process uses, of the newest schema."""
    make_file(str(path))
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    # Nothing of it counts before it is whole.
    pragmas = {"page_size": PAGE_BYTES, "journal_mode": "off", "synchronous": "off", "locking_mode": "exclusive"}
    for pragma, value in pragmas.items():
        connection.pragma(pragma, value)
    for migration in migrate.migrations("sqlite"):
        apply(connection, migration)
    return connection


def shapes_of(connection: apsw.Connection) -> dict[str, Shape]:
    """The tables of a store, as their rows are stored."""
    shapes = {}
    tables = list(
        connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    )
    for name, sql in tables:
        info = list(connection.execute(f'PRAGMA table_info("{name}")'))
        columns = [(row[1], _KINDS[row[2][:3].upper()], not row[3], row[5]) for row in info]
        if "WITHOUT ROWID" in sql.upper():
            key = sorted((column for column in columns if column[3]), key=lambda column: column[3])
            columns, rowid = key + [column for column in columns if not column[3]], None
            stored = tuple(Column(n, kind, nullable and not pk) for n, kind, nullable, pk in columns)
        else:
            alias = [column for column in columns if column[3] and column[1] == "INTEGER"]
            rowid = alias[0][0] if len([column for column in columns if column[3]]) == 1 and alias else ""
            stored = tuple(Column(n, kind, nullable) for n, kind, nullable, _ in columns)
        shapes[name] = Shape(name, stored, rowid)
    return shapes


def rebuild(damaged: Path, fresh: Path, progress: Progress | None = None) -> Rebuilt:
    """Fill a new store at `fresh` from the pages at `damaged`, which no process has open."""
    result = Rebuilt()
    file = PageFile(damaged)
    connection = new_file(fresh)
    try:
        _Filling(file, connection, result, progress).fill()
    finally:
        connection.close()
        file.close()
    return result


class _Filling:
    """One rebuilding."""

    def __init__(self, file: PageFile, connection: apsw.Connection, result: Rebuilt, progress: Progress | None) -> None:
        self._file, self._connection, self._result, self._progress = file, connection, result, progress
        self._shapes = {name: shape for name, shape in shapes_of(connection).items() if name not in _OWN}
        self._salvage = Salvage()
        self._seen: set[int] = set()
        self._refused = 0
        self._kept = 0
        self._indexes: dict[str, list[tuple[Any, ...]]] = {
            "sqlite_autoindex_tenant_1": [],  # name, tenant
            "thread_name": [],  # tenant, name, thread
            "thread_tree": [],  # tenant, tree, thread
        }

    def fill(self) -> None:
        connection = self._connection
        roots = self._roots()
        [(fresh_store,)] = connection.execute("SELECT value FROM meta WHERE key = 'store'")
        connection.execute("BEGIN; DELETE FROM meta; DELETE FROM counter")
        cut_off = False
        for name, shape in self._shapes.items():
            if name not in roots:
                cut_off = True
                continue
            before = len(self._salvage.pages)
            for row in walk(self._file, roots[name], name, self._salvage, self._seen):
                self._insert(shape, row)
            cut_off = cut_off or len(self._salvage.pages) > before
        self._pass_indexes(roots)
        if cut_off:
            for shape, row in lost_leaves(self._file, self._seen, list(self._shapes.values()), self._salvage):
                self._insert(shape, row)
        self._from_indexes()
        self._settle(fresh_store)
        self._tell()
        connection.execute("COMMIT")

    def _roots(self) -> dict[str, int]:
        """Where each table begins, as far as the list of tables can be read."""
        roots: dict[str, int] = {}
        for row in walk(self._file, 1, "sqlite_schema", self._salvage, self._seen):
            values = row.values
            if len(values) == 5 and values[0] in ("table", "index") and tuple(map(type, values[1:4:2])) == (str, int):
                roots[values[1]] = values[3]
        return roots

    def _pass_indexes(self, roots: dict[str, int]) -> None:
        """Indexes are made anew: their pages must not be taken for a table's. Some tell what a table has lost."""
        for name, root in roots.items():
            if name not in self._shapes:
                wanted = self._indexes.get(name)
                for row in walk(self._file, root, name, Salvage(), self._seen):
                    if wanted is not None:
                        wanted.append(row.values)

    def _from_indexes(self) -> None:
        """Names of tenants and threads whose rows are lost. Their heads are found later, by what they have."""
        execute, notes = self._connection.execute, self._result.notes
        for name, tenant in (row for row in self._indexes["sqlite_autoindex_tenant_1"] if _are(row, str, int)):
            execute("INSERT OR IGNORE INTO tenant (tenant, name) VALUES (?, ?)", (tenant, name))
            if self._connection.changes():
                notes.append(f"the row of tenant {name} was made again, from an index")
            execute("UPDATE OR IGNORE tenant SET name = ? WHERE tenant = ? AND name <> ?", (name, tenant, name))
            if self._connection.changes():
                notes.append(f"tenant {tenant} has the name again that it was found by: {name}")
        trees = {(row[0], row[2]): row[1] for row in self._indexes["thread_tree"] if _are(row, int, int, int)}
        for tenant, name, thread in (row for row in self._indexes["thread_name"] if _are(row, int, str, int)):
            tags = execute("SELECT key, value FROM tag WHERE tenant = ? AND thread = ?", (tenant, thread))
            metadata = {key: value for key, text in tags if type(key) is str and (value := _json(text)) is not None}
            values = (tenant, thread, trees.get((tenant, thread), thread), name, orjson.dumps(metadata).decode())
            execute(
                """INSERT OR IGNORE INTO thread (tenant, thread, tree, name, metadata, generation, head, head_hash,
                    created_at, updated_at, active) VALUES (?, ?, ?, ?, ?, 0, 0, zeroblob(32), 1, 1, 0)""",
                values,
            )
            if self._connection.changes():
                notes.append(f"the row of thread {name} was made again, from an index")
            change = "UPDATE OR IGNORE thread SET name = ? WHERE tenant = ? AND thread = ? AND name <> ?"
            execute(change, (name, tenant, thread, name))
            if self._connection.changes():
                notes.append(f"thread {thread} has the name again that it was found by: {name}")

    def _insert(self, shape: Shape, row: Row) -> None:
        names = [column.name for column in shape.columns]
        values = list(row.values)
        if len(values) != len(names):
            if any(value is not None for value in values):
                self._refuse(shape.name, {"columns": repr(values)})
            return
        if shape.rowid:
            values[names.index(shape.rowid)] = row.number
        odd = False
        for at, column in enumerate(shape.columns):
            values[at], strange = _as_stored(values[at], column.type)
            odd = odd or strange
        found = dict(zip(names, values, strict=True))
        if self._add("INSERT OR IGNORE", shape, found):
            self._result.rows += 1
            if odd:
                self._keep(shape.name, found, "a text that is no text; it was made readable")
            if self._progress is not None and self._result.rows % _BATCH == 0:
                self._progress(self._result.rows, self._result.rows)
        elif not self._is_there(shape, found):
            self._refuse(shape.name, found)

    def _add(self, how: str, shape: Shape, found: dict[str, Any]) -> bool:
        text = f'{how} INTO "{shape.name}" ({", ".join(found)}) VALUES ({", ".join("?" * len(found))})'
        try:
            self._connection.execute(text, [*found.values()])
        except apsw.Error:
            return False
        return self._connection.changes() == 1

    def _refuse(self, table: str, found: dict[str, Any]) -> None:
        self._refused += 1
        self._keep(table, found, "it does not fit into its table")

    def _is_there(self, shape: Shape, found: dict[str, Any]) -> bool:
        """Whether the very same row is there already: a page that was met twice."""
        where = " AND ".join(f'"{name}" IS ?' for name in found)
        try:
            return bool(
                list(self._connection.execute(f'SELECT 1 FROM "{shape.name}" WHERE {where}', [*found.values()]))
            )
        except apsw.Error:
            return False

    def _keep(self, kind: str, content: dict[str, Any], reason: str) -> None:
        tenant = content.get("tenant")
        while True:  # rows of an earlier repair may be there
            self._kept += 1
            self._connection.execute(
                "INSERT OR IGNORE INTO quarantine (tenant, kind, key, reason, content) VALUES (?, ?, ?, ?, ?)",
                (
                    tenant if type(tenant) is int else 0,
                    kind,
                    orjson.dumps({"found": self._kept}).decode(),
                    reason,
                    as_json(content),
                ),
            )
            if self._connection.changes():
                return

    def _settle(self, fresh_store: str) -> None:
        """What a store must have, whatever else is lost."""
        execute, notes = self._connection.execute, self._result.notes
        numbers = [self._greatest(table, column) for table, column in _NUMBERED]
        counters = [number for (number,) in execute("SELECT number FROM counter") if type(number) is int]
        number = counters[0] if counters else 0
        if not counters:
            notes.append("the store's counter was lost: it starts again beyond all that is there")
            number = max(numbers) + _JUMP  # those of what was deleted are not known
        execute("DELETE FROM counter")
        execute("INSERT INTO counter (one, number) VALUES (1, ?)", (max(number, *numbers) + 1,))
        if not list(execute("SELECT 1 FROM meta WHERE key = 'store' AND typeof(value) = 'text'")):
            execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('store', ?)", (fresh_store,))
            notes.append("the store's id was lost: it has a new one, so that keys of effects will be others")
        used = execute("SELECT DISTINCT tenant FROM thread UNION SELECT DISTINCT tenant FROM run")
        known = {tenant for (tenant,) in execute("SELECT tenant FROM tenant")}
        for tenant in sorted(tenant for (tenant,) in used if type(tenant) is int and tenant not in known):
            execute("INSERT OR IGNORE INTO tenant (tenant, name) VALUES (?, ?)", (tenant, f"recovered-{tenant}"))
            notes.append(f"the name of tenant {tenant} was lost: it is called recovered-{tenant} now")
        execute(f"UPDATE thread SET generation = generation + {_JUMP} WHERE typeof(generation) = 'integer'")

    def _greatest(self, table: str, column: str) -> int:
        text = f"SELECT max({column}) FROM {table} WHERE typeof({column}) = 'integer' AND {column} < 1 << 60"
        return int(next(iter(self._connection.execute(text)))[0] or 0)

    def _tell(self) -> None:
        result = self._result
        for number, why in sorted(self._salvage.pages.items()):
            raw = self._file.raw(number)
            if raw.strip(b"\0"):
                self._keep("page", {"page": number, "data": raw}, why)
            result.lost.append(f"page {number} of the file cannot be read ({why})")
        cells: dict[tuple[str, int], list[str]] = {}
        for table, page, _, why in self._salvage.rows:
            cells.setdefault((table, page), []).append(why)
        for (table, page), reasons in sorted(cells.items()):
            content = {"table": table, "page": page, "cells": len(reasons), "data": self._file.raw(page)}
            self._keep("page", content, reasons[0])
            result.lost.append(f"up to {len(reasons)} rows of {table} on page {page} cannot be read ({reasons[0]})")
        if self._refused:
            result.lost.append(f"{self._refused} rows do not fit into their tables")


def _as_stored(value: Any, kind: str) -> tuple[Any, bool]:
    """A value in the type of its column, where that loses nothing; and whether it had to be changed."""
    if kind == "BLOB" and type(value) is str:
        return value.encode(), False
    if kind == "TEXT" and type(value) is bytes:
        try:
            return value.decode(), False
        except UnicodeDecodeError:
            return value.decode(errors="replace"), True
    if kind == "INTEGER" and type(value) is bytes:
        return value, False
    return value, False


def _are(row: tuple[Any, ...], *types: type) -> bool:
    return tuple(map(type, row)) == types


def _json(text: Any) -> Any:
    try:
        return orjson.loads(text)
    except (ValueError, TypeError):
        return None


def problems_of(connection: apsw.Connection) -> Iterator[str]:
    """What is wrong with a file, page and index by page and index; nothing if it is whole."""
    if connection.pragma("application_id") != APPLICATION_ID:
        yield "its header does not say that it is a store"
    expected = apsw.Connection(":memory:")
    try:
        for migration in migrate.migrations("sqlite")[: _version(connection)]:
            apply(expected, migration)
        tables = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_stat%' ORDER BY 1, 2"
        if list(expected.execute(tables)) != list(connection.execute(tables)):
            yield "its list of tables is not a store's"
            return
    finally:
        expected.close()
    for (answer,) in connection.execute("PRAGMA integrity_check(50)"):
        if answer != "ok":
            yield str(answer)
    yield from _wrong_texts(connection)


def _version(connection: apsw.Connection) -> int:
    return int(next(iter(connection.execute("SELECT count(*) FROM migration")))[0])


def _wrong_texts(connection: apsw.Connection) -> Iterator[str]:
    """Columns whose bytes are said to be text and are none: Python cannot even read them."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for name in names:
        columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')]
        parts = ", ".join(f"CASE typeof({c}) WHEN 'text' THEN CAST({c} AS BLOB) END" for c in columns)
        for row in connection.execute(f'SELECT {parts} FROM "{name}"'):
            for value in row:
                try:
                    if value is not None:
                        value.decode()
                except UnicodeDecodeError:
                    yield f"a row of {name} holds text that is not text"
                    return


def remove_all(path: Path) -> None:
    """A file of ours and what SQLite may have left beside it."""
    for end in ("", *SIDE_FILES, *LOCK_ENDS):
        try:
            os.unlink(f"{path}{end}")
        except FileNotFoundError:
            pass
