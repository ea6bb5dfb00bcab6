"""Notifications that another process has written, so that a worker looks at once and not at its next poll.

A driver offers `listen()`, which gives one of these. A notification is a hint: it may be missed, so a waiting
worker must also poll.
"""

from __future__ import annotations

import os
import time
from typing import Protocol

_LOOK_S = 0.02


class Notifications(Protocol):
    """A subscription to a store's notifications. It belongs to one thread."""

    def wait(self, timeout_s: float) -> bool:
        """Block until there may be something new, at most so long. Raises StoreError if it cannot hear."""
        ...

    def close(self) -> None: ...


class FileNotifications:
    """SQLite: every commit changes the log beside the store. Only its size and time are looked at, no lock is taken."""

    def __init__(self, path: str) -> None:
        self._log = path + "-wal"
        self._seen: tuple[int, ...] | None = None  # None: the first wait returns at once, and the caller looks

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (state := self._stat()) == self._seen:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(_LOOK_S, left_s))
        self._seen = state
        return True

    def close(self) -> None:
        pass

    def _stat(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._log)
        except OSError:
            return ()
        return (status.st_ino, status.st_size, status.st_mtime_ns)


class NoNotifications:
    """A store in memory has no file: looking again soon costs little."""

    def wait(self, timeout_s: float) -> bool:
        time.sleep(min(timeout_s, _LOOK_S))
        return True

    def close(self) -> None:
        pass
