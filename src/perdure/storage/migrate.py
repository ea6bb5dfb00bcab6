"""The versions of a store's schema, and which of them a store still needs.

A migration is the SQL of all declarations with one number (`domains.py`). A driver applies it, updates the tables and
triggers of snapshots, and inserts its row in one transaction. A `SchemaChange` must not drop, rename or rebuild a
declared table: snapshots would show its rows twice, or not at all. A released migration never changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from perdure.errors import OpenError
from perdure.storage.domains import Domain, domains
from perdure.storage.program import Dialect
from perdure.storage.table_sql import additions, changes, versions

# Both databases read this text. applied_at: microseconds since 1970, as everywhere in the schema.
CREATE_TABLE = """CREATE TABLE IF NOT EXISTS migration (
    version INTEGER PRIMARY KEY,
    applied_at BIGINT NOT NULL
)"""
SELECT_APPLIED = "SELECT version FROM migration ORDER BY version"
INSERT_APPLIED = "INSERT INTO migration (version, applied_at) VALUES (:version, :applied_at)"

_COMMENT = re.compile(r"[ \t]*--[^\n]*")  # removed, because SQLite would keep it in the schema of every store


@dataclass(frozen=True, slots=True)
class Migration:
    """One version of the schema, as SQL. Each text may hold several statements.

    `adds` runs first. Then the triggers of snapshots are updated, so that snapshots keep the rows that `changes`
    updates."""

    version: int
    adds: str
    changes: str = ""


def migrations(dialect: Dialect) -> tuple[Migration, ...]:
    """Return all migrations of this version of Perdure, in order."""
    return _migrations(dialect, domains())


@lru_cache(maxsize=4)
def _migrations(dialect: Dialect, known: tuple[Domain, ...]) -> tuple[Migration, ...]:
    numbers = versions(known)
    if numbers != list(range(1, len(numbers) + 1)):  # "schema 7" would mean different things to different stores
        raise OpenError(f"the declared versions of the schema are not numbered 1, 2, 3 …: {numbers}")
    return tuple(
        Migration(version, *(_COMMENT.sub("", ";\n".join(of(known, dialect, version))) for of in (additions, changes)))
        for version in numbers
    )


def newest(dialect: Dialect) -> int:
    """Return the schema version of a new store."""
    return len(migrations(dialect))


def pending(dialect: Dialect, applied: Collection[int]) -> list[Migration]:
    """Return the migrations that a store with these versions still needs, in order.

    Raise OpenError if a newer Perdure wrote the store, or if its versions have holes."""
    known = migrations(dialect)
    version = max(applied, default=0)
    if version > len(known):
        raise OpenError(
            f"written by a newer Perdure: schema {version}, this one knows {len(known)}; upgrade Perdure to open it"
        )
    if set(applied) != set(range(1, version + 1)):
        raise OpenError(f"its list of schema versions has holes ({sorted(applied)}); restore the store from a backup")
    return list(known[version:])
