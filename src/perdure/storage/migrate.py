"""Numbered schema files, and which of them a store still needs.

A migration is `schema/<dialect>/NNNN_name.sql`. Numbers start at 1 and have no holes, so "the schema" is one
number. A driver applies each pending one together with its row in table `migration`, in one transaction, and
makes sure that two openers do not do it at once (a lock of its own: a file, or an advisory lock). This module
only knows the files.

The same transaction brings what snapshots need up to date (`versions.py`). So in a store with snapshots a migration may
add tables and columns and update rows. It must not drop, rename or rebuild a table that a domain declares: snapshots
would show its rows twice, or not at all. A change of what a domain declares for snapshots needs a migration too, if
only one without a statement.

Must never happen here: SQL that runs, or a released migration that changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

from perdure.errors import OpenError
from perdure.storage.program import Dialect

# Both databases read this text. applied_at: microseconds since 1970, as everywhere in the schema.
CREATE_TABLE = """CREATE TABLE IF NOT EXISTS migration (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at BIGINT NOT NULL
)"""
SELECT_APPLIED = "SELECT version FROM migration ORDER BY version"
INSERT_APPLIED = "INSERT INTO migration (version, name, applied_at) VALUES (:version, :name, :applied_at)"

_COMMENT = re.compile(r"[ \t]*--[^\n]*")  # SQLite would keep it in every store
_FILE_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its number, its name, and its SQL, several statements in one text."""

    version: int
    name: str
    text: str


@cache
def migrations(dialect: Dialect) -> tuple[Migration, ...]:
    """Every migration this version of Perdure ships, in order."""
    from importlib.resources import files  # imported late: only opening a store needs it

    folder = files("perdure.storage") / "schema" / dialect
    return _in_order((entry.name, entry.read_text("utf-8")) for entry in folder.iterdir())


def _in_order(named_texts: Iterable[tuple[str, str]]) -> tuple[Migration, ...]:
    found = []
    for file_name, text in named_texts:
        if match := _FILE_NAME.fullmatch(file_name):
            found.append(Migration(int(match[1]), match[2], _COMMENT.sub("", text)))
    found.sort(key=lambda migration: migration.version)
    # A hole or a number used twice would make "schema 7" mean different things to different stores.
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise OpenError(f"the schema files are not numbered 1, 2, 3 …: {[m.version for m in found]}")
    return tuple(found)


def newest(dialect: Dialect) -> int:
    """The schema version this Perdure writes."""
    return len(migrations(dialect))


def pending(dialect: Dialect, applied: Collection[int]) -> list[Migration]:
    """What a store with these versions still needs, in order; OpenError if a newer Perdure wrote it."""
    known = migrations(dialect)
    version = max(applied, default=0)
    if version > len(known):
        raise OpenError(
            f"written by a newer Perdure: schema {version}, this one knows {len(known)}; upgrade Perdure to open it"
        )
    if set(applied) != set(range(1, version + 1)):
        raise OpenError(f"its list of schema versions has holes ({sorted(applied)}); restore the store from a backup")
    return list(known[version:])
