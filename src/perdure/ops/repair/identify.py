"""Whether a file was ever a store of ours: what never was one is not for repair, and is left as it is.

A header that says so is enough. Else a page must show it: the list of our tables, or rows that only our tables have; so
a store whose first page is gone is still one. The file is read through SQLite's own file layer: closing a descriptor of
our own would drop the locks that SQLite may hold on it in this process. No lock file is made.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast

import apsw

from perdure.errors import OpenError
from perdure.ops.repair.rebuild import shapes_of
from perdure.storage import migrate
from perdure.storage.sqlite.opening import APPLICATION_ID, apply, not_ours
from perdure.storage.sqlite.salvage import PageFile, Salvage, Shape, lost_leaves

_MAGIC = b"SQLite format 3\0"
_LEAF = 0x0D
_COLUMNS_MIN = 6  # rows with fewer may be anybody's
_TEXT_BYTES = 60  # of a table's definition: enough to know it by
_CHUNK = 1 << 20


class _Bytes(io.RawIOBase):
    """A file, read by SQLite's file layer."""

    def __init__(self, path: Path) -> None:
        flags = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY
        self._file = apsw.VFSFile("", str(path), [flags, 0])
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._file.xFileSize() if whence == 2 else self._at if whence == 1 else 0)
        return self._at

    def read(self, size: int = -1) -> bytes:
        found = self._file.xRead(size, self._at)
        self._at += len(found)
        return found

    def close(self) -> None:
        if not self.closed:
            self._file.xClose()
        super().close()


def check_is_store(path: Path) -> None:
    """Raise OpenError for a file that shows nothing of a store. Writes nothing, and leaves nothing beside it."""
    try:
        file = _Bytes(path)
    except apsw.Error as error:
        raise OpenError(f"{path} cannot be read: {error}; check its permissions") from error
    with file:
        head = file.read(100)
        is_sqlite = head.startswith(_MAGIC)
        if is_sqlite and head[68:72] == APPLICATION_ID.to_bytes(4, "big"):
            return
        texts, shapes = _known()
        file.seek(0)
        pages = PageFile(path, cast(BinaryIO, file))
        if _has_tables(pages, texts) or _log_has_tables(path, texts) or _has_rows(pages, shapes):
            return
    if is_sqlite:
        raise not_ours(path=str(path), what="none of its tables is one's")
    raise OpenError(f"{path} is not a Perdure store, nor what is left of one; check the path. Nothing was changed")


def _known() -> tuple[list[bytes], list[Shape]]:
    """How the definitions of our tables begin, and the tables whose rows cannot be mistaken."""
    expected = apsw.Connection(":memory:")
    try:
        for migration in migrate.migrations("sqlite"):
            apply(expected, migration)
        texts = "SELECT sql FROM sqlite_schema WHERE type = 'table' AND name <> 'migration' AND length(sql) > 40"
        shapes = [shape for shape in shapes_of(expected).values() if len(shape.columns) >= _COLUMNS_MIN]
        return [text.encode()[:_TEXT_BYTES] for (text,) in expected.execute(texts)], shapes
    finally:
        expected.close()


def _has_tables(pages: PageFile, texts: list[bytes]) -> bool:
    for number in range(1, pages.count + 1):
        page = pages.raw(number)
        if page[100 if number == 1 else 0] == _LEAF and any(text in page for text in texts):
            return True
    return False


def _log_has_tables(path: Path, texts: list[bytes]) -> bool:
    """A new store may be in its log only. SQLite holds no locks on that file: it may be opened."""
    try:
        with open(f"{path}-wal", "rb") as log:
            before = b""
            while chunk := log.read(_CHUNK):
                if any(text in before + chunk for text in texts):
                    return True
                before = chunk[-_TEXT_BYTES:]
    except OSError:
        pass
    return False


def _has_rows(pages: PageFile, shapes: list[Shape]) -> bool:
    return next(iter(lost_leaves(pages, set(), shapes, Salvage())), None) is not None
