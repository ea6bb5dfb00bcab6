"""Bringing files, and the names that they have, to the disk; and who may open the files beside a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def sync_file(file: IO[Any]) -> None:
    """Bring what was written to an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """The same for a file that is not open, or for a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folder(path: Path) -> None:
    """A name is on the disk only once its folder is."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and its file system keeps names safe by itself
        sync_path(path.parent)


def share_like(descriptor: int, store: str) -> None:
    """Give a new file beside a store the store's permissions, so that who may use the store may use it too."""
    try:
        found = os.stat(store)
    except FileNotFoundError:
        return  # it is about to be made, for its owner alone
    try:
        os.fchown(descriptor, found.st_uid if os.geteuid() == 0 else -1, found.st_gid)
    except PermissionError:
        pass  # a group that we are not in
    os.fchmod(descriptor, found.st_mode & 0o666)
