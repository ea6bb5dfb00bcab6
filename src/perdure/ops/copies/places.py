"""Where a copy is written: a file that comes to be under its own name only when it is whole and on the disk.

It grows beside its place as `<path>.part`, a new file that is locked while it is written. A kill leaves that part and
nothing else, and the next copy to the same place removes it. What has that name and is not ours (a link, a file of
another user) is never written to, nor removed. `part_for` is the one way to a place, so that other sorts of places need
no change elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from perdure.errors import UsageError
from perdure.storage.files import sync_file, sync_folder
from perdure.storage.objects import is_object_url
from perdure.storage.urls import is_postgres, redacted

SIDE_FILES = ("-wal", "-shm", "-journal")  # what SQLite may leave beside a part
_WAIT_S = 3.0  # what a killed backup has started ends a moment later
_PAUSE_S = 0.02


class Part:
    """A copy on its way to its place. Use it as a context: what is not kept by `keep` is removed."""

    def __init__(self, path: Path, *, replaces: bool) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self._replaces = replaces
        self._is_kept = False
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

    def keep(self) -> int:
        """Bring it to the disk, and then to its place. How many bytes it has."""
        sync_file(self.file)
        size = self.size()
        if self._replaces:
            os.replace(self.part, self.path)
        else:
            self._place()
        self._is_kept = True
        sync_folder(self.path)
        return size

    def close(self) -> None:
        if not self._is_kept:
            self.part.unlink(missing_ok=True)
        self._remove_side_files()
        self.file.close()

    def _place(self) -> None:
        """Under its name, if nothing is there: also if somebody else comes at the same moment."""
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
        for side in SIDE_FILES:
            self.part.with_name(self.part.name + side).unlink(missing_ok=True)


def part_for(place: str | os.PathLike[str], *, replaces: bool = False) -> Part:
    """A new copy for a place. `replaces`: it takes the place of what is there, once it is whole."""
    if is_object_url(os.fspath(place)):
        from perdure.ops.copies.remote import RemotePart

        return RemotePart(os.fspath(place))
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
    return Part(path, replaces=replaces)


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
