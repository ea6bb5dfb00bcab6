"""Rebuild a damaged SQLite file: copy every row that can be read from its pages into the tables of a new file.

Rows are taken as they are; their hashes are checked later (`repair.py`). Pages and rows that cannot be read are
reported. This works on a copy, so the damaged file still has them.
"""

from __future__ import annotations

import os
import shutil
from bisect import insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import apsw

from perdure.errors import Busy, OpenError
from perdure.storage import migrate
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Progress
from perdure.storage.sqlite.file_lock import FileLock
from perdure.storage.sqlite.foreign import schema_of, store_schema
from perdure.storage.sqlite.opening import APPLICATION_ID, PAGE_BYTES, apply, harden, make_file
from perdure.storage.sqlite.salvage import PageFile, Row, Salvage, StoredColumn, TableShape, lost_leaves, walk
from perdure.threads.store import DEFAULT_TENANT

_BATCH = 1000
_CHUNK = 1 << 20
_JUMP = 1 << 20
_HASHED = ("record", "body")  # other rows are read through these; hashes tell which of their values are good
_OWN = ("migration",)  # tables that the new file fills itself
_NUMBERED = (("thread", "thread"), ("run", "run"), ("tenant", "tenant"), ("erased", "thread"))
# Links of chains whose base is not in their tree.
_APART = """FROM record r WHERE r.keyframe = 0 AND typeof(r.id) = 'integer' AND typeof(r.base) = 'integer'
    AND NOT EXISTS (SELECT 1 FROM record b WHERE b.tenant = r.tenant AND b.tree = r.tree AND b.id = r.base)"""
_BASES_ELSEWHERE = f"SELECT id, tenant, tree FROM record WHERE id IN (SELECT r.base {_APART})"
_MOVE = "UPDATE OR IGNORE record SET tenant = ?, tree = ? WHERE tenant = ? AND tree = ? AND id = ?"
_BUILT_ON = "SELECT id, base, tenant, tree FROM record WHERE tenant = ? AND tree = ? AND base = ? AND keyframe = 0"
_KINDS = {"INT": "INTEGER", "TEX": "TEXT", "BLO": "BLOB", "REA": "REAL", "BIG": "INTEGER"}


@dataclass
class Rebuilt:
    """The result of a rebuild. `rows` is 0 if the file was not damaged."""

    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    rows: int = 0
    names: dict[int, dict[int, str]] = field(default_factory=dict)  # by tenant and thread, of threads without a row


def copy_raw(path: Path, target: Path, timeout_s: float) -> None:
    """Copy a store's file and its log byte by byte, while no process writes.

    The log is copied first: pages that a checkpoint moves to the file meanwhile are then in the copy of the log too.
    The file is read through SQLite's VFS: closing a descriptor of our own would drop the locks that SQLite may hold on
    it in this process.
    """
    gate = None
    with suppress(OSError):  # a folder that cannot be written: no process writes the store
        gate = FileLock(str(path), timeout_s)
    try:
        if gate is not None:
            gate.acquire(monotonic() + timeout_s)
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}-wal", f"{target}-wal")
        source = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
        with open(target, "r+b") as file:
            size = source.xFileSize()
            for at in range(0, size, _CHUNK):
                file.write(source.xRead(min(_CHUNK, size - at), at))
        source.xClose()
    except Busy as error:
        raise Busy(f"{path} changes while it is read: stop the processes that write it, or try again") from error
    except apsw.Error as error:
        raise OpenError(f"{path} cannot be read: {error}; check its permissions") from error
    finally:
        if gate is not None:
            gate.close()


