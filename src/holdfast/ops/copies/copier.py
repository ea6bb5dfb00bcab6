"""The process that copies a file for a backup: `python -I -S copier.py SOURCE TARGET LOCK`. Needs nothing but Python.

It is polite. It writes past the kernel's cache, so that no writer's sync has to wait for what it has left there; it has
little of the processor; and while the log beside the source grows, so somebody commits, it takes small pieces and rests
after each. It says how far it is, and ends when nobody reads that any more. LOCK is the descriptor that
keeps others from the target; it is inherited, so that the lock lives as long as this process.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

PIECE_BYTES = 1 << 20
SMALL_BYTES = 1 << 18  # while others commit: their syncs wait for what is under way
REST = 2.0  # so many times as long as a piece took
SEEN_BYTES = 4 << 20  # so far on, with nobody committing, it is alone again
TOLD_BYTES = 8 << 20
ALIGNED = 4096
NICE = 5


def copy(source_path: str, target_path: str) -> None:
    source = os.open(source_path, os.O_RDONLY)
    size = os.fstat(source).st_size
    target = _open(target_path, size)
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))  # aligned, as writing past the cache wants it
    at = told = seen = 0
    is_busy = False
    log = _log(source_path)
    while at < size:
        start = time.monotonic()
        count = os.preadv(source, [piece[:SMALL_BYTES] if is_busy else piece], at)
        if not count:
            break
        if os.pwritev(target, [piece[:count]], at) != count:
            raise OSError(f"{target_path} took less than it was given")
        at += count
        log, before = _log(source_path), log
        is_busy = log != before or (is_busy and at - seen < SEEN_BYTES)
        if log != before:
            seen = at
        if is_busy:
            time.sleep(REST * (time.monotonic() - start))
        if at - told >= TOLD_BYTES or at == size:
            told = at
            os.write(1, b"%d %d\n" % (at, size))


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
    os.nice(NICE)
    copy(sys.argv[1], sys.argv[2])
