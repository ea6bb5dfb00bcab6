"""The doctor's checks that only an SQLite store has: the file, its disk, its log, SQLite itself.

No file of the store is ever opened here by hand: closing it would drop the locks that SQLite holds in this process.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import apsw

from perdure.errors import PerdureError
from perdure.ops.doctor.findings import MB, Check, CheckContext, Finding, Level, Machine, query, query_one
from perdure.storage import migrate
from perdure.storage.program import Flow, Sql
from perdure.storage.sqlite import opening as sqlite_open
from perdure.storage.urls import sqlite_path
from perdure.values.amounts import size as shown

WAL_RESET_FIXED = (3, 51, 3)  # sqlite.org/wal.html#walresetbug; 3.52.0 had it too, and was withdrawn
_LOG_LARGE, _LOG_HUGE = 128 * MB, 2048 * MB  # the writer waits for readers from 64 MB on, see sqlite/writer.py
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_LAYERS = ("overlay", "aufs")  # of a container: gone with it
_OWNERS = Sql(
    """SELECT owner FROM run WHERE status = 'running' AND lease_until > {now} AND owner IS NOT NULL
    GROUP BY owner LIMIT 100"""
)
_OWNER = re.compile(r"f:([0-9a-f]{32})")  # runs/engine/liveness.py: its process holds a file beside the store
_MODES = [Sql(sqlite=f"PRAGMA {name}", postgres="SELECT 1") for name in ("journal_mode", "synchronous")]


def place(context: CheckContext) -> Flow[list[Finding]]:
    """Where the file is: a disk that keeps it, and that one machine only writes to."""
    path = context.driver.path
    if path == sqlite_open.MEMORY:
        message = "the store is in memory: everything is gone when the process ends"
        return [Finding("place", "problem", message, 'open a file: perdure.open("agent.db"), or PostgreSQL')]
    found = _file_system(path, context.machine)
    owners = yield from query(context, _OWNERS, now=context.machine.clock_us())
    names = [match[1] for (owner,) in owners if (match := _OWNER.fullmatch(str(owner)))]
    unseen = [name for name in names if not os.path.exists(f"{path}-owner-{name}")]
    if unseen:
        message = (
            f"runs are held by processes that this machine does not see ({len(unseen)}): on another machine, in a "
        )
        message += "container with another view of the folder, or dead since a moment ago"
        hint = "where several servers write, use PostgreSQL: SQLite's locks do not reach another machine"
        found.append(Finding("place", "warning", message, hint))
    return found or [Finding("place", "ok", f"SQLite at {path}, for processes of this machine")]


def _file_system(path: str, machine: Machine) -> list[Finding]:
    kind = sqlite_open.file_system(path, machine.mountinfo())
    if kind in sqlite_open.NETWORK_FILE_SYSTEMS:
        message = (
            f"{path} is on a network file system ({kind}), where SQLite's log is not safe and several servers may write"
        )
        return [Finding("place", "problem", message, "move it to a local disk, or use PostgreSQL")]
    if kind in _IN_MEMORY:
        message = f"{path} is on a disk in memory ({kind}): it is gone when the machine starts again"
        return [Finding("place", "warning", message, "move it to a disk that stays")]
    if kind in _LAYERS:
        message = f"{path} is in the layer of a container ({kind}): it is gone with the container"
        return [Finding("place", "warning", message, "put it on a volume")]
    if kind.startswith("fuse") or kind in ("virtiofs", "vboxsf", "prl_fs"):
        message = f"{path} is on {kind}: whether its locks reach all writers depends on what is behind it"
        return [Finding("place", "warning", message, "use a local disk, or PostgreSQL where several machines write")]
    return []


def durability(context: CheckContext) -> Flow[list[Finding]]:
    """Whether what a call returned from is on the disk."""
    [mode] = yield from query_one(context, _MODES[0])
    [level] = yield from query_one(context, _MODES[1])
    if context.driver.path == sqlite_open.MEMORY:
        return []
    if context.driver.read_only:  # then SQLite may have been told that nobody writes it, and knows no log
        message = "the store can only be read here: its disk, folder or file does not allow writing"
        return [Finding("durability", "note", message, "look at it where it is written")]
    if str(mode).lower() != "wal":
        message = f"journal_mode is {mode}, not wal"
        return [Finding("durability", "problem", message, "close all that use the file and open it with Perdure")]
    if int(level) < 2:
        message = 'durability="normal": a power cut may lose the last commits (a crash of the process may not)'
        return [
            Finding(
                "durability", "warning", message, 'open it with durability="full", the default, unless that is meant'
            )
        ]
    return [Finding("durability", "ok", "write-ahead log, synchronous=full: what was saved survives a power cut")]


def log(context: CheckContext) -> Flow[list[Finding]]:
    """The write-ahead log, and who keeps it from being started over."""
    yield from ()
    path = context.driver.path
    if path == sqlite_open.MEMORY:
        return []
    bytes_ = _bytes(path + "-wal")
    message = f"the write-ahead log has {shown(bytes_)}"
    if bytes_ < _LOG_LARGE:
        return [Finding("log", "ok", message)]
    level: Level = "problem" if bytes_ >= _LOG_HUGE else "warning"
    hint = "a process keeps a read transaction open, so that the log cannot restart: find it with `fuser`, and end it"
    return [Finding("log", level, message, hint)]


def permissions(context: CheckContext) -> Flow[list[Finding]]:
    """Who may read and write the file."""
    yield from ()
    path = context.driver.path
    return [] if path == sqlite_open.MEMORY else _permissions(path)


def _permissions(path: str) -> list[Finding]:
    modes = {name: os.stat(name).st_mode for name in (path, path + "-wal") if os.path.exists(name)}
    folder = os.stat(os.path.dirname(path)).st_mode
    for name, mode in modes.items():
        if mode & stat.S_IWOTH:
            return [
                Finding("permissions", "problem", f"everybody on this machine may write {name}", f"chmod o-rwx {name}")
            ]
    if folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
        message = f"everybody on this machine may replace files in {os.path.dirname(path)}"
        return [Finding("permissions", "problem", message, f"chmod o-w {os.path.dirname(path)}")]
    for name, mode in modes.items():
        # What the folder hides nobody can read, whatever the file's own mode.
        if mode & stat.S_IROTH and folder & stat.S_IXOTH:
            message = f"everybody on this machine may read {name} (mode {stat.filemode(mode)})"
            return [Finding("permissions", "warning", message, f"chmod o-rwx {path} {path}-*")]
    return [
        Finding("permissions", "ok", f"only its owner and group may read the file (mode {stat.filemode(modes[path])})")
    ]


def version(context: CheckContext) -> Flow[list[Finding]]:
    """SQLite's version, which comes with apsw."""
    yield from ()
    return [_version(apsw.sqlite_lib_version())]


