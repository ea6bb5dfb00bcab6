"""Repairing an SQLite store: on a copy of its file, made byte by byte, or in place.

The copy is made by a process of its own: closing a descriptor of the store's file here would drop the locks that SQLite
holds on it. The log is copied before the file: whatever is moved from one to the other meanwhile is in the copy of the
log too. A file whose pages are damaged is repaired in place while no other process has it open; the old one is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import apsw

from perdure.errors import Busy, OpenError, StoreError
from perdure.ops.repair.rebuild import problems_of, rebuild, remove_all
from perdure.storage.files import sync_folder
from perdure.storage.program import Progress
from perdure.storage.sqlite.file_lock import FileQueue, remove_locks
from perdure.transfer.backup import copy_pages
from perdure.transfer.exclusive import exclusive, replace_pages
from perdure.transfer.files import AtomicFile, atomic_file

_COPY = """
import os, shutil, sys
os.umask(0o77)
for end in ("-wal", ""):
    try:
        shutil.copyfile(sys.argv[1] + end, sys.argv[2] + end)
    except FileNotFoundError:
        if not end:
            raise
"""
_INDEX_ONLY = ("row ", "wrong # of entries in index", "non-unique entry in index")
Notes = list[str]


class Physical(NamedTuple):
    """What was done to a file as such."""

    mended: Notes
    lost: Notes
    rebuilt: bool  # from its pages: rows may be missing


def copy_name(path: Path) -> Path:
    """Where the mended copy of a store goes, unless the caller names another place."""
    return path.with_name(f"{path.stem}.repaired{path.suffix}")


@contextmanager
def working_copy(path: Path, target: Path, timeout_s: float) -> Iterator[AtomicFile]:
    """A copy of a store's file on its way to its place: removed at the end, unless it is kept."""
    part = atomic_file(target)
    try:
        with _queued(path, timeout_s):
            copy_raw(path, part.part)
        yield part
    finally:
        try:
            remove_locks(part.part)
        finally:
            part.close()


@contextmanager
def _queued(path: Path, timeout_s: float) -> Iterator[None]:
    """While no writer that knows our lock writes."""
    try:
        gate = FileQueue(str(path), timeout_s)
    except OSError:  # a folder that cannot be written: then no process writes the store
        yield
        return
    try:
        gate.acquire(monotonic() + timeout_s)
        yield
    except Busy as error:
        raise Busy(f"{path} is being written all the time: end its users, or try again") from error
    finally:
        gate.close()


def copy_raw(path: Path, target: Path) -> None:
    """Copy a store's file and its log, whatever is in them."""
    command = [sys.executable, "-I", "-S", "-c", _COPY, str(path), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it was cut short"]
        raise StoreError(f"{path} could not be copied to {target}: {why[0]}")


def mend_file(work: Path, progress: Progress | None) -> Physical:
    """Make a whole file of a copy that no other process uses: its log brought in, its indexes and trees made again."""
    found = _problems(work)
    if not found:
        return Physical([], [], False)
    # Of a name that the table and its index know differently, the index's is the one that it was found by.
    named = any(index in problem for problem in found for index in ("sqlite_autoindex_tenant_1", "thread_name"))
    if not named and all(problem.startswith(_INDEX_ONLY) for problem in found) and _reindexed(work):
        return Physical([f"the indexes were rebuilt ({found[0]})"], [], False)
    fresh = work.with_name(work.name + "-fresh")
    remove_all(fresh)
    try:
        result = rebuild(work, fresh, progress)
        for end in ("-wal", "-shm", "-journal"):
            Path(f"{work}{end}").unlink(missing_ok=True)
        os.truncate(work, 0)
        source = apsw.Connection(str(fresh), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            copy_pages(source, work)
        finally:
            source.close()
    finally:
        remove_all(fresh)
    told = f"the file was rebuilt from its pages, with {result.rows} rows, because {found[0]}"
    return Physical([told, *result.notes], result.lost, True)


def _problems(work: Path) -> Notes:
    """What is wrong with a file. Its log is brought in first, as far as that can be read."""
    try:
        connection = apsw.Connection(str(work), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        return [f"it cannot be opened ({error})"]
    try:
        connection.pragma("locking_mode", "exclusive")
        connection.pragma("cell_size_check", 1)
        with suppress(apsw.Error):  # a header that is none; then the log is lost with it
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        return list(problems_of(connection))
    except (apsw.Error, UnicodeDecodeError) as error:
        return [f"it cannot be read ({error})"]
    finally:
        with suppress(apsw.Error):
            connection.close()


def _reindexed(work: Path) -> bool:
    connection = apsw.Connection(str(work), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.pragma("locking_mode", "exclusive")
        connection.execute("REINDEX")
    except apsw.Error:
        return False
    finally:
        connection.close()
    return not _problems(work)


# --- in place


def is_whole(path: Path, timeout_s: float) -> bool:
    """Whether SQLite finds nothing wrong with a store's file; others may use it meanwhile."""
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise OpenError(f"SQLite cannot open {path}: {error}; check its permissions") from error
    try:
        connection.set_busy_timeout(int(timeout_s * 1000))
        connection.pragma("cell_size_check", 1)
        connection.execute("BEGIN")  # one moment, whatever others write
        return not list(problems_of(connection))
    except apsw.BusyError as error:
        raise Busy(f"{path} is in use: try again") from error
    except (apsw.Error, UnicodeDecodeError):
        return False
    finally:
        connection.close()


def replace_content(path: Path, timeout_s: float, mend: Callable[[Path], None]) -> Path:
    """Mend a copy, and put its content in place of the file's, while nobody else has that open: in one transaction. The
    file as it was is kept; its path."""
    names = (path.with_name(f"{path.stem}.damaged{f'-{number}' * (number > 1)}{path.suffix}") for number in count(1))
    kept = next(name for name in names if not name.exists())
    work = path.with_name(f"{path.stem}.mending{path.suffix}")  # never kept: whatever has the name stays as it is
    with _alone(path) as connection, atomic_file(kept) as before, atomic_file(work, replaces=True) as part:
        copy_raw(path, before.part)
        copy_raw(path, part.part)
        try:
            mend(part.part)
            before.commit()
            replace_pages(connection, part.part)
        finally:
            remove_locks(part.part)
        sync_folder(path)
    return kept


def _alone(path: Path) -> AbstractContextManager[apsw.Connection]:
    return exclusive(
        path,
        in_use=", and its pages are damaged: end all that have it open, or repair it to a copy",
        damaged="is so damaged that SQLite cannot lock it: repair it to a copy, and put that in its place",
    )
