"""The queue of processes in front of SQLite's write lock. Without it some processes starve.

A process takes lock `next`, then lock `writer`, then releases `next`: one that has just released `writer` cannot pass a
waiting process. The files of the locks stay: if one was removed, two processes could hold the lock. If a process is
stopped (SIGSTOP) in the queue, the others bypass it after `PATIENCE_S`.
"""

from __future__ import annotations

import fcntl
import os
from math import inf
from time import monotonic, sleep

from perdure.errors import StoreError
from perdure.storage import metrics
from perdure.storage.files import share_like
from perdure.storage.sqlite.errors import busy

_MEMORY = ":memory:"  # as in opening.py
LOCK_ENDS = ("-lock", "-lock-next")  # what the files beside the store are called
PATIENCE_S = 2.0  # longer than the commits in front take, shorter than callers want to wait for a stopped process
_TRY = fcntl.LOCK_EX | fcntl.LOCK_NB
_POLL_S, _POLL_S_MAX = 0.0001, 0.002


class FileLock:
    """Exclusive right to write among all processes of this machine. `release` without `acquire` does nothing."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._held = self._jammed = False
        self._files: list[int] = []
        try:
            for end in LOCK_ENDS if path != _MEMORY else ():
                self._files.append(_open(path + end, path))
        except OSError:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()  # of a store that was not closed

    def acquire(self, deadline: float, patience_s: float = inf) -> None:
        """Take the right to write, or raise Busy at the deadline (of `time.monotonic`).

        After `patience_s` it returns without the right: then SQLite's own lock must keep writers apart.
        """
        if self._path == _MEMORY:
            return
        writer, behind = self._files
        try:
            try:
                fcntl.flock(behind, _TRY)
                fcntl.flock(writer, _TRY)
            except BlockingIOError:
                if not self._wait(deadline, patience_s):
                    return
            self._held, self._jammed = True, False
        except OSError as error:
            raise StoreError(
                f"cannot lock {self._path}-lock: {error}; the store must be on a local disk that can lock"
            ) from error
        finally:
            fcntl.flock(behind, fcntl.LOCK_UN)

    def release(self) -> None:
        if self._held:
            self._held = False
            fcntl.flock(self._files[0], fcntl.LOCK_UN)

    def close(self) -> None:
        self.release()
        self.forget_in_child()

    def forget_in_child(self) -> None:
        """Close the inherited descriptors after a fork: the child would keep the lock of a parent that died.

        Closing a copy does not release the parent's lock. An explicit unlock would.
        """
        files, self._files, self._held = self._files, [], False
        for file in files:
            os.close(file)

    def _wait(self, deadline: float, patience_s: float) -> bool:
        """Wait for both locks. Return False after `patience_s`."""
        began_s = monotonic()
        # One write has waited for the process in front, which is slow or stopped. Later writes do not wait again.
        until = began_s + (0.0 if self._jammed and patience_s < inf else patience_s)
        for file in reversed(self._files):
            pause_s = _POLL_S
            while not _try(file):
                now = monotonic()
                if now >= deadline:
                    raise busy(self._path, self._timeout_s)
                if now >= until:
                    self._jammed = True
                    return False
                sleep(pause_s)
                pause_s = min(pause_s * 1.5, _POLL_S_MAX)
        if (sink := metrics.sink) is not None:
            sink.record(metrics.LOCK_WAIT, monotonic() - began_s, "sqlite", "file")
        return True


def _try(file: int) -> bool:
    try:
        fcntl.flock(file, _TRY)
    except BlockingIOError:
        return False
    return True


def _open(path: str, store: str) -> int:
    # Programs that we start do not inherit it (Python's default). A link that another user made is not followed.
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        share_like(file, store)
        return file
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # another user made the file: reading is enough for flock
