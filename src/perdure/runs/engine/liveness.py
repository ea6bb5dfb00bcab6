"""Owners of runs, and whether an owner's process has certainly died.

A run's row names its owner. Others take the run over when its lease has expired. On SQLite they need not wait for that
if the owner is certainly dead. `is_dead` never guesses: a process that is stopped, swapped out or slow is alive.

On SQLite the owner holds `flock` on the file `<store>-owner-<id>`. The kernel frees the lock when the process dies,
however it dies, and not before. A missing file means dead, also in a copy of the store. Ids are random and never used
twice. On PostgreSQL, where owners are on other machines, and in memory there is no file: only the lease counts.

The owner's text comes from a row that other processes write. A text of any other form is not dead, and no path is built
from it. Nothing here blocks. A forked child is not its parent, and drops the locks that it inherited. Python does not
see a native `fork` without `exec`: such a child would keep a dead parent's lock until it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from collections.abc import Callable
from itertools import islice
from threading import RLock

from perdure.errors import StoreClosed, StoreError
from perdure.storage.files import share_like

_TEXT = re.compile(r"[0-9a-f]{32}")
_TRIES = 5
_SWEEP_MAX = 1000  # names in the folder that a sweep looks at


class Owner:
    """One process as the owner of one store's runs. Its file is created when `text` is first read."""

    def __init__(self, path: str | None = None) -> None:
        """`path` is the file of a SQLite store; None: no process can tell whether this one has died."""
        self._files = None if path is None else _Files(os.path.realpath(path))
        self._text = ""
        self._generation = -1
        self._closed = False
        self._end: weakref.finalize[[], Owner] | None = None

    @property
    def text(self) -> str:
        """The owner as a run's row names it. A forked child gets a text of its own."""
        with _mutex:
            if self._closed:
                raise StoreClosed("this owner of runs was closed; open the store again")
            if self._end is not None and self._generation == _generation:
                if not self._end.alive:
                    raise StoreClosed("this process is ending and owns no runs any more")
                return self._text
            if self._end is not None:
                self._end.detach()  # it belongs to the parent process, which releases it
            self._text, release = (os.urandom(16).hex(), _nothing) if self._files is None else self._files.claim()
            self._end = weakref.finalize(self, release)  # also at exit
            self._generation = _generation
            return self._text

    @property
    def known(self) -> str:
        """`text` if it was read before, else "". Creates no file."""
        with _mutex:
            return self._text if self._end is not None and self._generation == _generation else ""

    def is_dead(self, other: str) -> bool:
        """Return True only if that owner has certainly ended: its process died, or closed the store."""
        if self._files is None or not _TEXT.fullmatch(other):
            return False
        with _mutex:  # blocks forks: a child would inherit the descriptor
            return self._files.is_free(other)

    def close(self) -> None:
        """Stop being an owner. Release the runs first: others may take them from now on. Idempotent."""
        with _mutex:
            self._closed = True
            if self._end is not None and self._generation == _generation:
                self._end()


class _Held:
    """A lock file that this process holds."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor, self._pid = path, descriptor, os.getpid()
        _held.add(self)

    def release(self) -> None:
        """Remove the file, then unlock it, so that observers find it locked or missing."""
        with _mutex:
            if self not in _held or self._pid != os.getpid():
                return  # released before, or the lock of a parent process
            _held.discard(self)
            _unlink(self._path)
            os.close(self._descriptor)

    def forget(self) -> None:
        """Close the descriptor in a forked child. This keeps the parent's lock; an explicit unlock would free it."""
        os.close(self._descriptor)


class _Files:
    """The lock files of a store's owners. They are beside the store: all processes must see its folder."""

    def __init__(self, store: str) -> None:
        self._prefix, self._store = store + "-owner-", store

    def claim(self) -> tuple[str, Callable[[], None]]:
        """Create an owner. Return its id and the function that releases it."""
        self._sweep()
        try:
            for _ in range(_TRIES):
                name = os.urandom(16).hex()
                held = self._create(self._prefix + name)
                if held is not None:
                    return name, held.release
        except OSError as error:
            raise StoreError(
                f"cannot make and lock {self._prefix}…, which says that this process is alive: {error}; "
                "the store's folder must be writable and on a local disk that can lock"
            ) from error
        raise StoreError(f"something removes {self._prefix}… as soon as it is made; leave these files alone")

    def _create(self, path: str) -> _Held | None:
        """Create and lock a file. Return None if another process's sweep came between the two."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            share_like(descriptor, self._store)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return _Held(path, descriptor)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            _unlink(path)
            raise
        os.close(descriptor)
        _unlink(path)  # the sweeping process may lack the permission
        return None

    def is_free(self, name: str) -> bool:
        """Return whether the process of that owner has certainly ended."""
        path = self._prefix + name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            # If the folder is missing too, nothing is certain.
            return os.path.isdir(os.path.dirname(path))
        except OSError:
            return False
        try:
            # A shared lock: two observers must not mistake each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not _is_at(descriptor, path):
                return not os.path.lexists(path)  # another observer has removed the file
            _unlink(path)
            return True
        except OSError:  # held, or this file system cannot lock
            return False
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove the files of killed processes. `is_dead` never looks at an owner that no run names."""
        folder, start = os.path.split(self._prefix)
        try:
            with os.scandir(folder or ".") as entries:
                names = [entry.name for entry in islice(entries, _SWEEP_MAX) if entry.name.startswith(start)]
        except OSError:
            return
        for name in names:
            if _TEXT.fullmatch(name.removeprefix(start)):
                self.is_free(name.removeprefix(start))


def _is_at(descriptor: int, path: str) -> bool:
    try:
        current = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), current)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # already gone, or no permission: an unlocked file means dead as well


def _nothing() -> None:
    """Release an owner that has no file."""


# Held by a thread that forks, and while a descriptor is open that is not in `_held` and that a forked child must not
# keep. Reentrant, because a signal handler or a finalizer may run in between.
_mutex = RLock()
_held: set[_Held] = set()
_generation = 0  # forks between the first process and this one


def _before_fork() -> None:
    _mutex.acquire()


def _after_fork_in_parent() -> None:
    _mutex.release()


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    inherited = list(_held)
    _held.clear()  # before anything else: a finalizer must not release the parent's locks
    for held in inherited:
        held.forget()
    _mutex.release()  # only the thread that forked exists here, and it holds the lock


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
