"""`perdure.repair`: mends a damaged store and says what it did; on a copy, unless told otherwise.

First the database as such, then for each tenant the log, what points into it, and runs; then every row that was taken
out of use goes to a file, and everything is verified. What is found sound is not touched, so that a second repair does
nothing, and one that was killed is simply run again. How the copy is made is each database's own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from perdure.errors import OpenError, UsageError
from perdure.log import quarantine
from perdure.log.ids import show_id
from perdure.log.repair import repair_log, repair_unknown_tenants
from perdure.log.thread_table import find_tenant
from perdure.ops.repair.preflight import Allowed, check_readable
from perdure.ops.repair.report import Mend, Repaired
from perdure.runs.maintenance.repair import repair_runs
from perdure.storage.files import sync_file, sync_folder
from perdure.storage.program import Driver, Progress, drive, read, write
from perdure.storage.urls import is_postgres, need_postgres, sqlite_path
from perdure.threads.context import Context
from perdure.transfer.catalogue import BackupRow, add_backup
from perdure.transfer.verify import tenant_names, verify_all

__all__ = ["Mend", "Repaired", "repair"]

_PAGE = 200


def repair(
    url: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str] | None = None,
    in_place: bool = False,
    dry_run: bool = False,
    leave: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> Repaired:
    """Mend a damaged store, all tenants, and say what was done.

    Works on a copy: of an SQLite file `agent.repaired.db` beside it, or `to`; on PostgreSQL a new schema, or the one
    that `to` names. A store in which nothing is wrong gets no copy. `in_place` mends the store itself: one tree of
    threads after the other, while others use it; an SQLite file whose pages are damaged only while nobody has it open,
    and it is kept as it was. `dry_run` does it on a copy that is thrown away. Nothing is kept that its hash does not
    prove; every row that is taken out of use is in the file `quarantine` of the answer.

    Without the key of a tenant it is refused (`KeyMissing`): sound data must not look lost. `leave` names tenants whose
    keys are gone for good; they stay as they are. `options` are those of `perdure.open`: `keys=`, `schema=`.
    `progress`: (done, of how many) of whatever is being done.
    """
    start = time.monotonic()
    url = os.fspath(url)
    if in_place and (to is not None or dry_run):
        raise UsageError("in_place=True goes with neither to= nor dry_run=True")
    if dry_run and to is not None:
        raise UsageError("dry_run=True leaves nothing behind: it goes without to=")
    allowed = Allowed(tuple(leave))
    if is_postgres(url):
        done = _repair_postgres(url, to, in_place, dry_run, progress, options, allowed)
    else:
        done = _repair_sqlite(url, to, in_place, dry_run, progress, options, allowed)
    return replace(done, seconds=time.monotonic() - start)


# --- SQLite


def _repair_sqlite(
    url: str,
    to: str | os.PathLike[str] | None,
    in_place: bool,
    dry_run: bool,
    progress: Progress | None,
    options: dict[str, Any],
    allowed: Allowed,
) -> Repaired:
    from perdure.ops.repair.identify import check_is_store
    from perdure.ops.repair.sqlite import copy_name, mend_file, working_copy
    from perdure.storage.sqlite.opening import check_file

    name = sqlite_path(url)
    if name == ":memory:":
        raise UsageError("a store in memory has no file to repair")
    path = Path(os.path.realpath(name))
    check_file(str(path))
    if not path.is_file():
        raise OpenError(f"there is no store at {path}; check the path")
    check_is_store(path)
    if in_place:
        return _in_place(path, progress, options, allowed)
    if dry_run:
        folder = tempfile.mkdtemp(prefix="perdure-repair-", dir=path.parent)
        try:
            copied = os.path.join(folder, path.name)
            tried = _repair_sqlite(str(path), copied, False, False, progress, options, allowed)
            return replace(tried, place=str(path), quarantine=None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    target = Path(to) if to is not None else copy_name(path)
    lost_rows = _quarantine_file(target)
    with working_copy(path, target, _timeout(options)) as part:
        physical = mend_file(part.part, progress)
        repaired = _mend(str(part.part), options, allowed, lost_rows, progress, origin=str(path))
        repaired = _with_physical(repaired, physical.mended, physical.lost)
        if not repaired.changed:
            return replace(repaired, place=str(path))
        part.commit()
    return replace(repaired, place=str(target))


def _in_place(path: Path, progress: Progress | None, options: dict[str, Any], allowed: Allowed) -> Repaired:
    from perdure.ops.repair.sqlite import is_whole, mend_file, replace_content
    from perdure.ops.store import open_store

    lost_rows = _quarantine_file(path)
    if is_whole(path, _timeout(options)):
        done = _mend(str(path), options, allowed, lost_rows, progress)
        return replace(done, in_place=True, place=str(path))
    answers: list[Repaired] = []

    def mend(work: Path) -> None:
        physical = mend_file(work, progress)
        repaired = _mend(str(work), options, allowed, lost_rows, progress)
        answers.append(_with_physical(repaired, physical.mended, physical.lost))

    kept = replace_content(path, _timeout(options), mend)
    with open_store(str(path), **options) as store:
        _remember(store._context, "copy of the damaged file,", str(kept), kept.stat().st_size)
    return replace(answers[0], in_place=True, place=str(path), damaged=str(kept))


def _with_physical(repaired: Repaired, mended: Sequence[str], lost: Sequence[str]) -> Repaired:
    """What was done to the file stands first."""
    return replace(
        repaired,
        mended=(*(Mend("", None, None, None, what) for what in mended), *repaired.mended),
        lost=(*(Mend("", None, None, None, what) for what in lost), *repaired.lost),
    )


def _timeout(options: dict[str, Any]) -> float:
    return float(options.get("timeout_s", 30.0))


# --- PostgreSQL


def _repair_postgres(
    url: str,
    to: str | os.PathLike[str] | None,
    in_place: bool,
    dry_run: bool,
    progress: Progress | None,
    options: dict[str, Any],
    allowed: Allowed,
) -> Repaired:
    need_postgres()
    from perdure.ops.repair.postgres import copy_schema, drop_schema, target_of

    here = target_of(url, options)
    if in_place:
        done = _mend(url, options, allowed, _quarantine_file(Path(here.schema)), progress)
        return replace(done, in_place=True, place=f'schema "{here.schema}" of {here}')
    new = str(to) if to is not None else f"{here.schema}_repair_{datetime.now(UTC):%Y%m%d%H%M%S}"
    target_of(url, options, new)  # a name that is none is refused before anything is made
    copy_schema(url, options, new)
    repaired = None
    try:
        lost_rows = _quarantine_file(Path(new))
        inside = {**options, "schema": new}
        repaired = _mend(url, inside, allowed, lost_rows, progress, origin=f'schema "{here.schema}" of {here}')
    finally:
        if repaired is None or dry_run or not repaired.changed:
            drop_schema(url, options, new)
    if dry_run and repaired.quarantine is not None:
        os.unlink(repaired.quarantine)
    if dry_run or not repaired.changed:
        return replace(repaired, place=f'schema "{here.schema}" of {here}', quarantine=None)
    return replace(repaired, place=f'schema "{new}" of {here}')


# --- both


def _quarantine_file(target: Path) -> Path:
    return Path(os.path.abspath(f"{target}.quarantine.jsonl"))


def _mend(
    url: str,
    options: dict[str, Any],
    allowed: Allowed,
    lost_rows: Path,
    progress: Progress | None,
    *,
    origin: str | None = None,
) -> Repaired:
    """Mend an open database: every tenant's log and runs. Then the rows that were set aside go to their file. `origin`:
    what this is a copy of."""
    from perdure.ops.store import open_store

    mended: list[Mend] = []
    lost: list[Mend] = []
    with open_store(url, **{**options, "create": True}) as store:
        driver = store._context.driver
        if not driver.capabilities.sees_all_tenants:
            raise UsageError("a repair is of all tenants, and this role does not see all of them: do it as the owner")
        passed = drive(driver, check_readable(store._context, allowed, options.get("keys")))
        unknown = drive(driver, write(repair_unknown_tenants, solo=True))
        mended += _notes("", unknown.repaired)
        lost += _notes("", unknown.lost)
        tenants = [name for name in drive(driver, read(tenant_names)) if name not in passed]
        for name in tenants:
            tenant = drive(driver, read(partial(find_tenant, name)))
            if tenant is None:
                continue
            log = drive(driver, repair_log(tenant, progress))
            mended += _notes(name, log.repaired)
            lost += _notes(name, log.lost)
            runs = drive(driver, repair_runs(tenant, progress))
            mended += _run_notes(name, runs.mended)
            lost += _run_notes(name, runs.lost)
        rows = _write_out(driver, lost_rows)
        if rows:
            _remember(store._context, "quarantine", str(lost_rows), lost_rows.stat().st_size)
        if origin is not None and (mended or lost):
            _remember(store._context, "damaged store, kept as it was when this copy was", origin, 0)
        report = verify_all(store, tenants)
    written = str(lost_rows) if rows else None
    return Repaired(url, False, tuple(mended), tuple(lost), written, rows, report, 0.0, left=tuple(allowed.leave))


def _notes(tenant: str, notes: Sequence[tuple[str, int | None, str]]) -> list[Mend]:
    return [
        Mend(tenant, None if thread == "(store)" else thread, None if record is None else show_id(record), None, what)
        for thread, record, what in notes
    ]


def _run_notes(tenant: str, notes: Sequence[tuple[str, int | None, str]]) -> list[Mend]:
    return [Mend(tenant, None, None, run or None, what) for run, _, what in notes]


def _remember(ctx: Context, kind: str, place: str, size: int) -> None:
    """Erasing does not reach it, and names it."""
    at = ctx.clock_us()
    drive(ctx.driver, write(partial(add_backup, BackupRow(ctx.entropy(8).hex(), kind, place, None, at, size))))


def _write_out(driver: Driver, path: Path) -> int:
    """Bring the rows that were set aside to a file, safely, and only then out of the table. How many."""
    count = 0
    while rows := drive(driver, read(partial(quarantine.kept, _PAGE))):
        with _append_to(path) as file:
            for row in rows:
                line = {"tenant": row.tenant, "table": row.kind, "reason": row.reason}
                line["key"], line["row"] = row.key, orjson.loads(row.content)
                file.write(orjson.dumps(line) + b"\n")
            sync_file(file)
        sync_folder(path)
        drive(driver, write(partial(quarantine.drop, rows)))
        count += len(rows)
    return count


def _append_to(path: Path) -> BinaryIO:
    """A file that only its owner may read: it holds what the store knows."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab")
