"""`perdure.ops.repair_store`: make a repaired copy of a damaged store, and report each repair. The store stays.

The database itself is repaired first (SQLite: `rebuild.py`), then each tenant's log, the rows that point into it, and
runs. Data that its hash proves is kept; other data is reported and left out. At the end everything is verified. A
repair that was killed leaves no copy; run it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import KeyMissing, NotEncrypted, OpenError, UsageError
from perdure.log.ids import show_id
from perdure.log.repair import drop_unknown_tenants, repair_log
from perdure.log.thread_table import find_tenant, thread_or_stub
from perdure.memory.verify import drop_loose_vectors
from perdure.runs.maintenance.repair import repair_runs
from perdure.storage.columns import MARK
from perdure.storage.program import Batch, Driver, Program, Progress, Sql, drive, read, write
from perdure.storage.urls import is_postgres, need_postgres, redacted, sqlite_path
from perdure.threads.models import Report
from perdure.transfers.catalogue import BackupRow, add_backup
from perdure.transfers.files import AtomicFile
from perdure.transfers.verify import tenant_names, verify_all
from perdure.transfers.whole import copy_store

if TYPE_CHECKING:
    from perdure.ops.repair.rebuild import Rebuilt

_SAMPLE = 20
_STARTS = [
    Sql(f"SELECT substr({column}, 1, 3) FROM {table} WHERE tenant = :tenant ORDER BY {key} LIMIT :limit")
    for table, column, key in (("body", "salt", "id"), ("journal", "body", "run, seq"))
]
_KEY = Sql("SELECT 1 FROM tenant_key WHERE tenant = :tenant")


@dataclass(frozen=True, slots=True)
class RepairNote:
    """One repair, or one loss, in a thread, a checkpoint, a run, or the store itself."""

    tenant: str  # "": the store itself
    thread: str | None
    checkpoint: str | None
    run: str | None
    what: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.thread or self.run, self.checkpoint) if part)
        return f"{where or 'store'}: {self.what}"


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair. It is `ok` if nothing was lost and the result has no problem."""

    place: str  # of the repaired copy, or of the store itself if nothing was wrong
    repaired: tuple[RepairNote, ...]
    lost: tuple[RepairNote, ...]
    report: Report  # of all tenants, after the repair
    left: tuple[str, ...]  # tenants whose keys are missing: they were copied as they are
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        return bool(self.repaired or self.lost)

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.lost


