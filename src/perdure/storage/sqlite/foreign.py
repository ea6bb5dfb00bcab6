"""Check files from elsewhere (bundles, backups, archives) before they are used.

A file's schema is code that SQLite runs: views, triggers, virtual tables, computed columns. So a file is used only if
Perdure could have created everything in its schema. The check puts no name from the file into SQL text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw

from perdure.errors import Damaged
from perdure.storage import migrate
from perdure.storage.domains import versioned_tables
from perdure.storage.sqlite.opening import apply, harden
from perdure.storage.sqlite.writer import perform
from perdure.storage.versions import install

# Only the planner's own tables are left out: SQLite lets a trigger be named `sqlite1stat1`.
_OBJECTS = """SELECT type, name, tbl_name, sql FROM sqlite_schema
    WHERE NOT (type = 'table' AND name IN ('sqlite_stat1', 'sqlite_stat4'))"""
_COMPUTED = "SELECT name FROM pragma_table_xinfo(?, 'main') WHERE hidden <> 0"
# Replicas and bundles also have triggers that refuse a write and do nothing else.
_REFUSES = re.compile(
    r"CREATE TRIGGER \w+ BEFORE (INSERT|UPDATE|DELETE) ON \w+\s+"
    r"(WHEN EXISTS \(SELECT 1 FROM meta WHERE key = 'replica'\)\s+)?BEGIN SELECT RAISE\(ABORT, '[^']*'\); END"
)
_FINDS_CHANGES = re.compile(r"CREATE INDEX (\w+)_changes ON \1 \((stamp|died), [\w, ]+\)")  # for replication
_SHOWN_MAX = 60

Schema = frozenset[tuple[str, str, str, str | None]]  # type, name, table, SQL


def schema_of(connection: apsw.Connection) -> Schema:
    """Return every table, index, view and trigger, except the planner's statistics.

    The columns are sorted, because a store that was migrated after its first snapshot has them in another order."""
    objects: list[Any] = connection.execute(_OBJECTS).fetchall()
    return frozenset(
        (kind, name, table, _table_text(connection, name, str(sql)) if kind == "table" else sql)
        for kind, name, table, sql in objects
    )


def _table_text(connection: apsw.Connection, name: str, sql: str) -> str:
    if not sql.startswith("CREATE TABLE "):
        return sql
    columns = connection.execute("SELECT name, type, pk FROM pragma_table_info(?, 'main')", (name,)).fetchall()
    # Types in `…_past` tables are not compared: CREATE TABLE AS writes affinities, ADD COLUMN writes declared types.
    known = [column[:1] if name.endswith("_past") else column for column in columns]
    return f"CREATE TABLE {sorted(known)}{sql.rpartition(')')[2]}"


@lru_cache(maxsize=4)  # bounded: a file from elsewhere names the version
def store_schema(version: int, *, versioned: bool) -> Schema:
    """Return the schema of a store after its first `version` migrations. `versioned`: and after its first snapshot."""
    with closing(apsw.Connection(":memory:")) as connection:
        for migration in migrate.migrations("sqlite")[:version]:
            apply(connection, migration)
        if versioned:
            perform(partial(install, list(versioned_tables(version).values()), "sqlite"), connection.cursor(), None)
        return schema_of(connection)


def check_foreign(path: Path, shown: str = "") -> None:
    """Raise Damaged if a file's schema has anything that Perdure does not create. The file is not changed.

    `shown`: the file's name in the message, by default its path."""
    shown = shown or str(path)
    has_log = os.path.exists(f"{path}-wal")
    name = f"file:{quote(str(path.absolute()))}" + ("" if has_log else "?immutable=1")
    try:
        with closing(apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)) as connection:
            harden(connection)
            strange = next(_strange(connection), None)
    except (apsw.Error, UnicodeDecodeError) as error:
        raise Damaged(f"{shown} is no store of Perdure, or is damaged ({error}): use another copy") from error
    if strange:
        raise Damaged(
            f"{shown} was not made by Perdure: it has {strange}. Nothing of it was used; ask who gave it to you"
        )


def _strange(connection: apsw.Connection) -> Iterator[str]:
    known = store_schema(connection.pragma("user_version"), versioned=True)
    names = {each[:3] for each in known}
    for kind, name, table, sql in schema_of(connection):
        shown = f"the {kind} {str(name)[:_SHOWN_MAX]!r}"
        if kind == "trigger":
            if (kind, name, table, sql) not in known and not _REFUSES.fullmatch(str(sql)):
                yield shown
        elif kind == "index":
            is_for_changes = ("table", table, table) in names and _FINDS_CHANGES.fullmatch(str(sql))
            if (kind, name, table, sql) not in known and not is_for_changes:
                yield shown
        elif (kind, name, table) not in names:
            yield shown
        elif kind == "table" and not str(sql).startswith("CREATE TABLE "):
            yield f"{shown}, which is virtual"
        elif kind == "table" and connection.execute(_COMPUTED, (name,)).fetchall():
            yield f"{shown}, which has computed columns"