def _version(text: str) -> Finding:
    numbers = tuple(int(part) for part in text.split(".")[:3])
    if numbers < WAL_RESET_FIXED:
        message = f"SQLite {text} may in rare cases damage a file that several connections write (its WAL-reset bug)"
        return Finding("sqlite", "warning", message, "pip install --upgrade apsw: 3.51.3 and later have the fix")
    return Finding("sqlite", "ok", f"SQLite {text}")


FIRST: list[tuple[str, Check]] = [
    ("place", place),
    ("durability", durability),
    ("log", log),
    ("permissions", permissions),
]
THEN: list[tuple[str, Check]] = [("sqlite", version)]


# --- for the checks that both databases have


def file_bytes(path: str) -> int:
    """The file and its log."""
    return 0 if path == sqlite_open.MEMORY else _bytes(path) + _bytes(path + "-wal")


def folder_of(path: str) -> str | None:
    return None if path == sqlite_open.MEMORY else os.path.dirname(os.path.abspath(path))


def _bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


# --- without opening the store


def look_before_opening(url: str) -> Finding | None:
    """What opening would change: an old schema. None: nothing, or it is not for us to say. Changes nothing."""
    try:
        path = sqlite_path(url)
        if path == sqlite_open.MEMORY or not os.path.isfile(path):
            return None
        path = os.path.realpath(path)
        # Without a log nobody has it open, and reading it so leaves no files beside it.
        access: sqlite_open.Access = "read" if os.path.exists(path + "-wal") else "immutable"
        connection = sqlite_open.connect(sqlite_open.Target(path, "full", 5.0, None), access, "reader")
        try:
            applied = sqlite_open.applied_versions(connection, path, create=False)
        finally:
            connection.close()
    except (apsw.Error, PerdureError, OSError):
        return None  # opening it will say that better
    from perdure.ops.doctor.checklist import schema_is_old

    newest = migrate.newest("sqlite")
    held = max(applied, default=0)
    return schema_is_old(held, newest) if 0 < held < newest else None


def outside(url: str, machine: Machine) -> list[Finding]:
    """What can be said of a file without opening it."""
    try:
        path = os.path.realpath(sqlite_path(url))
    except PerdureError:
        return []
    found: list[Finding] = []
    try:
        folder = Path(path).parent
        if os.path.exists(path):
            found += [*_file_system(path, machine), *_permissions(path)]
            if not os.access(path, os.R_OK):
                message = f"this user may not read {path}"
                found.append(
                    Finding("permissions", "problem", message, "run the doctor as the user that the store belongs to")
                )
        elif folder.is_dir():
            near = sorted(str(other) for other in folder.glob("*.db"))[:5]
            hint = f"there are {', '.join(near)}: is it one of these?" if near else "give its path with --store"
            found.append(Finding("place", "problem", f"there is no file {path}", hint))
        if folder.is_dir():
            total, free = machine.disk(str(folder))
            level: Level = "problem" if free < 64 * MB else "ok"
            hint = "free some space now: SQLite cannot even open a store on a full disk" if level == "problem" else ""
            found.append(Finding("disk", level, f"{shown(free)} of {shown(total)} are free", hint))
    except OSError as error:
        found.append(Finding("place", "note", f"could not be looked at: {error.strerror or error}", ""))
    return [*found, _version(apsw.sqlite_lib_version())]
