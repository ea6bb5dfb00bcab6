"""Reading the rows of a damaged SQLite file page by page, without SQLite (https://sqlite.org/fileformat2.html).

A table's tree is walked from its root, and damage is noted and skipped. Leaves below a damaged page are recognised by
the form of their rows. Every offset is checked against its page, so that no damage leads in circles or out of bounds.
Callers decide which rows are good.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from perdure.storage.sqlite.opening import PAGE_BYTES

_LEAF_TABLE, _INNER_TABLE, _LEAF_INDEX, _INNER_INDEX = 0x0D, 0x05, 0x0A, 0x02
_HEADER_BYTES = 100

_PAYLOAD_MAX = 1 << 30


class StoredColumn(NamedTuple):
    name: str
    type: str  # INTEGER, TEXT, BLOB, REAL
    nullable: bool


class TableShape(NamedTuple):
    """A table: its columns in the order in which its rows store them."""

    name: str
    columns: tuple[StoredColumn, ...]
    rowid: str | None  # the column that is the row's number, stored as NULL; "" for a number without a column


class Row(NamedTuple):
    """A stored row. Columns that are missing at its end are missing here too."""

    number: int | None
    values: tuple[Any, ...]
    cut: bool = False  # columns at its end reach beyond the row: they are None here


class Bad(Exception):
    """Something cannot be read. Never leaves this module."""


@dataclass
class Salvage:
    """The damage that was met while reading."""

    pages: dict[int, str] = field(default_factory=dict)  # by number: why it cannot be used
    rows: list[tuple[str, int, int, str]] = field(default_factory=list)  # table, page, cell, why


class PageFile:
    """A file of pages, read as it is on the disk."""

    def __init__(self, path: Path, file: BinaryIO | None = None) -> None:
        """Open a file, or use the open `file`: one that SQLite has open in this process must not be opened again."""
        self._file: BinaryIO = open(path, "rb") if file is None else file  # noqa: SIM115
        head = self._file.read(_HEADER_BYTES)
        size = int.from_bytes(head[16:18], "big") if head[:16] == b"SQLite format 3\0" else 0
        size = 65536 if size == 1 else size
        self.page_bytes = size if 512 <= size <= 65536 and size & (size - 1) == 0 else PAGE_BYTES
        reserved = head[20] if len(head) > 20 and head[20] <= 64 else 0
        self.usable = self.page_bytes - reserved
        self.count = self._file.seek(0, 2) // self.page_bytes

    def close(self) -> None:
        self._file.close()

    def page(self, number: int) -> bytes:
        if not 1 <= number <= self.count:
            raise Bad(f"page {number} does not exist")
        self._file.seek((number - 1) * self.page_bytes)
        return self._file.read(self.page_bytes)

    def raw(self, number: int) -> bytes:
        try:
            return self.page(number)
        except Bad:
            return b""

    def is_index(self, number: int) -> bool:
        """Return whether a page belongs to an index, or to a table without row numbers, which is stored as one."""
        return self.raw(number)[:1] in (bytes([_LEAF_INDEX]), bytes([_INNER_INDEX]))

    def free_pages(self) -> set[int]:
        """Return the free pages, as far as the list of them can be read."""
        free: set[int] = set()
        trunk = int.from_bytes(self.raw(1)[32:36], "big")
        while trunk and trunk not in free and trunk <= self.count:
            free.add(trunk)
            page = self.raw(trunk)
            count = min(int.from_bytes(page[4:8], "big"), self.usable // 4 - 2)
            free.update(struct.unpack(f">{count}I", page[8 : 8 + 4 * count]))
            trunk = int.from_bytes(page[:4], "big")
        return free


class _Cells(NamedTuple):
    kind: int
    cells: list[int]  # offsets
    right: int  # the last child, of an inner page


def _cells(file: PageFile, number: int, page: bytes) -> _Cells:
    start = _HEADER_BYTES if number == 1 else 0
    kind = page[start]
    if kind not in (_LEAF_TABLE, _INNER_TABLE, _LEAF_INDEX, _INNER_INDEX):
        raise Bad(f"its first byte is {kind}, which is no kind of page")
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    inner = kind in (_INNER_TABLE, _INNER_INDEX)
    array = start + (12 if inner else 8)
    count = min(count, (file.usable - array) // 2)
    right = int.from_bytes(page[start + 8 : start + 12], "big") if inner else 0
    offsets = struct.unpack(f">{count}H", page[array : array + 2 * count])
    return _Cells(kind, [offset for offset in offsets if array + 2 <= offset < file.usable], right)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for length in range(9):
        if at + length >= len(data):
            raise Bad("a number is cut off")
        byte = data[at + length]
        if length == 8:
            value = value << 8 | byte
            return (value - (1 << 64) if value >> 63 else value), at + 9
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + length + 1
    raise AssertionError


def _payload(file: PageFile, page: bytes, at: int, size: int, *, index: bool) -> bytes:
    """Return a row's bytes, with those on overflow pages. Raises Bad."""
    if not 0 <= size <= min(_PAYLOAD_MAX, file.count * file.page_bytes):
        raise Bad(f"a row claims {size} bytes")
    usable = file.usable
    most = (usable - 12) * 64 // 255 - 23 if index else usable - 35
    local = size
    if size > most:
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        local = local if local <= most else least
    if at + local + (4 if local < size else 0) > len(page):
        raise Bad("a row reaches beyond its page")
    parts = [page[at : at + local]]
    left = size - local
    following = int.from_bytes(page[at + local : at + local + 4], "big") if left else 0
    seen: set[int] = set()
    while left > 0:
        if following in seen:
            raise Bad("a row's pages lead in a circle")
        seen.add(following)
        more = file.page(following)
        parts.append(more[4 : 4 + min(left, usable - 4)])
        left -= usable - 4
        following = int.from_bytes(more[:4], "big")
    return b"".join(parts)


