"""A copy of a live SQLite store.

A connection holds one read transaction from the first byte to the last: so the copy is one point of the commit order.
Writers go on in the log, which is not cut back until the copy is done. There are two ways:

    frozen   under the writers' lock, for a moment, the log is brought into the file and the read transaction begun.
             From then on SQLite may not touch the file: what is in it is what the transaction sees. So it can be
             copied like any file, three times faster than page by page. By a process of its own, because closing a
             descriptor of the file here would drop the locks that SQLite holds on it.
    pages    SQLite's online backup, page by page: for small stores, and where another reader keeps the log from being
             brought in.

The copy is a store's file itself; a row of its table `meta` says that it is a backup, of what and of when.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote

import apsw
import orjson

from perdure.errors import Damaged, StoreError, UsageError
from perdure.ops.copies.places import Part
from perdure.ops.copies.sections import damaged_backup
from perdure.storage.program import Progress
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.file_lock import FileGate
from perdure.storage.sqlite.opening import APPLICATION_ID, LOG_BYTES_MAX, Target, connect, open_gate

MARK = "backup"  # the key in meta
# 1 MB: between two of them progress is told, and nothing else. A longer step is no faster.
_STEP_PAGES = 256
_FROZEN_MIN_BYTES = 8 << 20  # below this, starting a process takes longer than it saves
_PAGE_BYTES_MIN = 512
_OTHERS_S, _LOOK_S = 1.0, 0.001  # how long to wait for somebody who brings in the log, and how often to look
# The log is made this part of the file's length, if there is room for many times that, by so much at a time.
_LOG_PART, _ROOM, _LENGTHEN_BYTES = 8, 10, 4 << 20
_COPIER = Path(__file__).with_name("copier.py")


def copy_file(driver: SqliteDriver, part: Part, made: str, at: int, progress: Progress | None) -> int:
    """Copy the store to the part. The stamp of the last commit that is in it."""
    try:
        copied = _copy_frozen(driver, part, progress) if _can_freeze(driver) else None
        if copied is None:
            with _source(driver) as source:
                copied = (*_point(source), copy_pages(source, part.part, progress))
        stamp, store, size = copied
        mark = {"id": made, "store": store, "at": at, "stamp": stamp}
        _sign(part.part, mark, size, part.place)
    except apsw.Error as error:
        raise _failed(error, driver, part) from error
    return stamp


def _point(source: apsw.Connection) -> tuple[int, str]:
    """The last commit that a connection sees, and the store's id."""
    [(stamp,)] = source.execute("SELECT stamp FROM clock")
    [(store,)] = source.execute("SELECT value FROM meta WHERE key = 'store'")
    return int(stamp), str(store)


def _can_freeze(driver: SqliteDriver) -> bool:
    target = driver._target
    if target.in_memory or driver.read_only or target.vfs or not sys.executable or not _COPIER.exists():
        return False
    return os.path.getsize(driver.path) >= _FROZEN_MIN_BYTES


def _copy_frozen(driver: SqliteDriver, part: Part, progress: Progress | None) -> tuple[int, str, int] | None:
    """The point of the commit order, the store's id, how many bytes; None: the file cannot be frozen now."""
    with _copier(driver.path, part) as copier, _frozen(driver) as source:
        if source is None:
            return None
        return *_point(source), _follow(copier, driver.path, part, progress)


@contextmanager
def _frozen(driver: SqliteDriver) -> Iterator[apsw.Connection | None]:
    """A connection whose transaction sees what is in the file, which nobody changes meanwhile; None: not now."""
    target = driver._target
    reader = connect(target, "write", "reader")
    try:
        gate = open_gate(target)
        helper = connect(replace(target, durability="normal"), "write", "writer")  # only bringing in must be synced
        try:
            version = helper.pragma("data_version")
            # Most of the log is brought in while others go on; they wait for the rest alone.
            _bring_in(helper)
            if helper.pragma("data_version") != version:  # they do
                _lengthen_log(helper, gate, target)
            gate.acquire(monotonic() + target.timeout_s)
            _bring_in(helper)
            # Something must stand in the log when the reader begins. A reader that needs nothing of the log would keep
            # others from bringing anything into the file, and each of their tries would take longer than the last.
            helper.execute("UPDATE clock SET stamp = stamp + 1")
            reader.execute("BEGIN")
            _point(reader)
            frozen = _bring_in(helper)  # not if an older reader is there, or somebody writes who does not know our lock
        except apsw.BusyError:
            frozen = False
        finally:
            gate.close()
            helper.close()
        yield reader if frozen else None
    finally:
        reader.close()