def repair_store(
    url: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Repaired:
    """Make a repaired copy of a damaged store, all tenants, and report each repair and loss.

    The copy of an SQLite file is `agent.repaired.db` beside it, or `to`. On PostgreSQL it is a new schema, which `to`
    may name. A store in which nothing is wrong gets no copy. Data that its hash does not prove is left out; the damaged
    store still has it. A tenant whose key is missing is copied as it is, and named in `left`. `options` are those of
    `perdure.open`: `keys=`, `schema=`. `progress` is called with (done, total) of the current phase.
    """
    start = time.monotonic()
    make = _repair_postgres if is_postgres(os.fspath(url)) else _repair_sqlite
    return replace(make(os.fspath(url), to, progress, options), seconds=time.monotonic() - start)


def _repair_sqlite(
    url: str, to: str | os.PathLike[str] | None, progress: Progress | None, options: dict[str, Any]
) -> Repaired:
    from perdure.ops.repair.rebuild import copy_raw, rebuild_if_damaged
    from perdure.storage.sqlite.opening import check_file

    path = Path(os.path.realpath(sqlite_path(url)))
    check_file(str(path))
    if not path.is_file():
        raise OpenError(f"there is no store at {path}; check the path")
    target = Path(to) if to is not None else path.with_name(f"{path.stem}.repaired{path.suffix}")
    with AtomicFile(target) as file:
        copy_raw(path, file.part, float(options.get("timeout_s", 30.0)))
        rebuilt = rebuild_if_damaged(file.part, path, progress)
        done = _repair_copy(str(file.part), options, str(path), rebuilt if rebuilt.rows else None, progress)
        done = replace(
            done,
            repaired=(*(RepairNote("", None, None, None, note) for note in rebuilt.notes), *done.repaired),
            lost=(*(RepairNote("", None, None, None, note) for note in rebuilt.lost), *done.lost),
        )
        if done.changed:
            file.commit()
    return replace(done, place=str(target if done.changed else path))


def _repair_postgres(
    url: str, to: str | os.PathLike[str] | None, progress: Progress | None, options: dict[str, Any]
) -> Repaired:
    need_postgres()
    from perdure.ops.store import open_store

    schema = options.get("schema", "perdure")
    new = os.fspath(to) if to is not None else f"{schema}_repair_{datetime.now(UTC):%Y%m%d%H%M%S}"
    inside = {**options, "schema": new}
    origin = f'schema "{schema}" of {redacted(url)}'
    done = None
    with open_store(url, **{**options, "create": False}) as source:
        driver = source._context.driver.capabilities.base
        _execute(driver, f'CREATE SCHEMA "{new}"')  # must be new: it is dropped if nothing was repaired
        try:
            with open_store(url, **inside) as copy:
                copy_store(driver, copy._context.driver.capabilities.base, progress)
            done = _repair_copy(url, inside, origin, None, progress)
        finally:
            if done is None or not done.changed:
                _execute(driver, f'DROP SCHEMA "{new}" CASCADE')
    return replace(done, place=f'schema "{new}" of {redacted(url)}' if done.changed else origin)


def _execute(driver: Any, statement: str) -> None:
    import psycopg

    try:
        with driver.connect_alone() as connection:
            connection.execute(f"SET statement_timeout = 0; {statement}")
    except psycopg.Error as error:
        raise UsageError(f"the schema of the copy: {error}; choose another one with to=") from error


def _repair_copy(
    url: str, options: dict[str, Any], origin: str, rebuilt: Rebuilt | None, progress: Progress | None
) -> Repaired:
    """Repair every tenant's log and runs in a copy, and use what a rebuild of its file kept for that."""
    from perdure.ops.store import open_store

    repaired: list[RepairNote] = []
    lost: list[RepairNote] = []
    left: list[str] = []
    tenants: list[str] = []
    with open_store(url, **{**options, "create": True}) as store:
        driver = store._context.driver
        lost += _notes("", drive(driver, write(drop_unknown_tenants, solo=True)))
        for name in drive(driver, read(tenant_names)):
            tenant = _readable(driver, name)
            if tenant is None:
                left.append(name)
                continue
            tenants.append(name)
            log = drive(driver, repair_log(tenant, progress, rebuilt.names.get(tenant, {}) if rebuilt else {}))
            runs = drive(driver, repair_runs(tenant, progress))
            repaired += _notes(name, log.repaired) + _run_notes(name, runs.repaired)
            lost += _notes(name, log.lost) + _run_notes(name, runs.lost)
            if vectors := drive(driver, write(partial(drop_loose_vectors, tenant))):
                repaired.append(RepairNote(name, None, None, None, f"{vectors} vectors of no version were removed"))
        if repaired or lost or rebuilt:  # recorded as a copy that `erase` does not reach, and therefore names
            ctx = store._context
            row = BackupRow(ctx.entropy(8).hex(), "damaged store", origin, None, ctx.clock_us(), 0)
            drive(driver, write(partial(add_backup, row)))
        report = verify_all(store, tenants)
    return Repaired(url, tuple(repaired), tuple(lost), report, tuple(left))


def _readable(driver: Driver, name: str) -> int | None:
    """Return a tenant's number, or None if its key is missing: unreadable data must not be taken for damaged."""
    try:
        tenant = drive(driver, read(partial(find_tenant, name)))
        if tenant is None:
            return None
        drive(driver, read(partial(thread_or_stub, tenant, "")))  # reading an encrypted column needs the key
    except (KeyMissing, NotEncrypted):
        return None
    return None if drive(driver, read(partial(_has_lost_its_key, tenant))) else tenant


def _has_lost_its_key(tenant: int) -> Program[bool]:
    """Return whether most values look encrypted and the row of the data key is missing."""
    key, *starts = yield Batch(_KEY(tenant=tenant), *(sql(tenant=tenant, limit=_SAMPLE) for sql in _STARTS))
    values = [start for rows in starts for (start,) in rows]
    return not key and 2 * values.count(MARK) > len(values)


def _notes(tenant: str, notes: Sequence[tuple[str, int | None, str]]) -> list[RepairNote]:
    return [
        RepairNote(
            tenant, None if thread == "(store)" else thread, None if record is None else show_id(record), None, note
        )
        for thread, record, note in notes
    ]


def _run_notes(tenant: str, notes: Sequence[tuple[str, int | None, str]]) -> list[RepairNote]:
    return [RepairNote(tenant, None, None, run or None, note) for run, _, note in notes]
