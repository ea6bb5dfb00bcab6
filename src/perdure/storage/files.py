"""Sync files and folders to the disk, and set the permissions of files beside a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def sync_path(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folder(path: Path) -> None:
    """Sync the folder of a file: only then is the file's name on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and its file system keeps names safe by itself
        sync_path(path.parent)


@contextmanager
def replacing(target: Path, draft: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a new file, the draft, and put it in the place of the target at the end. If the block raises, remove it."""
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(target)


def share_like(descriptor: int, store: str) -> None:
    """Give a new file beside a store the store's owner, group and mode. The users of the store may use the file."""
    try:
        status = os.stat(store)
    except FileNotFoundError:
        return  # the store is not created yet, and will be for its owner alone
    try:
        os.fchown(descriptor, status.st_uid if os.geteuid() == 0 else -1, status.st_gid)
    except PermissionError:
        pass  # a group that we are not in
    os.fchmod(descriptor, status.st_mode & 0o666)
