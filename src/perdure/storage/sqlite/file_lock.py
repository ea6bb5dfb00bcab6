"""The queue of processes in front of SQLite's write lock.

SQLite's own busy handling sleeps and retries, so whoever comes back first wins and some processes starve.
Here a process takes lock `next`, then lock `writer`, then gives `next` back: one that has just released
`writer` finds `next` taken by the one waiting, and cannot pass it. Both are `flock` locks on files beside the
store, which the kernel frees when their holder dies; the files stay, because removing a lock file lets two
processes hold "it".

The queue is for fairness; SQLite's own lock keeps writers apart. So a process that is stopped (SIGSTOP) while it has a
place in the queue, or the front of it, holds the others up for `PATIENCE_S` once: then they write past the queue, and
wait only for a transaction that is really open. Opening a store that must be upgraded waits for the queue itself.

`Gate` is the interface; `ThreadGate` is the same for a store in memory. One thread at a time uses a gate: the
leader.
"""

from __future__ import annotations

import fcntl
import os
from math import inf
from pathlib import Path
from threading import Lock, RLock, Thread
from time import monotonic
from typing import Protocol

from perdure.errors import StoreError
from perdure.storage import meters
from perdure.storage.files import share_like
from perdure.storage.sqlite.errors import busy

LOCK_ENDS = ("-lock", "-lock-next")  # what the files beside the store are called
PATIENCE_S = (
    2.0  # longer than commits take that are in front of one, shorter than anybody wants to wait for a stopped one
)
_TRY = fcntl.LOCK_EX | fcntl.LOCK_NB


class Gate(Protocol):
    """Exclusive right to write. `release` without `acquire` does nothing, so it can stand in a `finally`."""

    def acquire(self, deadline: float, patience_s: float = inf) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...

    def forget_in_child(self) -> None: ...


class ThreadGate:
    """The gate of a store in memory: readers and the writer share one connection."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._lock = RLock()  # knows its owner, so that a stray release cannot take it from another thread

    def acquire(self, deadline: float, patience_s: float = inf) -> None:
        if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
            raise busy(self._path, self._timeout_s)

    def release(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # not ours
            pass

    def close(self) -> None:
        pass

    def forget_in_child(self) -> None:
        pass


class _Wait:
    """One acquisition that a helper thread is blocked in."""

    __slots__ = ("abandoned", "done", "error", "granted", "is_jammed")

    def __init__(self) -> None:
        self.granted = Lock()  # released by the helper; cheaper than an Event
        self.granted.acquire()
        self.abandoned = False
        self.done = False
        self.is_jammed = False
        self.error: OSError | None = None


class FileGate:
    """The gate of a store in a file, between threads of all processes of this machine."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._held = False
        self._closed = True  # until both files are open
        self._mutex = Lock()
        self._wait: _Wait | None = None
        self._writer = _open(path + LOCK_ENDS[0], path)
        try:
            self._next = _open(path + LOCK_ENDS[1], path)
        except OSError:
            os.close(self._writer)
            raise
        self._closed = False

    def __del__(self) -> None:
        self.close()  # of a store that nobody closed

    def acquire(self, deadline: float, patience_s: float = inf) -> None:
        """Take the right to write, or raise `Busy` at the deadline (of `time.monotonic`). Returns without it after
        `patience_s`: the caller must have another lock to wait for."""
        # While a helper is blocked with these descriptors, trying here would succeed on its behalf: flock
        # belongs to the descriptor, not to the thread.
        if (wait := self._wait) is not None:
            # A thread of this process has waited long enough for the one in front: it is late, or stopped.
            self._acquire_slowly(deadline, 0.0 if wait.is_jammed and patience_s < inf else patience_s)
            return
        try:
            fcntl.flock(self._next, _TRY)
            fcntl.flock(self._writer, _TRY)
            fcntl.flock(self._next, fcntl.LOCK_UN)
        except BlockingIOError:
            self._acquire_slowly(deadline, patience_s)
            return
        except OSError as error:
            raise self._failed(error) from error
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            fcntl.flock(self._writer, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the descriptors back; a helper that is still blocked with them does it when it wakes."""
        self.release()
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if self._wait is not None:
                self._wait.abandoned = True
                return
        self._close_files()

    def forget_in_child(self) -> None:
        """After a fork: drop the inherited descriptors, or the child keeps the lock of a parent that died.

        Closing a copy does not unlock the parent's; an explicit unlock would.
        """
        if not self._closed:
            self._held, self._closed = False, True
            self._close_files()

    def _acquire_slowly(self, deadline: float, patience_s: float) -> None:
        # flock has no timeout, so a helper thread blocks in it and the caller waits for the helper.
        with self._mutex:
            wait = self._wait
            if wait is None:
                wait = self._wait = _Wait()
                Thread(target=self._block, args=(wait,), name="perdure-lock", daemon=True).start()
            wait.abandoned = False  # an earlier caller gave up, its place in the queue is ours now
        begun_s = monotonic()
        try:
            granted = wait.granted.acquire(timeout=max(0.0, min(deadline - begun_s, patience_s)))
        except BaseException:  # KeyboardInterrupt: give the place up, the helper releases what it gets
            if not self._abandon(wait):
                self._wait, self._held = (
                    None,
                    True,
                )  # granted all the same: the caller's `finally` releases it
            raise
        if not granted and self._abandon(wait):
            wait.is_jammed = patience_s < inf
            if monotonic() < deadline:
                return
            raise busy(self._path, self._timeout_s)
        self._wait = None
        if wait.error is not None:
            raise self._failed(wait.error) from wait.error
        self._held = True
        if (sink := meters.sink) is not None:
            sink.record(meters.LOCK_WAIT, monotonic() - begun_s, "sqlite", "file")

    def _abandon(self, wait: _Wait) -> bool:
        """False if the lock was granted in the last moment."""
        with self._mutex:
            wait.abandoned = not wait.done
            return wait.abandoned

    def _block(self, wait: _Wait) -> None:
        try:
            fcntl.flock(self._next, fcntl.LOCK_EX)  # at once if the caller already got it
            fcntl.flock(self._writer, fcntl.LOCK_EX)
            fcntl.flock(self._next, fcntl.LOCK_UN)
        except OSError as error:
            wait.error = error
        with self._mutex:
            if not wait.abandoned:
                wait.done = True
                wait.granted.release()
                return
            self._wait = None
            if not self._closed:
                fcntl.flock(self._writer, fcntl.LOCK_UN)
                return
        self._close_files()

    def _close_files(self) -> None:
        os.close(self._writer)
        os.close(self._next)

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(f"cannot lock {self._path}-lock: {error}; the store must be on a local disk that can lock")


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


def remove_locks(path: Path) -> None:
    """The lock files of a file that is ours alone: of a copy on its way, never of a store."""
    for end in LOCK_ENDS:
        Path(f"{path}{end}").unlink(missing_ok=True)