_INTEGER_BYTES = (0, 1, 2, 3, 4, 6, 8)


def _row(number: int | None, payload: bytes) -> Row:
    """Return a row with its columns; bytes for text that is not UTF-8. Raises Bad."""
    header, at = _varint(payload, 0)
    if not at <= header <= len(payload):
        raise Bad("a row's header is longer than the row")
    kinds: list[int] = []
    while at < header:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Any] = []
    place = header
    for kind in kinds:
        if kind in (0, 8, 9, 10, 11):  # 10 and 11 are reserved: SQLite reads them as NULL
            values.append(kind - 8 if kind in (8, 9) else None)
            continue
        if kind < 0:
            raise Bad("a column is of no kind")
        size = _INTEGER_BYTES[kind] if kind <= 6 else 8 if kind == 7 else (kind - 12) // 2
        data = payload[place : place + size]
        if len(data) != size:  # SQLite still reads the columns before it
            return Row(number, (*values, *[None] * (len(kinds) - len(values))), cut=True)
        place += size
        if kind <= 6:
            values.append(int.from_bytes(data, "big", signed=True))
        elif kind == 7:
            values.append(struct.unpack(">d", data)[0])
        elif kind % 2:
            values.append(_text(data))
        else:
            values.append(data)
    return Row(number, tuple(values))


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _rows_of(file: PageFile, page: bytes, cells: _Cells) -> Iterator[tuple[int, Row | Bad]]:
    """Yield the rows of a leaf, or of an inner page of a tree that keeps rows there too."""
    index = cells.kind in (_LEAF_INDEX, _INNER_INDEX)
    for place, offset in enumerate(cells.cells):
        try:
            at = offset + (4 if cells.kind == _INNER_INDEX else 0)
            size, at = _varint(page, at)
            number = None
            if not index:
                number, at = _varint(page, at)
            yield place, _row(number, _payload(file, page, at, size, index=index))
        except (Bad, struct.error, IndexError) as problem:
            yield place, problem if isinstance(problem, Bad) else Bad(str(problem))


def walk(file: PageFile, root: int, name: str, salvage: Salvage, seen: set[int]) -> Iterator[Row]:
    """Yield all rows of a tree that can be reached from its root. Add the pages that were used to `seen`."""
    waiting = [root]
    family: frozenset[int] | None = None  # a tree's pages are of two kinds
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        try:
            page = file.page(number)
            cells = _cells(file, number, page)
            kinds = frozenset((_LEAF_TABLE, _INNER_TABLE) if cells.kind & 1 else (_LEAF_INDEX, _INNER_INDEX))
            if family is not None and kinds != family:
                raise Bad("it belongs to another tree")
        except Bad as problem:
            salvage.pages.setdefault(number, f"{name}: {problem}")
            continue
        family = kinds
        seen.add(number)
        if cells.kind in (_INNER_TABLE, _INNER_INDEX):
            children = [int.from_bytes(page[offset : offset + 4], "big") for offset in cells.cells]
            waiting += [cells.right, *children[::-1]]
        if cells.kind != _INNER_TABLE:
            yield from _good_rows(file, number, page, cells, name, salvage)


def _good_rows(file: PageFile, number: int, page: bytes, cells: _Cells, name: str, salvage: Salvage) -> Iterator[Row]:
    for place, row in _rows_of(file, page, cells):
        if isinstance(row, Bad):
            salvage.rows.append((name, number, place, str(row)))
            continue
        if row.cut:
            salvage.rows.append((name, number, place, "a column is cut off"))
        yield row


def lost_leaves(
    file: PageFile, seen: set[int], shapes: Sequence[Sequence[TableShape]], salvage: Salvage
) -> Iterator[tuple[str, Row]]:
    """Yield rows of pages that no tree reaches and that are not free, each with the name of its table.

    The first group of `shapes` in which exactly one fits decides. Other rows are skipped.
    """
    passed = seen | file.free_pages()
    for number in range(2, file.count + 1):
        if number in passed:
            continue
        try:
            page = file.page(number)
            cells = _cells(file, number, page)
        except Bad:
            continue
        if cells.kind == _INNER_TABLE or not cells.cells:
            continue
        rows = [row for _, row in _rows_of(file, page, cells) if not isinstance(row, Bad)]
        of_table = cells.kind == _LEAF_TABLE
        for group in shapes:
            fitting = [shape.name for shape in group if (shape.rowid is not None) == of_table and _fit(shape, rows)]
            if len(fitting) == 1:
                yield from ((fitting[0], row) for row in _good_rows(file, number, page, cells, fitting[0], salvage))
            if fitting:
                break


_KINDS: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "TEXT": (str,), "BLOB": (bytes,), "REAL": (float, int)}


def _fit(shape: TableShape, rows: list[Row]) -> bool:
    """Return whether at least half of a page's rows fit a table."""
    good = sum(fits(shape, row) for row in rows)
    return good > 0 and 2 * good >= len(rows)


def fits(shape: TableShape, row: Row) -> bool:
    """Return whether a row has the columns of a table, of the right types."""
    if len(row.values) != len(shape.columns):
        return False
    for column, value in zip(shape.columns, row.values, strict=True):
        if value is None:
            if not column.nullable and column.name != shape.rowid:
                return False
        elif type(value) not in _KINDS[column.type] or (column.name == "head_hash" and len(value) != 32):
            return False  # a hash's length is all that tells erased from journal
    return True
