"""Bringing files, and the names that they have, to the disk."""

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
