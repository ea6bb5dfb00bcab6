"""The doctor's checks that only an SQLite store has: the file, its disk, its log.

Never open a file of the store here: closing it would drop the locks that SQLite holds in this process.
"""

from __future__ import annotations

import os
import stat

import apsw

from perdure.ops.doctor.findings import MB, Check, Finding, Level
from perdure.ops.health import whole_store
from perdure.storage.program import Flow, Sql, fetch
from perdure.storage.sqlite import opening
from perdure.threads.context import StoreContext
from perdure.values.amounts import size

_WAL_RESET_FIXED = (3, 51, 3)  # sqlite.org/wal.html#walresetbug
_LOG_LARGE, _LOG_HUGE = 128 * MB, 2048 * MB  # the writer waits for readers from 64 MB on, see sqlite/writer.py
_IN_MEMORY, _LAYERS = ("tmpfs", "ramfs", "devtmpfs"), ("overlay", "aufs")
_SYNCHRONOUS = Sql(sqlite="PRAGMA synchronous", postgres="SELECT 1")


def place(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that the file is on a local, persistent disk, and that SQLite has no known bug that damages it."""
    yield from ()
    path = ctx.driver.capabilities.path
    if path == opening.MEMORY:
        message = "the store is in memory: everything is gone when the process ends"
        return [Finding("place", "problem", message, 'open a file: perdure.open("agent.db"), or PostgreSQL')]
    kind = opening.file_system(path, opening.read_mountinfo())
    if opening.network_file_system(path, opening.read_mountinfo()):
        message = f"{path} is on a network file system ({kind}), where SQLite's locks and log are not safe"
        return [Finding("place", "problem", message, "move it to a local disk, or use PostgreSQL")]
    if kind in _IN_MEMORY or kind in _LAYERS:
        message = f"{path} is on {kind}, which does not survive a restart of the machine or container"
        return [Finding("place", "warning", message, "move it to a disk or a volume that stays")]
    if kind.startswith("fuse") or kind in ("virtiofs", "vboxsf", "prl_fs"):
        message = f"{path} is on {kind}: whether its locks reach all writers depends on what is behind it"
        return [Finding("place", "warning", message, "use a local disk, or PostgreSQL where several machines write")]
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")[:3]) < _WAL_RESET_FIXED:
        message = f"SQLite {version} may in rare cases damage a file that several connections write (WAL-reset bug)"
        return [Finding("place", "warning", message, "pip install --upgrade apsw: 3.51.3 and later have the fix")]
    return [Finding("place", "ok", f"SQLite {version} at {path}, for one machine: several hosts need PostgreSQL")]


def durability(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check that a commit is on the disk when the call returns."""
    [(level,)] = yield from fetch(_SYNCHRONOUS)
    message = "write-ahead log, synchronous=full: what was saved survives a power cut"
    if int(level) < 2:
        message = 'durability="normal": a power cut may lose the last commits (a crash of the process may not)'
    hint = 'open it with durability="full", the default, unless that is meant'
    return [Finding.of("durability", int(level) < 2, message, hint)]


def log(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check the size of the write-ahead log. An open read transaction keeps it from restarting."""
    bytes_ = (yield from whole_store(ctx)).wal_bytes or 0
    message = f"the write-ahead log has {size(bytes_)}"
    if bytes_ < _LOG_LARGE:
        return [Finding("log", "ok", message)]
    level: Level = "problem" if bytes_ >= _LOG_HUGE else "warning"
    hint = "a process keeps a read transaction open, so that the log cannot restart: find it with `fuser`, and end it"
    return [Finding("log", level, message, hint)]


def permissions(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check who may read and write the file."""
    yield from ()
    path = ctx.driver.capabilities.path
    if path == opening.MEMORY:
        return []
    mode, folder = os.stat(path).st_mode, os.stat(os.path.dirname(path)).st_mode
    hint = f"chmod o-rwx {path} {path}-*"
    if mode & stat.S_IWOTH:
        return [Finding("permissions", "problem", f"any user of this machine may write {path}", hint)]
    if folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
        message = f"any user of this machine may replace files in {os.path.dirname(path)}"
        return [Finding("permissions", "problem", message, f"chmod o-w {os.path.dirname(path)}")]
    # Without search permission on the folder, the file's own mode does not matter.
    is_open = bool(mode & stat.S_IROTH and folder & stat.S_IXOTH)
    few = "only its owner and group" if mode & stat.S_IRGRP else "only its owner"
    who = "any user of this machine" if is_open else few
    return [Finding.of("permissions", is_open, f"{who} may read {path} (mode {stat.filemode(mode)})", hint)]


CHECKS: tuple[Check, ...] = (place, durability, log, permissions)
