"""PostgreSQL's binary COPY format: rows as the server sends and takes them, to and from Python's values.

Only needed where a backup of one database is restored into the other: between two servers the bytes pass as they are.
The format: a signature, then for each row its number of fields and each field behind its length, then -1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from perdure.errors import UsageError

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = len(_SIGNATURE) + 8
_CHUNK_BYTES = 1 << 20
_END = -1
_NULL = -1

_INTEGERS = {"smallint": struct.Struct("!h"), "integer": struct.Struct("!i"), "bigint": struct.Struct("!q")}
_DOUBLE = struct.Struct("!d")
_COUNT = struct.Struct("!h")
_LENGTH = struct.Struct("!i")


def _writer(kind: str) -> Callable[[Any], bytes]:
    if kind in _INTEGERS:
        return _INTEGERS[kind].pack
    if kind == "double precision":
        return _DOUBLE.pack
    if kind in ("text", "name"):
        return str.encode
    if kind == "bytea":
        return bytes
    raise UsageError(f"a column of type {kind} cannot be restored into another sort of database")


def _reader(kind: str) -> Callable[[bytes], Any]:
    if kind in _INTEGERS:
        unpack = _INTEGERS[kind].unpack
        return lambda data: unpack(data)[0]
    if kind == "double precision":
        return lambda data: _DOUBLE.unpack(data)[0]
    if kind in ("text", "name"):
        return bytes.decode
    if kind == "bytea":
        return bytes
    raise UsageError(f"a column of type {kind} cannot be restored into another sort of database")


def pack_rows(rows: Iterable[Sequence[Any]], types: Sequence[str]) -> Iterator[bytes]:
    """Rows as COPY FROM takes them, in chunks."""
    writers = [_writer(kind) for kind in types]
    buffer = bytearray(_SIGNATURE + bytes(8))
    count = _COUNT.pack(len(writers))
    for row in rows:
        buffer += count
        for write, value in zip(writers, row, strict=True):
            if value is None:
                buffer += _LENGTH.pack(_NULL)
            else:
                data = write(value)
                buffer += _LENGTH.pack(len(data))
                buffer += data
        if len(buffer) >= _CHUNK_BYTES:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer + _COUNT.pack(_END))


def unpack_rows(chunks: Iterable[bytes], types: Sequence[str]) -> Iterator[list[Any]]:
    """Rows from what COPY TO has sent."""
    readers = [_reader(kind) for kind in types]
    stream = _Stream(chunks)
    if not stream.take(_HEADER_BYTES).startswith(_SIGNATURE):
        raise UsageError("its rows are not in a form that this Perdure knows")
    while (count := _COUNT.unpack(stream.take(_COUNT.size))[0]) != _END:
        if count != len(readers):
            raise UsageError(f"it has a row of {count} fields where {len(readers)} belong")
        row = []
        for read in readers:
            size = _LENGTH.unpack(stream.take(_LENGTH.size))[0]
            row.append(None if size == _NULL else read(stream.take(size)))
        yield row


class _Stream:
    """Chunks as one run of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._data = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        while len(self._data) - self._at < count:
            more = next(self._chunks, None)
            if more is None:
                raise UsageError("its rows are cut short")
            self._data = self._data[self._at :] + more
            self._at = 0
        found = self._data[self._at : self._at + count]
        self._at += count
        return found
