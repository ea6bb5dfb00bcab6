"""The table `copy`, which lists the copies of the store that exist.

Deleting and erasing cannot reach copies, so their results name the copies that may still hold the data. The table also
has the time when a backup was last tested by restoring it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import NamedTuple

from perdure.errors import ReadOnlyStore
from perdure.storage.program import Batch, Driver, Program, Sql, drive, write
from perdure.threads.models import Report
from perdure.transfers.files import AtomicFile

_ADD = Sql(
    """INSERT INTO copy (id, kind, place, tenant, at, bytes, restored_at)
    VALUES (:id, :kind, :place, :tenant, :at, :bytes, NULL) ON CONFLICT (id) DO UPDATE SET kind = excluded.kind"""
)
_RESTORED = Sql("UPDATE copy SET restored_at = :at WHERE id = :id RETURNING id")


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy of a whole store, as it was at one point of its commit order."""

    id: str
    path: str
    at: datetime
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `restore`: the new store, the report of its verification, and how many runs were queued again."""

    backup: str
    url: str
    report: Report
    requeued: int
    tenants: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.report.ok


class BackupRow(NamedTuple):
    id: str
    kind: str
    place: str
    tenant: int | None
    at: int
    bytes: int


def add_backup(row: BackupRow) -> Program[None]:
    yield Batch(_ADD(**row._asdict()), last=True)


def place_copy(driver: Driver, file: AtomicFile, row: BackupRow) -> None:
    """Put a finished copy in its place, and record it before and after: erasing must name it, also after a kill."""
    with suppress(ReadOnlyStore):  # such a store cannot record its copies
        drive(driver, write(partial(add_backup, row._replace(kind=f"unfinished {row.kind}"))))
    file.commit()
    with suppress(ReadOnlyStore):
        drive(driver, write(partial(add_backup, row)))


def mark_tested(copy: str, at: int) -> Program[bool]:
    """Record that a copy was restored and verified. Return False if the store has no such copy."""
    [rows] = yield Batch(_RESTORED(id=copy, at=at), last=True)
    return bool(rows)