def _lengthen_log(connection: apsw.Connection, gate: FileGate, target: Target) -> None:
    """Make the log as long as it will get while the file is frozen: syncing a file that grows costs each commit more,
    and while something is copied beside it several times as much. A part at a time, so that nobody waits for long.

    SQLite takes what follows the last commit for an end, and never locks this file: so it may be closed here.
    """
    wanted = min(os.path.getsize(target.path) // _LOG_PART, LOG_BYTES_MAX)
    try:
        there = os.statvfs(os.path.dirname(target.path))
        if there.f_bavail * there.f_frsize < _ROOM * wanted:
            return
        log = os.open(f"{target.path}-wal", os.O_WRONLY)
    except OSError:
        return  # it is only slower without
    try:
        while (size := os.fstat(log).st_size) < wanted:
            gate.acquire(monotonic() + target.timeout_s)
            try:
                connection.execute("BEGIN IMMEDIATE")  # also against writers who do not know our lock
                size = os.fstat(log).st_size
                os.pwrite(log, bytes(_LENGTHEN_BYTES), size)
                os.fdatasync(log)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                gate.release()
    except OSError:
        pass
    finally:
        os.close(log)


def _bring_in(connection: apsw.Connection) -> bool:
    """Bring the log into the file. Whether all of it is there."""
    deadline = monotonic() + _OTHERS_S
    _point(connection)  # a connection that has read nothing does not know that there is a log, and does nothing
    while True:
        try:
            logged, copied = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            return bool(logged == copied)
        except apsw.BusyError:  # somebody else is at it, and SQLite does not wait for that
            if monotonic() > deadline:
                raise
            sleep(_LOOK_S)


@contextmanager
def _copier(path: str, part: Part) -> Iterator[subprocess.Popen[bytes]]:
    """The process that copies, once it is told to. Started before anything is frozen: nothing has to wait for that."""
    number = part.file.fileno()
    command = [sys.executable, "-I", "-S", str(_COPIER), path, str(part.part), str(number)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(number,)) as child:
        try:
            yield child
        except BaseException:
            child.kill()
            raise


def _follow(copier: subprocess.Popen[bytes], path: str, part: Part, progress: Progress | None) -> int:
    """Let it copy, and tell how far it is. How many bytes."""
    assert copier.stdin is not None
    assert copier.stdout is not None
    assert copier.stderr is not None
    try:
        os.write(copier.stdin.fileno(), b"copy\n")
    except BrokenPipeError:
        pass  # it could not even start: what it says of that comes below
    done, size = 0, -1
    for line in copier.stdout:
        done, size = map(int, line.split())
        if progress is not None:
            progress(done, size)
    complaint = copier.stderr.read().decode(errors="replace").strip()
    if copier.wait() or done != size:
        why = complaint.splitlines()[-1] if complaint else "cut short"
        if f"[Errno {errno.ENOSPC}]" in why:
            raise _no_room(part)
        raise StoreError(f"{path} could not be copied to {part.path}: {why}")
    return size


def _no_room(part: Part) -> StoreError:
    return StoreError(f"there is no room for the backup at {part.path}; nothing was written there")


def _failed(error: apsw.Error, driver: SqliteDriver, part: Part) -> BaseException:
    if isinstance(error, apsw.FullError):
        return _no_room(part)
    return translate(error, driver.path, driver._target.timeout_s)


@contextmanager
def _source(driver: SqliteDriver) -> Iterator[apsw.Connection]:
    """A connection inside a read transaction."""
    if driver._target.in_memory:  # its only connection is the writer's: it is ours until the copy is done
        gate, writer = driver._gate, driver._writer
        assert gate is not None
        assert writer is not None
        gate.acquire(monotonic() + driver._target.timeout_s)
        try:
            yield writer.connection
        finally:
            gate.release()
        return
    connection = connect(driver._target, driver._access, "reader")
    try:
        connection.execute("BEGIN")
        yield connection
    finally:
        connection.close()


def copy_pages(source: apsw.Connection, path: Path, progress: Progress | None = None) -> int:
    """Copy a database, page by page, to a new file that nobody else uses. How many bytes."""
    target = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        # Nothing of it counts before it is whole, synced and renamed: so it needs no journal and no syncs on the way.
        for pragma, value in (("journal_mode", "off"), ("synchronous", "off"), ("locking_mode", "exclusive")):
            target.pragma(pragma, value)
        page = int(source.pragma("page_size"))
        with target.backup("main", source, "main") as copying:
            while not copying.done:
                copying.step(_STEP_PAGES)
                if progress is not None:
                    total = copying.page_count
                    progress((total - copying.remaining) * page, total * page)
            copied = int(copying.page_count) * page
    finally:
        target.close()
    return copied


def _sign(path: Path, mark: dict[str, Any], size: int, place: str) -> None:
    """Write into the copy what it is."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.pragma("locking_mode", "exclusive")  # no shared memory beside it
        connection.pragma("synchronous", "off")  # nothing of it counts before `Part.keep`, which syncs
        row = (mark["id"], "backup", place, mark["at"], mark["stamp"], size)
        with connection:
            connection.execute(
                "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (MARK, orjson.dumps(mark).decode())
            )
            connection.execute(
                "INSERT OR REPLACE INTO copy (id, sort, place, at, stamp, bytes) VALUES (?, ?, ?, ?, ?, ?)", row
            )
    finally:
        connection.close()  # the last one: SQLite brings the log into the file and removes it


def damaged_file(path: Path, why: object) -> Damaged:
    """A backup of SQLite's that is damaged. It is a store's file: so it may be mended like one."""
    return damaged_backup(path, why, mend=f", or mend it with `perdure store repair --store {path}`")


def open_backup(path: Path) -> apsw.Connection:
    """A backup for reading. A store's own file works as well, if it is whole by itself or its log lies beside it."""
    name = f"file:{quote(str(path.absolute()))}" + ("" if os.path.exists(f"{path}-wal") else "?immutable=1")
    return apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def read_mark(path: Path) -> dict[str, Any] | None:
    """What a backup says of itself; None if it is a store like any other, or no store. Raises Damaged, UsageError."""
    name = f"file:{quote(str(Path(path).absolute()))}?immutable=1"
    try:
        if os.path.getsize(path) < _PAGE_BYTES_MIN and not os.path.exists(f"{path}-wal"):
            raise damaged_backup(path, "it is cut short")  # SQLite would take it for an empty one
        connection = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        try:
            if connection.pragma("application_id") != APPLICATION_ID:
                return None
            rows = list(connection.execute("SELECT value FROM meta WHERE key = ?", (MARK,)))
        finally:
            connection.close()
        found = orjson.loads(rows[0][0]) if rows else None
        return found if isinstance(found, dict) else None
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise damaged_file(path, error) from error
    except apsw.Error as error:
        raise UsageError(f"{path} cannot be read as a backup: {error}") from error
    except ValueError:
        return None
