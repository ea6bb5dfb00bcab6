"""Opening an SQLite store: is this a place and a file we may use, and is its schema the one we know?

Everything is checked before anything is changed: a file that is not ours is never switched to WAL or written to, and no
lock files appear beside it. Python never opens an existing store's file itself: closing any descriptor of it would drop
the locks that SQLite holds here (POSIX locks belong to the process, not to the descriptor).
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Literal

import apsw

from perdure.errors import OpenError
from perdure.storage import migrate
from perdure.storage.domains import all_tables, versioned_tables
from perdure.storage.sqlite.errors import read_only
from perdure.storage.sqlite.file_lock import FileLock
from perdure.storage.sqlite.snapshot_views import show
from perdure.storage.sqlite.statistics import write_statistics
from perdure.storage.versions import reconcile_sqlite

MEMORY = ":memory:"
APPLICATION_ID = int.from_bytes(b"Perd", "big")  # in the file's header: how we, and `file`, recognise a store
# Half of SQLite's default: a save changes a few hundred bytes on each of four pages, and writes all of these pages.
PAGE_BYTES = 2048
LOG_BYTES_MAX = 64 * 1024 * 1024  # what stays of the log's file when it is started over

Durability = Literal["full", "normal"]
Role = Literal["writer", "reader"]

# WAL keeps its index in shared memory, which does not reach another machine: two hosts would overwrite each other.
_NETWORK = (
    r"nfs4?|cifs|smb\w*|9p|afs|coda|ceph|glusterfs|lustre|beegfs|gpfs|pvfs2|orangefs|ncpfs|davfs"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|rclone|gcsfuse|davfs2|smbnetfs)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """Which file, and how to talk to it."""

    path: str  # absolute and without symlinks, so that every name of a store leads to the same lock; or MEMORY
    durability: Durability
    timeout_s: float
    vfs: str | None

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY


def read_mountinfo() -> str:
    """What Linux says about mounts; empty elsewhere."""
    try:
        return Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def network_file_system(path: str, mountinfo: str) -> str | None:
    """The type of the network file system that `path` lies on, or None for a local one."""
    kind = file_system(path, mountinfo)
    return kind if re.fullmatch(_NETWORK, kind) else None


def file_system(path: str, mountinfo: str) -> str:
    """The type of the file system that `path` lies on; empty if it is not known."""
    kind, longest = "", -1
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        # The kernel writes a blank as \040; of several mounts on one point the last is the visible one.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            kind, longest = right.split(" ")[0], len(point)
    return kind


def check_place(path: str, *, create: bool, mountinfo: str) -> None:
    """Refuse, before SQLite touches anything, a place where a store cannot be."""
    check_file(path)
    if not os.path.isdir(os.path.dirname(path)):
        raise OpenError(f"the folder {os.path.dirname(path)} does not exist; create it first")
    if not create and not os.path.exists(path):
        raise OpenError(
            f"there is no store at {path}; check the path, or make the store: perdure.open(path) does, and "
            f"`perdure store create {quote(path)}`"
        )
    if not os.access(os.path.dirname(path), os.W_OK | os.X_OK) or (
        os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK)
    ):
        raise read_only(path)
    if kind := network_file_system(path, mountinfo):
        raise OpenError(
            f"{path} is on a network file system ({kind}), where SQLite's WAL is not safe; "
            "use a local disk, or PostgreSQL"
        )


def check_file(path: str) -> None:
    """Refuse what no store can be in. Opening a FIFO would wait for its other end for ever."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OpenError(f"{path[:80]} cannot be opened: {error.strerror}; check the path") from error
    if stat.S_ISDIR(mode):
        raise OpenError(f"{path} is a directory; name a file in it, for example {os.path.join(path, 'agent.db')}")
    if not stat.S_ISREG(mode):
        raise OpenError(f"{path} is not a regular file: choose another path")


