"""Write a copy to a file or an object that appears under its name only when it is complete and on the disk.

A file is written in a new folder beside its place. Only the owner can enter the folder, and it is locked meanwhile. A
kill leaves the folder, and the next copy to the same place removes it. A copy for an object store is written in a
temporary folder and uploaded at the end. `AtomicFile` and `local_file` hide the difference.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from perdure.errors import UsageError
from perdure.storage.files import sync_folder, sync_path
from perdure.storage.objects import ObjectStore, is_object_url, open_objects, redacted_url, split_object_url
from perdure.storage.urls import is_postgres, redacted, refuse_hdfs
from perdure.threads.checks import microseconds

if TYPE_CHECKING:  # imported where it is used
    from perdure.storage.object_lock import ObjectLock

_PREFIX = "perdure-copy-"


class AtomicFile:
    """A file that `commit` puts in its place. Use it as a context manager: without `commit` it is removed.

    `part` is the path to write to. Nothing may exist at the place yet. With `retain_until`, an object is locked after
    it was uploaded.
    """

    def __init__(self, place: str | os.PathLike[str], *, retain_until: datetime | None = None) -> None:
        text = os.fspath(place)
        self._lock = None if retain_until is None else _lock(text, retain_until)
        self._object = store_and_name(text) if is_object_url(text) else None
        self._exit = ExitStack()
        if self._object is not None:
            self.place = redacted_url(text)
            if self._object[0].exists(self._object[1]):
                raise UsageError(f"{self.place} exists already: choose another name, such as one with the date in it")
            self.path = Path(self._object[1])
        else:
            self.path = file_path(text)
            self.place = str(self.path)
            if self.path.exists():
                raise exists_already(self.path)
        folder = self._exit.enter_context(work_folder(None if self._object else self.path))
        self.part = folder / self.path.name
        self.part.touch(0o600)  # a copy holds all data of the store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def size(self) -> int:
        return self.part.stat().st_size

    def commit(self) -> None:
        """Put the file in its place: upload it, or sync it to the disk and link it."""
        if self._object is not None:
            store, name = self._object
            store.put_file(name, self.part)
            if self._lock is not None:
                self._lock.retain(name)
        else:
            sync_path(self.part)
            self._place()
            sync_folder(self.path)

    def _place(self) -> None:
        """Give the file its name. Raises UsageError if that exists, even if another process has just created it."""
        try:
            os.link(self.part, self.path)
        except FileExistsError:
            raise exists_already(self.path) from None
        except OSError:  # a file system without links
            if self.path.exists():
                raise exists_already(self.path) from None
            os.replace(self.part, self.path)


@contextmanager
def work_folder(place: Path | None) -> Iterator[Path]:
    """Yield a new locked folder beside a place, for a file that is written to it; for None, a temporary folder.

    Remove the folders that killed processes have left for the same place. Raises UsageError.
    """
    prefix, parent = (_PREFIX, None) if place is None else (f".{place.name}.part-", place.parent)
    try:
        if parent is not None:
            _remove_stale(parent, prefix)
        folder, lock = _locked_folder(prefix, parent)
    except (OSError, ValueError) as error:  # ValueError: a NUL, or what no file name can hold
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{place} cannot be written: {why}; choose another place") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(prefix: str, parent: Path | None) -> tuple[Path, int]:
    """Create and lock a folder. Until it is locked, another process may remove it as stale: then create another."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


@contextmanager
def local_file(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a copy as a local file. An object is downloaded, and the download removed at the end."""
    text = os.fspath(place)
    if not is_object_url(text):
        yield Path(place)
        return
    source, name = store_and_name(text)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        path = Path(folder) / name
        source.get_file(name, path)
        yield path


def store_and_name(url: str) -> tuple[ObjectStore, str]:
    folder, name = split_object_url(url)
    return open_objects(folder), name


def _lock(place: str, until: datetime) -> ObjectLock:
    """Return the lock for an object at this place. Raise UsageError if it cannot be locked."""
    from perdure.storage.object_lock import ObjectLock

    microseconds(until, "retain_until")
    if not is_object_url(place):
        raise UsageError(f"{place} is a file, which its owner can always remove: only objects in S3 can be locked")
    return ObjectLock(split_object_url(place)[0], until)


def exists_already(path: Path) -> UsageError:
    return UsageError(f"{path} exists already: choose another name, or remove it first")


def file_path(place: str) -> Path:
    """Return the absolute path of a file to be written. Raises UsageError."""
    path = local_path(place)
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    return path


def local_path(place: str) -> Path:
    """Return the absolute path of a file or folder. Raises UsageError for the URL of a database or of another place."""
    if "://" in place or is_postgres(place):
        refuse_hdfs(place)
        raise UsageError(
            f"{redacted(place)!r} is neither a path of a file nor a place in an object store, such as s3://bucket/a"
        )
    return Path(place).absolute()


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove the folders of killed processes. They are not locked any more."""
    for name in os.listdir(parent):
        if name.startswith(prefix):
            with suppress(OSError):
                number = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(parent / name, ignore_errors=True)
                finally:
                    os.close(number)
