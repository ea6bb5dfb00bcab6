"""The queue of processes in front of SQLite's write lock.

SQLite's own busy handling sleeps and retries, so that any process may win and some starve. Here a process takes lock
`next`, then lock `writer`, then gives `next` back: one that has just released `writer` finds `next` taken by the one
waiting, and cannot pass it. Both are `flock` locks on files beside the store, which the kernel frees when their holder
dies; the files stay, because removing a lock file lets two processes hold "it". A waiting process polls, since flock
has no timeout.

The queue is for fairness; SQLite's own lock keeps writers apart. So a process that is stopped (SIGSTOP) while it has a
place in the queue, or the front of it, holds the others up for `PATIENCE_S` once: then they write past the queue, and
wait only for a transaction that is really open. Opening a store that must be upgraded waits for the queue itself.

One thread at a time uses a lock: the leader. A store in memory has no files, and needs none: the commit queue of its
process keeps its callers apart.
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
PATIENCE_S = 2.0  # longer than the commits in front of one take, shorter than a caller wants to wait for a stopped one
_TRY = fcntl.LOCK_EX | fcntl.LOCK_NB
_POLL_S, _POLL_S_MAX = 0.0001, 0.002


class FileLock:
    """The right to write, between all processes of this machine. `release` without `acquire` does nothing."""

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
        """Take the right to write, or raise `Busy` at the deadline (of `time.monotonic`). Returns without it after
        `patience_s`: the caller must have another lock to wait for."""
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
        """Give the files back."""
        self.release()
        self.forget_in_child()

    def forget_in_child(self) -> None:
        """After a fork: drop the inherited descriptors, or the child keeps the lock of a parent that died.

        Closing a copy does not unlock the parent's; an explicit unlock would.
        """
        files, self._files, self._held = self._files, [], False
        for file in files:
            os.close(file)

    def _wait(self, deadline: float, patience_s: float) -> bool:
        """Wait for both locks. False: patience ran out."""
        began_s = monotonic()
        # One write has waited long enough for the process in front, which is late or stopped: the next do not.
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
    # Never inherited by programs we start (Python's default), and never through a link that another user put there.
    try:
        made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        share_like(made, store)
        return made
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # enough for flock, if another user made the file