def make_file(path: str) -> None:
    """A new store's file, for its owner alone. SQLite would make it readable for all users; the files that it makes
    beside it get the same mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise OpenError(f"{path} cannot be made: {error.strerror}; choose another path") from error


def harden(connection: apsw.Connection) -> None:
    """Keep a file's content from doing anything outside of it, before any of it is read: a file may come from anyone.
    No store has views of its own; snapshots are shown by temporary ones, which stay allowed."""
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0)
    connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)


def connect(target: Target, role: Role, epoch: int = 0) -> apsw.Connection:
    """A connection with the settings that every connection of a store has. It sees the store as of an epoch, if one is
    given."""
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if role == "writer" else 0)
    connection = apsw.Connection(target.path, flags=flags, vfs=target.vfs, statementcachesize=256)
    try:
        harden(connection)
        # The second line behind the lock files: writers that know nothing of them, and recovery after a
        # crash.
        connection.set_busy_timeout(int(target.timeout_s * 1000))
        # Else a statement with a range or a join is compiled anew, for ten times its own time, whenever its parameters
        # change: they might want another plan.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        if epoch:
            show(connection, epoch)
        for pragma, value in _pragmas(target, role):
            connection.pragma(pragma, value)
    except BaseException:
        connection.close()
        raise
    return connection


def _pragmas(target: Target, role: Role) -> list[tuple[str, int | str]]:
    pragmas: list[tuple[str, int | str]] = [
        ("foreign_keys", 1),  # off by default in SQLite; where a schema has them, they are meant
        ("cell_size_check", 1),  # find a damaged page when it is read, not when it has spread
        ("mmap_size", 0),  # a disk error would be a SIGBUS instead of an error
        # full: the log is on the disk when a call returns. normal: a power cut may lose the last commits, a
        # crash of the process may not.
        ("synchronous", target.durability.upper()),
        # Negative: KiB. The process stays small whatever the store's size: one writer, a few readers.
        ("cache_size", -8192 if role == "writer" else -2048),
    ]
    if role == "reader":
        pragmas.append(("query_only", 1))  # a read transaction that writes is a defect, not a surprise
    else:
        # See Writer for when that is. Not less: writers do not wait for the log to grow again.
        pragmas.append(("journal_size_limit", LOG_BYTES_MAX))
        # Else a row that REPLACE removes would fire no trigger, and be lost to the snapshots that show it.
        pragmas.append(("recursive_triggers", 1))
    return pragmas


def applied_versions(connection: apsw.Connection, path: str, *, create: bool) -> list[int]:
    """The schema versions a file has, [] if it is new; OpenError if it is not a store of ours."""
    # The tables first: a store that another process makes at this moment has both or none.
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema LIMIT 3")]
    application = connection.pragma("application_id")
    if application == APPLICATION_ID:
        return [version for (version,) in connection.execute(migrate.SELECT_APPLIED)]
    if application == 0 and not tables and create:
        return []
    what = f"it has {', '.join(tables)}" if tables else "it is empty"
    raise OpenError(f"{path} is an SQLite file but not a Perdure store ({what}); choose another path")


def prepare(connection: apsw.Connection, target: Target, *, create: bool) -> FileLock:
    """Check the file behind a first connection and bring its schema up to date. The lock of its writers."""
    applied = applied_versions(connection, target.path, create=create)
    lock = _lock(target)
    try:
        if _pending(target.path, applied) or connection.pragma("journal_mode") != "wal":
            # One opener at a time: switching to WAL needs the file alone, and no migration may be applied twice.
            lock.acquire(time.monotonic() + target.timeout_s)
            try:
                _upgrade(connection, target, create=create)
            finally:
                lock.release()
    except BaseException:
        lock.close()
        raise
    return lock


def _lock(target: Target) -> FileLock:
    try:
        return FileLock(target.path, target.timeout_s)
    except OSError as error:
        raise OpenError(f"cannot open the lock file {target.path}-lock: {error}") from error


def _upgrade(connection: apsw.Connection, target: Target, *, create: bool) -> None:
    applied = applied_versions(connection, target.path, create=create)  # again: another opener may have been first
    todo = _pending(target.path, applied)
    if not target.in_memory:
        connection.pragma("page_size", PAGE_BYTES)  # of a new file; one that has tables keeps its own
        mode = connection.pragma("journal_mode", "wal")
        if mode != "wal":
            raise OpenError(f"{target.path} cannot use a write-ahead log (it stays in mode {mode}); use another disk")
    for migration in todo:
        apply(connection, migration)


def _pending(path: str, applied: list[int]) -> list[migrate.Migration]:
    try:
        return migrate.pending("sqlite", applied)
    except OpenError as error:
        raise OpenError(f"{path} cannot be opened: {error}") from None


def apply(connection: apsw.Connection, migration: migrate.Migration) -> None:
    """One migration, its record, and on the first one what makes the file a store: all or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(migrate.CREATE_TABLE)
        connection.execute(migration.adds)
        write_statistics(connection, [name for name, table in all_tables().items() if table.few_rows])
        if migration.version > 1:
            _reconcile(connection, migration.version)
        connection.execute(migration.changes)
        record = {"version": migration.version, "applied_at": time.time_ns() // 1000}
        connection.execute(migrate.INSERT_APPLIED, record)
        if migration.version == 1:
            connection.execute("INSERT INTO meta (key, value) VALUES ('store', ?)", (os.urandom(16).hex(),))
            connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", migration.version)  # for tools; table migration is what counts
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _reconcile(connection: apsw.Connection, version: int) -> None:
    """Let snapshots see what a migration has added."""
    from perdure.storage.sqlite.writer import perform  # imported late: it imports this module

    perform(partial(reconcile_sqlite, [*versioned_tables(version).values()], version), connection.cursor(), None)