def rebuild_if_damaged(path: Path, origin: Path, progress: Progress | None) -> Rebuilt:
    """Rebuild a copy, with its log, in place if it is damaged. No other process may use it.

    Raises OpenError if the file never was a store.
    """
    problems = _problems(path)
    if not problems:
        return Rebuilt()
    fresh = path.with_name("fresh.db")
    result = _rebuild(path, fresh, progress)
    if not result.rows:
        raise OpenError(f"{origin} is not a Perdure store, nor what is left of one; check the path")
    for end in ("-wal", "-shm", "-journal"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    os.replace(fresh, path)
    first = f"the file was rebuilt from its pages, with {result.rows} rows, because {problems[0]}"
    result.notes.insert(0, first)
    return result


def _problems(path: Path) -> list[str]:
    """Return what is wrong with a file, after moving its log into it as far as the log can be read."""
    connection = _open_damaged(path)
    try:
        connection.pragma("cell_size_check", 1)
        with suppress(apsw.Error):  # the header is damaged, and the log is lost with it
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        return list(_problems_of(connection))
    except (apsw.Error, UnicodeDecodeError) as error:
        return [f"it cannot be read ({error})"]
    finally:
        with suppress(apsw.Error):
            connection.close()


def _open_damaged(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    harden(connection)
    connection.pragma("locking_mode", "exclusive")
    return connection


def _problems_of(connection: apsw.Connection) -> Iterator[str]:
    if connection.pragma("application_id") != APPLICATION_ID:
        yield "its header does not say that it is a store"
    actual = {each for each in schema_of(connection) if not each[1].endswith("_changes")}
    version = migrate.newest("sqlite")
    if store_schema(version, versioned=any(name == "epoch" for _, name, *_ in actual)) != actual:
        yield "its list of tables is not a store's"
        return
    for (answer,) in connection.execute("PRAGMA integrity_check(50)"):
        if answer != "ok":
            yield str(answer)
    yield from _unnoticed(connection, [name for kind, name, *_ in actual if kind == "table"])


def _unnoticed(connection: apsw.Connection, tables: list[str]) -> Iterator[str]:
    """Yield damage for which SQLite's own check does not look."""
    for name in tables:
        for _ in connection.execute(f'SELECT * FROM "{name}"'):
            pass  # reading a text that is not UTF-8 raises UnicodeDecodeError
    if list(connection.execute("SELECT 1 FROM tenant WHERE typeof(name) <> 'text'")):
        yield "the name of a tenant is no text"
    if [version for (version,) in connection.execute(migrate.SELECT_APPLIED)] != [
        migration.version for migration in migrate.migrations("sqlite")
    ]:
        yield "its list of migrations is not a store's"
    is_index = "type = 'index' OR sql LIKE '%WITHOUT ROWID%'"
    roots = list(connection.execute(f"SELECT name, rootpage, {is_index} FROM sqlite_schema WHERE rootpage > 0"))
    file = PageFile(Path(connection.filename))
    for name, root, expected in roots:
        if file.is_index(root) != expected:
            yield f"page {root}, the root of {name}, is of a wrong kind"
    file.close()


def _new_file(path: Path) -> apsw.Connection:
    make_file(str(path))
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    # The file is used only once it is complete, so it needs no journal and no fsync.
    pragmas = {"page_size": PAGE_BYTES, "journal_mode": "off", "synchronous": "off", "locking_mode": "exclusive"}
    for pragma, value in pragmas.items():
        connection.pragma(pragma, value)
    for migration in migrate.migrations("sqlite"):
        apply(connection, migration)
    return connection


def _shapes(connection: apsw.Connection) -> dict[str, TableShape]:
    shapes = {}
    tables = "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    for name, sql in list(connection.execute(tables)):
        info = list(connection.execute(f'PRAGMA table_info("{name}")'))
        columns = [(row[1], _KINDS[row[2][:3].upper()], not row[3], row[5]) for row in info]
        if "WITHOUT ROWID" in sql.upper():
            key = sorted((column for column in columns if column[3]), key=lambda column: column[3])
            columns, rowid = key + [column for column in columns if not column[3]], None
            stored = tuple(StoredColumn(n, kind, nullable and not pk) for n, kind, nullable, pk in columns)
        else:
            alias = [column for column in columns if column[3] and column[1] == "INTEGER"]
            rowid = alias[0][0] if len([column for column in columns if column[3]]) == 1 and alias else ""
            stored = tuple(StoredColumn(n, kind, nullable) for n, kind, nullable, _ in columns)
        if name not in _OWN:
            shapes[name] = TableShape(name, stored, rowid)
    return shapes


def _rebuild(damaged: Path, fresh: Path, progress: Progress | None) -> Rebuilt:
    """Fill a new store at `fresh` from the pages at `damaged`, which no process has open."""
    result, salvage, seen = Rebuilt(), Salvage(), set[int]()
    file, origin, connection = PageFile(damaged), _open_damaged(damaged), _new_file(fresh)
    refused = 0

    def insert(shape: TableShape, row: Row) -> None:
        nonlocal refused
        if row.cut and shape.name not in _HASHED:
            return
        if _insert(connection, shape, row, origin):
            result.rows += 1
            if progress is not None and result.rows % _BATCH == 0:
                progress(result.rows, result.rows)
        else:
            refused += 1

    def index(name: str) -> Iterator[Row]:
        return walk(file, roots[name], name, Salvage(), set()) if name in roots else iter(())

    try:
        shapes = _shapes(connection)
        [(fresh_id,)] = connection.execute("SELECT value FROM meta WHERE key = 'store'")
        connection.execute("BEGIN; DELETE FROM meta; DELETE FROM counter")
        roots = dict(_roots(file, salvage, seen))
        for name, shape in shapes.items():
            if name in roots:
                # A damaged page may lead to another table's pages: each tree is walked with a set of its own.
                for row in walk(file, roots[name], name, salvage, pages := set[int]()):
                    insert(shape, row)
                seen |= pages
        for name, root in roots.items():  # marks the pages of indexes as seen, so that they are not taken for a table's
            if name not in shapes:
                for _ in walk(file, root, name, Salvage(), seen):
                    pass
        if salvage.pages or not shapes.keys() <= roots.keys():
            kinds = [list(shapes.values()), _stamped(shapes)]
            for name, row in lost_leaves(file, seen, kinds[::-1] if "epoch" in roots else kinds, salvage):
                insert(shapes[name], row)
        _place_links(connection, result.notes)
        _name_tenants(connection, index("tenant_name"), result.notes)
        _name_threads(connection, index("thread_name"), result)
        _settle(connection, fresh_id, result.notes)
        connection.execute("COMMIT")
    finally:
        connection.close()
        with suppress(apsw.Error):
            origin.close()
        file.close()
    result.lost += [f"page {page} of the file cannot be read ({why})" for page, why in sorted(salvage.pages.items())]
    tables = [table for table, *_ in salvage.rows]
    result.lost += [f"{tables.count(table)} rows of {table} cannot be read" for table in sorted(set(tables))]
    if "epoch" in roots:
        result.lost.append("its snapshots: the damaged store has what can be read of them")
    if refused:
        result.lost.append(f"{refused} rows do not fit into their tables")
    return result


def _stamped(shapes: dict[str, TableShape]) -> list[TableShape]:
    """Return the tables with the `stamp` column that a store with snapshots has (`storage/versions.py`)."""
    stamp = StoredColumn("stamp", "INTEGER", nullable=True)
    versioned = [shape for name, shape in shapes.items() if name in versioned_tables()]
    return [shape._replace(columns=(*shape.columns, stamp)) for shape in versioned]


def _roots(file: PageFile, salvage: Salvage, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the root page of each table and index, as far as the schema table can be read."""
    for row in walk(file, 1, "sqlite_schema", salvage, seen):
        values = row.values
        if len(values) == 5 and values[0] in ("table", "index") and tuple(map(type, values[1:4:2])) == (str, int):
            yield values[1], values[3]


def _insert(connection: apsw.Connection, shape: TableShape, row: Row, origin: apsw.Connection) -> bool:
    """Insert a row. Return False if it does not fit, and True if the same row is there already (a page read twice).

    Of two rows with the same key, the one that SQLite finds in the damaged file stays: the other's key is damaged."""
    names = [column.name for column in shape.columns]
    stored = row.values[:-1] if len(row.values) == len(names) + 1 and shape.name in versioned_tables() else row.values
    if len(stored) != len(names):
        return all(value is None for value in stored)
    values = dict(zip(names, stored, strict=True))
    if shape.name == "record":
        # Others can be read through a damaged row. A value of a wrong type stands for a NULL that the table refuses.
        behind_key = (column for column in shape.columns[3:] if not column.nullable)
        values |= {column.name: b"" for column in behind_key if values[column.name] is None}
    if shape.rowid:
        values[shape.rowid] = row.number
    marks = ", ".join(f":{name}" for name in names)
    insert = f'INSERT OR IGNORE INTO "{shape.name}" ({", ".join(names)}) VALUES ({marks})'
    try:
        connection.execute(insert, values)
        if connection.changes():
            return True
        same = " AND ".join(f'"{name}" IS :{name}' for name in names)
        if list(connection.execute(f'SELECT 1 FROM "{shape.name}" WHERE {same}', values)):
            return True
        keys = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk", (shape.name,))
        where = f'FROM "{shape.name}" WHERE ' + " AND ".join(f'"{name}" IS :{name}' for (name,) in keys)
        if list(origin.execute(f"SELECT {', '.join(names)} {where}", values)) == [tuple(values.values())]:
            connection.execute(f"DELETE {where}", values)
            connection.execute(insert, values)
    except (apsw.Error, UnicodeDecodeError):
        pass
    return False


def _place_links(connection: apsw.Connection, notes: list[str]) -> None:
    """Move each record that is apart from its base to the tree of its base.

    SQLite finds the links of a chain by where they are in the damaged file, even if the tenant or tree in such a row is
    damaged. The new file has the row where these values put it. Moving it back loses nothing: a link without its base
    cannot be read, and neither can the records that are built on it.
    """
    places: dict[int, list[tuple[Any, Any]]] = {}
    for base, tenant, tree in connection.execute(_BASES_ELSEWHERE):
        places.setdefault(base, []).append((tenant, tree))
    waiting = list(connection.execute(f"SELECT r.id, r.base, r.tenant, r.tree {_APART} ORDER BY r.id DESC"))
    moved = 0
    while waiting:  # the oldest first: a base is then in its place before what is built on it
        record, base, *here = waiting.pop()
        for place in places.get(base, ()):
            if place == tuple(here):
                break  # its base was moved to it
            connection.execute(_MOVE, (*place, *here, record))
            if connection.changes():
                moved += 1
                places[record] = [place]
                for link in connection.execute(_BUILT_ON, (*here, record)):
                    insort(waiting, link, key=lambda link: -link[0])
                break
    if moved:
        notes.append(f"{moved} checkpoints were moved back to the tree that they belong to")


def _name_tenants(connection: apsw.Connection, index: Iterator[Row], notes: list[str]) -> None:
    """Give each tenant that has rows the name by which the index finds it: its own row may be lost or damaged."""
    execute = connection.execute
    update = "UPDATE tenant SET name = 'recovered-' || tenant WHERE typeof(name) <> 'text' RETURNING tenant"
    notes += [f"the name of tenant {number} is damaged: it gets a new one" for (number,) in execute(update)]
    numbers = " UNION ".join(f"SELECT tenant FROM {table}" for table in versioned_tables())
    names = dict(execute(f"SELECT u.tenant, t.name FROM ({numbers}) u LEFT JOIN tenant t ON t.tenant = u.tenant"))
    for name, tenant in (entry.values for entry in index if tuple(map(type, entry.values)) == (str, int)):
        if names.get(tenant, DEFAULT_TENANT) != DEFAULT_TENANT and name not in names.values():
            execute("INSERT OR REPLACE INTO tenant (tenant, name) VALUES (?, ?)", (tenant, name))
            notes.append(f"tenant {tenant} is called {name!r}, as the index says; its row said {names[tenant]!r}")
            names[tenant] = name


def _name_threads(connection: apsw.Connection, index: Iterator[Row], result: Rebuilt) -> None:
    """Give each thread the name by which the index finds it: no hash proves the name in its row.

    Names of threads whose row is lost are kept for the row that the repair of the log creates."""
    for tenant, name, thread in (entry.values for entry in index if tuple(map(type, entry.values)) == (int, str, int)):
        key = (tenant, thread, name)
        old = list(connection.execute("SELECT name FROM thread WHERE tenant = ? AND thread = ?", key[:2]))
        if not old:
            result.names.setdefault(tenant, {})[thread] = name
        elif old[0][0] != name:
            connection.execute("UPDATE OR IGNORE thread SET name = ?3 WHERE tenant = ?1 AND thread = ?2", key)
            if connection.changes():
                result.notes.append(
                    f"thread {thread} is called {name!r}, as the index says; its row said {old[0][0]!r}"
                )


def _settle(connection: apsw.Connection, fresh_id: str, notes: list[str]) -> None:
    """Restore what every store must have: its counter, its id, and thread generations beyond all earlier ones."""
    execute = connection.execute
    greatest = 0
    for table, column in _NUMBERED:
        text = f"SELECT max({column}) FROM {table} WHERE typeof({column}) = 'integer' AND {column} < 1 << 60"
        greatest = max(greatest, int(next(iter(execute(text)))[0] or 0))
    counters = [number for (number,) in execute("SELECT number FROM counter") if type(number) is int]
    if not counters:
        notes.append("the store's counter was lost: it starts again beyond all that is there")
    number = max(greatest, counters[0]) if counters else greatest + _JUMP  # numbers of deleted rows are unknown
    execute("DELETE FROM counter")
    execute("INSERT INTO counter (one, number) VALUES (1, ?)", (number + 1,))
    if not list(execute("SELECT 1 FROM meta WHERE key = 'store' AND typeof(value) = 'text'")):
        execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('store', ?)", (fresh_id,))
        notes.append("the store's id was lost: it has a new one, so that keys of effects will be others")
    execute(f"UPDATE thread SET generation = generation + {_JUMP} WHERE typeof(generation) = 'integer'")
