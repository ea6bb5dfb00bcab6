"""What is known of copies: the answers that making one gives, and the table that remembers them.

Remembered, because deleting and erasing cannot reach them: their answers name what may still hold the data. And because
a backup that was never restored is only a hope: the table says when that was tried last.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from perdure.storage.program import Batch, Program, Rows, Sql
from perdure.threads.models import Report

_ADD = Sql(
    """INSERT INTO copy (id, sort, place, tenant, at, stamp, bytes, restored_at)
    VALUES (:id, :sort, :place, :tenant, :at, :stamp, :bytes, NULL) ON CONFLICT (id) DO NOTHING"""
)
_RESTORED = Sql("UPDATE copy SET restored_at = :at WHERE id = :id RETURNING id")
# The commit order: SQLite's counter; of PostgreSQL the oldest transaction that was running.
STAMP = Sql(sqlite="SELECT stamp FROM clock", postgres="SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
STORE = Sql("SELECT value FROM meta WHERE key = 'store'")


@dataclass(frozen=True, slots=True)
class Exported:
    """A thread that was written to a file."""

    path: str
    thread: str
    checkpoints: int
    bytes: int
    is_whole: bool  # False: one line only


@dataclass(frozen=True, slots=True)
class Imported:
    """A thread that was taken in from a file. `already`: it was here, the same; nothing was written."""

    thread: str
    checkpoints: int
    head: str
    already: bool = False


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy of a whole store, as it was at one point of its commit order."""

    id: str
    path: str
    at: datetime
    stamp: int  # SQLite: the last commit that is in it; PostgreSQL: every commit before this one is
    bytes: int
    seconds: float
    snapshot: str | None = None  # PostgreSQL's pg_current_snapshot()


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` did: where to, what was found there when it was checked, and how many runs were queued again."""

    backup: str
    url: str
    report: Report
    requeued: int
    tenants: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.report.ok


class CopyRow(NamedTuple):
    """A row of table copy, as it is when the copy is made."""

    id: str
    sort: str
    place: str
    tenant: int | None
    at: int
    stamp: int
    bytes: int


def add_copy(row: CopyRow) -> Program[None]:
    """Remember a copy."""
    yield Batch(_ADD(**row._asdict()), last=True)


def mark_restored(copy: str, at: int) -> Program[bool]:
    """Remember that a copy was restored and found whole. False: it is none of this store's."""
    [rows] = yield Batch(_RESTORED(id=copy, at=at), last=True)
    return bool(rows)


def stamp_and_store() -> Generator[Batch, list[Rows], tuple[int, str]]:
    """Where the commit order is, and the store's id."""
    stamps, found = yield Batch(STAMP(), STORE())
    return int(stamps[0][0]), str(found[0][0]) if found else ""
