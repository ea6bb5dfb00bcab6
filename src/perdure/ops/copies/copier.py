"""The process that copies a file for a backup: `python -I -S copier.py SOURCE TARGET LOCK`. Needs nothing but Python.

It begins when it is told to: a line on its input, by which time starting Python has cost nobody anything. It says how
far it is, and ends when nobody reads that any more. LOCK is the descriptor that keeps others from the target; it is
inherited, so that the lock lives as long as this process.

It is polite. It writes past the kernel's cache, so that no writer's sync has to wait for what it has left there. And
while the log beside the source grows, so somebody commits, it takes small pieces, and of the disk's speed its share:
`Pace`. In all that costs them the same as if it hurried, and none of them waits for long (figures: bench/backup.py).
What it may not do is to rest in proportion to how long each piece took: where the processors are busy, that is how long
waiting for one of them took, and a copy of one second becomes one of five.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

PIECE_BYTES = 4 << 20
SMALL_BYTES = 1 << 20  # while others commit: their syncs wait for what is under way. Smaller ones cost them more in all
LARGE_BYTES = 2 << 20  # the same, where it is behind: who always wakes up late must not have to wake up often
SHARE = 0.38  # of the speed of the quickest piece
ALONE_S = 0.1  # so long after the last commit of others it is alone again
TOLD_BYTES = 8 << 20
ALIGNED = max(4096, mmap.PAGESIZE)


class Pace:
    """How much to copy at once, and how long to rest after it."""

    def __init__(self) -> None:
        self.piece_bytes = PIECE_BYTES
        self._quickest_s = 1.0  # per byte
        self._begun_s: float | None = None  # when others were first seen to commit
        self._seen_s = 0.0  # and when last
        self._done_bytes = 0  # since the first time

    def rest_s(self, count: int, took_s: float, now_s: float, *, committed: bool) -> float:
        """After a piece of so many bytes; `committed`: by somebody else, meanwhile."""
        self._quickest_s = min(self._quickest_s, took_s / count)
        if committed:
            self._seen_s = now_s
        if self._begun_s is None:
            if committed:
                self._begun_s, self._done_bytes, self.piece_bytes = now_s, 0, SMALL_BYTES
            return 0.0
        if now_s - self._seen_s > ALONE_S:
            self._begun_s, self.piece_bytes = None, PIECE_BYTES
            return 0.0
        self._done_bytes += count
        per_byte_s = self._quickest_s / SHARE
        behind = (now_s - self._begun_s) / per_byte_s - self._done_bytes
        late_bytes = int(max(behind, 0)) // ALIGNED * ALIGNED
        self.piece_bytes = min(max(late_bytes, SMALL_BYTES), LARGE_BYTES)
        return max(0.0, -behind * per_byte_s)


def copy(source_path: str, target_path: str) -> None:
    source = os.open(source_path, os.O_RDONLY)
    size = os.fstat(source).st_size
    target = _open(target_path, size)
    # Mapped, so that the disk takes the bytes from the kernel's cache: where the processors are busy, a copy in between
    # cost writers as much as the disk did. What cannot be read fails the write, as it is the kernel that looks there.
    mapped = mmap.mmap(source, size, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    view = memoryview(mapped)
    at = told = 0
    pace = Pace()
    log = _log(source_path)
    while at < size:
        start_s = time.monotonic()
        piece = view[at : at + pace.piece_bytes]
        count = len(piece)
        if (written := os.pwritev(target, [piece], at)) != count:
            raise OSError(f"only {at + written} of {size} bytes could be copied: no room, or the source is damaged")
        at += count
        now_s = time.monotonic()
        log, before = _log(source_path), log
        if rest_s := pace.rest_s(count, now_s - start_s, now_s, committed=log != before):
            time.sleep(rest_s)
        if at - told >= TOLD_BYTES or at == size:
            _let_go(mapped, told, at - told)
            told = at
            os.write(1, b"%d %d\n" % (at, size))


def _let_go(mapped: mmap.mmap, start: int, count: int) -> None:
    """Or it would seem to hold the whole file in memory."""
    try:
        mapped.madvise(mmap.MADV_DONTNEED, start, count)
    except OSError:  # it is only advice
        pass


def _open(path: str, size: int) -> int:
    direct = getattr(os, "O_DIRECT", 0) if size % ALIGNED == 0 else 0
    try:
        target = os.open(path, os.O_WRONLY | direct)
    except OSError:  # a file system that cannot
        target = os.open(path, os.O_WRONLY)
    try:
        os.posix_fallocate(target, 0, size)  # blocks that are there already cost no entry in the journal
    except (AttributeError, OSError):
        pass
    return target


def _log(path: str) -> tuple[int, int]:
    """Changes when somebody commits."""
    try:
        found = os.stat(path + "-wal")
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


if __name__ == "__main__":
    if sys.stdin.buffer.readline():
        copy(sys.argv[1], sys.argv[2])
