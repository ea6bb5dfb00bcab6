"""Files of our own: a line that says what they are, blocks of sections, and a hash over all of it.

    perdure-thread 1         one line: what it is, and the version of the format
    blocks                    one byte: the section; four bytes: how long; so many bytes: one Zstandard frame
    the last block            section 0: BLAKE3 of everything before it

A block is decompressed with a bound, and a file is read once for its hash before anything of it is believed: what was
cut short or changed is refused before the first byte is used. The hash finds damage; it is no signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from perdure.errors import Damaged, PerdureError, Undecodable, UsageError
from perdure.storage.files import open_regular
from perdure.storage.program import Progress
from perdure.values.compress import Parameter, decompress_bounded, zstd
from perdure.values.limits import INFLATED_MAX

VERSION = 1
BLOCK_BYTES_MAX = INFLATED_MAX
_LEVEL = 3
_END = 0
_HEAD_BYTES = 5
_HASH_BYTES = 32
_READ_BYTES = 4 << 20
_OPTIONS: dict[int, int] = {
    Parameter.compression_level: _LEVEL,
    Parameter.checksum_flag: 1,
    Parameter.content_size_flag: 1,
}


class SectionWriter:
    """Writes a file from its first line to its last block."""

    def __init__(self, file: BinaryIO, kind: str) -> None:
        self._file = file
        self._hash = blake3()
        self.bytes = 0
        self._put(_first_line(kind, VERSION))

    def block(self, section: str, data: bytes) -> None:
        """One block. What it holds is compressed here."""
        packed = zstd.compress(data, options=_OPTIONS)
        self._put(_head(ord(section), len(packed)))
        self._put(packed)

    def end(self) -> None:
        self._put(_head(_END, _HASH_BYTES) + self._hash.digest())

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)
        self.bytes += len(data)


class SectionReader:
    """Reads a file that a `SectionWriter` wrote. Raises UsageError for anything else, Damaged for a damaged backup."""

    def __init__(self, path: Path, kind: str, verb: str) -> None:
        self.path = path
        self._kind, self._verb = kind, verb
        try:
            self._file: BinaryIO = open_regular(path)
            self.bytes = path.stat().st_size
        except OSError as error:
            raise self.refused(error.strerror or str(error)) from error
        try:
            self._start = self._check_first_line(kind)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def refused(self, reason: str) -> UsageError:
        return UsageError(f"{self.path} cannot be {self._verb}: {reason}. Nothing was written")

    def damaged(self, reason: str) -> PerdureError:
        """The right sort of file, but not as it was written."""
        return damaged_backup(self.path, reason) if self._kind == "backup" else self.refused(reason)

    def check(self, progress: Progress | None = None) -> None:
        """Read all of it once and compare its hash."""
        body = self.bytes - _HEAD_BYTES - _HASH_BYTES
        self._file.seek(0)
        found, left = blake3(), body
        while left > 0:
            data = self._file.read(min(left, _READ_BYTES))
            if not data:
                break
            found.update(data)
            left -= len(data)
            if progress is not None:
                progress(body - left, body)
        ending = self._file.read()
        if body < self._start or ending[:_HEAD_BYTES] != _head(_END, _HASH_BYTES):
            raise self.damaged("it is cut short")
        if ending[_HEAD_BYTES:] != found.digest():
            raise self.damaged("its hash is not that of its content")

    def blocks(self) -> Iterator[tuple[str, bytes]]:
        """Every block in order: its section and what it holds. After `check`."""
        self._file.seek(self._start)
        while True:
            head = self._file.read(_HEAD_BYTES)
            size = int.from_bytes(head[1:], "little")
            if len(head) < _HEAD_BYTES:
                raise self.damaged("it is cut short")
            if head[0] == _END:
                return
            packed = self._file.read(size)
            if len(packed) < size:
                raise self.damaged("it is cut short")
            try:
                yield chr(head[0]), decompress_bounded(packed, BLOCK_BYTES_MAX)
            except Undecodable as error:
                raise self.damaged(str(error)) from error

    def at(self) -> int:
        """How many bytes were read by now."""
        return self._file.tell()

    def _check_first_line(self, kind: str) -> int:
        line = self._file.readline(64)
        if line == _first_line(kind, VERSION):
            return len(line)
        if line.startswith(f"perdure-{kind} ".encode()):
            raise self.refused("a newer Perdure wrote it; upgrade Perdure to read it")
        if line.startswith(b"perdure-"):
            raise self.refused(f"it is a file of another sort ({line.split()[0].decode('ascii', 'replace')})")
        raise self.refused(f"it is no file of Perdure's with a {kind} in it")


def damaged_backup(path: Path, why: object, *, mend: str = "") -> Damaged:
    """A backup of either database that cannot be restored as it is."""
    return Damaged(f"the backup {path} is damaged ({why}), nothing was restored: make a new one{mend}")


def _first_line(kind: str, version: int) -> bytes:
    return f"perdure-{kind} {version}\n".encode()


def _head(section: int, size: int) -> bytes:
    return bytes((section,)) + size.to_bytes(_HEAD_BYTES - 1, "little")
