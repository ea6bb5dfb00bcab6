"""Open an SQLite store: check its path, its file and its schema, and apply pending migrations.

All checks come before any change: a file that is not a store is never switched to WAL or written to, and gets no lock
files. Python never opens an existing store's file itself. POSIX locks belong to the process, not to the descriptor, so
closing any descriptor of the file would drop the locks that SQLite holds.
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
from perdure.storage.files import share_like
from perdure.storage.sqlite.errors import read_only
from perdure.storage.sqlite.file_lock import FileLock
from perdure.storage.sqlite.snapshot_views import show
from perdure.storage.sqlite.statistics import write_statistics
from perdure.storage.versions import reconcile_sqlite

MEMORY = ":memory:"
APPLICATION_ID = int.from_bytes(b"Perd", "big")  # in the file's header; `file` shows it too
# Half of SQLite's default: a save changes a few hundred bytes on each of four pages, and must write whole pages.
PAGE_BYTES = 2048
VOLATILE = "-live"  # the file of volatile rows is called like the store, with this at the end
LOG_BYTES_MAX = 64 * 1024 * 1024  # the WAL file is truncated to this size when it is started over

Durability = Literal["full", "normal"]
Role = Literal["writer", "reader"]

# WAL keeps its index in shared memory, which does not reach another machine: two hosts would overwrite each other.
_NETWORK = (
    r"nfs4?|cifs|smb\w*|9p|afs|coda|ceph|glusterfs|lustre|beegfs|gpfs|pvfs2|orangefs|ncpfs|davfs"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|rclone|gcsfuse|davfs2|smbnetfs)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A store's file, with the settings of its connections."""

    path: str  # MEMORY, or absolute and without symlinks: every name of a store must lead to the same lock
    durability: Durability
    timeout_s: float
    vfs: str | None
    read_only: bool = False

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY


def read_mountinfo() -> str:
    """Return Linux's list of mounts, or "" on other systems."""
    try:
        return Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def network_file_system(path: str, mountinfo: str) -> str | None:
    """Return the type of the network file system that holds `path`, or None if it is local."""
    kind = file_system(path, mountinfo)
    return kind if re.fullmatch(_NETWORK, kind) else None


def file_system(path: str, mountinfo: str) -> str:
    """Return the type of the file system that holds `path`, or "" if it is unknown."""
    kind, longest = "", -1
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        # The kernel writes a blank as \040. If several mounts have the same point, the last one is visible.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            kind, longest = right.split(" ")[0], len(point)
    return kind


def check_place(path: str, *, create: bool, mountinfo: str) -> None:
    """Raise OpenError if a store cannot be opened at `path`. Runs before SQLite touches anything."""
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
            f"{path} is on a network file system ({kind}), where SQLite's WAL is not safe: "
            "processes on several machines share no memory there, and locks can be lost. Use a local disk and put "
            "backups there (`perdure store backup`), or PostgreSQL if several machines write"
        )


def check_file(path: str) -> None:
    """Raise OpenError if `path` is not a regular file. Opening a FIFO would wait for its other end for ever."""
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


def make_file(path: str, store: str = "") -> None:
    """Create a file with mode 0600, or the mode of a store beside it, unless it exists.

    SQLite would make it readable for all users. The files that SQLite creates beside it get the same mode."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if store:
            share_like(descriptor, store)
        os.close(descriptor)
    except FileExistsError:
        pass
    except OSError as error:
        raise OpenError(f"{path} cannot be made: {error.strerror}; choose another path") from error


def remove_volatile(path: str) -> None:
    """Remove the file of volatile rows that a store at `path` left: the next store there has other rows."""
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{VOLATILE}{end}").unlink(missing_ok=True)


def harden(connection: apsw.Connection) -> None:
    """Disable the features that a hostile schema could use. Call it before reading: a file may come from anyone.

    No store has views in its file. Snapshots use temporary views, which stay allowed."""
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0)
    connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)


def connect(target: Target, role: Role, epoch: int = 0) -> apsw.Connection:
    """Open a connection with the settings of the store. With an `epoch`, it sees the store as of that snapshot."""
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if role == "writer" else 0)
    connection = apsw.Connection(target.path, flags=flags, vfs=target.vfs, statementcachesize=256)
    try:
        harden(connection)
        # The lock files do not cover writers that do not use them, nor recovery after a crash.
        connection.set_busy_timeout(int(target.timeout_s * 1000))
        # Without it, SQLite compiles a statement with a range or a join again whenever its parameters change, in case
        # another plan is better. That takes ten times as long as the statement.
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
        ("foreign_keys", 1),  # off by default in SQLite
        ("cell_size_check", 1),  # find a damaged page when it is read, before the damage spreads
        ("mmap_size", 0),  # a disk error would be a SIGBUS instead of an error
        # full: the WAL is on the disk when a call returns. normal: a power cut may lose the last commits, but a crash
        # of the process loses none.
        ("synchronous", target.durability.upper()),
        # Negative values are KiB. There is one writer and a few readers, so memory stays small for any store size.
        ("cache_size", -8192 if role == "writer" else -2048),
    ]
    if role == "reader" or target.read_only:
        pragmas.append(("query_only", 1))  # a read transaction that writes must fail
    if role == "writer":
        # Writer says when the WAL is started over. A smaller limit would make writers wait for the file to grow again.
        pragmas.append(("journal_size_limit", LOG_BYTES_MAX))
        # Without it, a row that REPLACE removes fires no trigger, and snapshots would lose it.
        pragmas.append(("recursive_triggers", 1))
    return pragmas


def applied_versions(connection: apsw.Connection, path: str, *, create: bool) -> list[int]:
    """Return the schema versions of a file, or [] if it is new. Raise OpenError if it is not a store."""
    # Read the tables first: a store that another process is creating then shows both or neither.
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema LIMIT 3")]
    application = connection.pragma("application_id")
    if application == APPLICATION_ID:
        return [version for (version,) in connection.execute(migrate.SELECT_APPLIED)]
    if application == 0 and not tables and create:
        return []
    content = f"it has {', '.join(tables)}" if tables else "it is empty"
    raise OpenError(f"{path} is an SQLite file but not a Perdure store ({content}); choose another path")


def prepare(connection: apsw.Connection, target: Target, *, create: bool) -> FileLock:
    """Check the file behind a first connection, and apply pending migrations. Return the lock of its writers."""
    applied = applied_versions(connection, target.path, create=create)
    lock = _lock(target)
    try:
        if _pending(target.path, applied) or connection.pragma("journal_mode") != "wal":
            # One opener at a time: switching to WAL needs exclusive access, and no migration may be applied twice.
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
    applied = applied_versions(connection, target.path, create=create)  # read again: another opener may have been first
    todo = _pending(target.path, applied)
    if not target.in_memory:
        connection.pragma("page_size", PAGE_BYTES)  # has no effect on a file that has tables
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
    """Apply one migration and insert its row, in one transaction. The first one also marks the file as a store."""
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
        connection.pragma("user_version", migration.version)  # for tools and `foreign.py`; openers read `migration`
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _reconcile(connection: apsw.Connection, version: int) -> None:
    """Version the new tables and columns of a migration, so that snapshots include them."""
    from perdure.storage.sqlite.writer import perform  # imported late: it imports this module

    perform(partial(reconcile_sqlite, [*versioned_tables(version).values()], version), connection.cursor(), None)
