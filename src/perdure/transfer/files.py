"""Where a copy is written: a file that appears under its own name only when it is whole and on the disk.

It grows beside its place as `<path>.part`, a new file that is locked while it is written. A kill leaves that part and
nothing else, and the next copy to the same place removes it. What has that name and is not ours (a link, a file of
another user) is never written to, nor removed. A copy for an object store grows in a temporary folder and is uploaded
at the end. `atomic_file` and `local_file` are the only ways to a place, so that both kinds look the same elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from perdure.errors import UsageError
from perdure.storage.files import sync_file, sync_folder
from perdure.storage.objects import ObjectStore, is_object_url, open_objects, redacted_url, split_object_url
from perdure.storage.sqlite.file_lock import LOCK_ENDS
from perdure.storage.urls import is_postgres, redacted

SIDE_FILES = ("-wal", "-shm", "-journal")  # what SQLite may leave beside a part
_PREFIX = "perdure-copy-"
_WAIT_S = 3.0  # what a killed backup has started ends a moment later
_PAUSE_S = 0.02


class AtomicFile:
    """A copy on its way to its place. Use it as a context: what was not committed is removed."""

    def __init__(self, path: Path, *, replaces: bool) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self._replaces = replaces
        self._is_committed = False
        self.file: BinaryIO = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def place(self) -> str:
        """Where it will be."""
        return str(self.path)

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def commit(self) -> int:
        """Bring it to the disk, and then to its place. How many bytes it has."""
        sync_file(self.file)
        size = self.size()
        if self._replaces:
            os.replace(self.part, self.path)
        else:
            self._place()
        self._is_committed = True
        sync_folder(self.path)
        return size

    def close(self) -> None:
        if not self._is_committed:
            self.part.unlink(missing_ok=True)
        self._remove_side_files()
        self.file.close()

    def _place(self) -> None:
        """Under its name, if nothing is there: also if another process comes at the same moment."""
        try:
            os.link(self.part, self.path)
        except FileExistsError:
            raise exists_already(self.path) from None
        except OSError:  # a file system without links
            if self.path.exists():
                raise exists_already(self.path) from None
            os.replace(self.part, self.path)
        else:
            if _is_same(self.file.fileno(), self.part):
                self.part.unlink()

    def _open(self) -> BinaryIO:
        """A new file, locked: another user who can write to the folder must not choose the target of a copy."""
        deadline = time.monotonic() + _WAIT_S
        try:
            while not self._discard_stale() or (number := self._create()) is None:
                if time.monotonic() > deadline:
                    raise UsageError(f"another process is writing {self.path}; wait until it ends")
                time.sleep(_PAUSE_S)
        except (OSError, ValueError) as error:  # ValueError: a NUL, or what no file name can hold
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"{self.path} cannot be written: {why}; choose another place") from error
        self._remove_side_files()
        return os.fdopen(number, "r+b")

    def _create(self) -> int | None:
        """None if another process was faster."""
        try:
            # O_EXCL follows no link. The mode: a copy holds what the store knows.
            number = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return None
        if _lock(number, self.part):
            return number
        os.close(number)
        return None

    def _discard_stale(self) -> bool:
        """Remove what a killed process left. Whether the name is free now. Raises UsageError if it is not ours."""
        try:
            found = os.lstat(self.part)
        except FileNotFoundError:
            return True
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise UsageError(
                f"{self.part} is there, and is not what an earlier copy left (a file of this user): look what it is, "
                "and remove it"
            )
        if found.st_nlink > 1:
            # Killed when the file was in its place and had not lost its first name. It is not opened: closing it would
            # drop locks that SQLite may hold on it here.
            self.part.unlink(missing_ok=True)
            return True
        try:
            number = os.open(self.part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        try:
            is_stale = _lock(number, self.part)
            if is_stale:
                self.part.unlink()
            return is_stale
        finally:
            os.close(number)

    def _remove_side_files(self) -> None:
        for side in (*SIDE_FILES, *LOCK_ENDS):
            self.part.with_name(self.part.name + side).unlink(missing_ok=True)


class _UploadedFile(AtomicFile):
    """A copy for an object store. It appears there when it is whole; a kill leaves nothing but parts of an upload,
    which buckets remove by a lifecycle rule."""

    def __init__(self, url: str) -> None:
        self._to, self._name = store_and_name(url)
        self._shown = redacted_url(url)
        if self._to.exists(self._name):
            raise UsageError(f"{self._shown} exists already: choose another name, such as one with the date in it")
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            super().__init__(Path(self._folder) / "copy", replaces=False)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def place(self) -> str:
        return self._shown

    def commit(self) -> int:
        size = super().commit()
        self._to.put_file(self._name, self.path)
        return size

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def local_file(place: str | os.PathLike[str]) -> Iterator[Path]:
    """A copy as a file: itself, or downloaded for as long as the context."""
    text = os.fspath(place)
    if not is_object_url(text):
        yield Path(place)
        return
    source, name = store_and_name(text)
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        path = Path(folder) / name
        source.get_file(name, path)
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def store_and_name(url: str) -> tuple[ObjectStore, str]:
    folder, name = split_object_url(url)
    return open_objects(folder), name


def atomic_file(place: str | os.PathLike[str], *, replaces: bool = False) -> AtomicFile:
    """A new copy for a place. `replaces`: it takes the place of what is there, once it is whole."""
    if is_object_url(os.fspath(place)):
        return _UploadedFile(os.fspath(place))
    path = Path(place).absolute()
    if "://" in str(place) or is_postgres(place):
        shown = redacted(os.fspath(place))
        raise UsageError(f"{shown!r} is neither a path of a file nor a place in an object store, such as s3://bucket/a")
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if path.exists() and not replaces:
        raise exists_already(path)
    return AtomicFile(path, replaces=replaces)


def exists_already(path: Path) -> UsageError:
    return UsageError(f"{path} exists already: choose another name, or remove it first")


def _lock(number: int, path: Path) -> bool:
    """Lock an open file, if no process holds it and the path still leads to it: its holder may have placed it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_same(number, path)


def _is_same(number: int, path: Path) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(number)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
