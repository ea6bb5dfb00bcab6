"""Who holds a run, and whether that holder's process has certainly died.

A run's row names its owner. A lease says when others may take the run over anyway; this says that they need not
wait for it, because the process is gone. `is_dead` is True only if that is certain. It is never guessed: a process
that is stopped, swapped out or slow is alive.

The owner holds `flock` on a file. The kernel frees it when the process dies, however it dies, and not before. Ids are
random and never used twice.

    sqlite      `f:<id>`: `<store>-owner-<id>`. A file that is missing says dead, also in a copy of the store.
    postgresql  `p:<id>`: `perdure-owner-<id>` in /dev/shm, or in the folder for temporary files. The owner may be on
                another machine, or in another container: only a file that is there and free says dead. It stays for a
                day after its process.
    memory      `m:<id>`: never certain.

The text comes from a row, which others write: what is not of this very form is not dead, and no path is made of it.
Nothing here waits, and a forked child is never its parent: it drops what it inherited (a native `fork` without
`exec`, which Python does not see, would keep a dead parent's lock until the child ends).
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable
from itertools import islice
from threading import RLock

from perdure.errors import StoreClosed, StoreError
from perdure.storage.files import share_like

_TEXT = re.compile(r"[fpm]:([0-9a-f]{32})")
_TRIES = 5
_SWEEP_MAX = 1000  # names looked at beside the store
_KEPT_S = 86_400.0  # how long the file of a dead process stays in the folder that stores share
_SHARED = "/dev/shm"


class Owner:
    """One process as the owner of one store's runs. Nothing is made before `text` is first asked for."""

    def __init__(self, kind: str, files: _Files | None) -> None:
        self._kind = kind
        self._files = files
        self._text = ""
        self._generation = -1
        self._closed = False
        self._end: weakref.finalize[[], Owner] | None = None

    @classmethod
    def for_sqlite(cls, path: str) -> Owner:
        """For a store in this file. All processes must see its folder, as SQLite needs anyway."""
        store = os.path.realpath(path)
        return cls("f", _Files(store + "-owner-", store))

    @classmethod
    def for_server(cls) -> Owner:
        """For a store on a server, which processes of other machines use as well."""
        folder = _SHARED if os.access(_SHARED, os.W_OK) else tempfile.gettempdir()
        return cls("p", _Files(os.path.join(folder, "perdure-owner-"), None))

    @classmethod
    def in_memory(cls) -> Owner:
        """For a store that lives in this process."""
        return cls("m", None)

    @property
    def text(self) -> str:
        """What is stored in a run's row. A forked child gets one of its own."""
        with _mutex:
            if self._closed:
                raise StoreClosed("this owner of runs was closed; open the store again")
            if self._end is not None and self._generation == _generation:
                if not self._end.alive:
                    raise StoreClosed("this process is ending and owns no runs any more")
                return self._text
            if self._end is not None:
                self._end.detach()  # the parent's: it ends that itself
            name, release = (os.urandom(16).hex(), _nothing) if self._files is None else self._files.claim()
            self._text = f"{self._kind}:{name}"
            self._end = weakref.finalize(self, release)  # also at exit
            self._generation = _generation
            return self._text

    @property
    def known(self) -> str:
        """`text`, if it was asked for before; else nothing is made, and nothing names this process."""
        with _mutex:
            return self._text if self._end is not None and self._generation == _generation else ""

    def is_dead(self, other: str) -> bool:
        """True only if that owner has certainly ended: its process died, or closed the store."""
        found = _TEXT.fullmatch(other)
        if found is None or self._files is None or other[0] != self._kind:
            return False
        with _mutex:  # no fork meanwhile: a child would inherit the descriptor
            return self._files.is_free(found[1])

    def close(self) -> None:
        """Stop being an owner; release the runs first, because others may take them from now on. Idempotent."""
        with _mutex:
            self._closed = True
            if self._end is not None and self._generation == _generation:
                self._end()


class _Held:
    """A lock file that this process holds."""

    def __init__(self, path: str, descriptor: int, stays: bool) -> None:
        self._path, self._descriptor, self._stays, self._pid = path, descriptor, stays, os.getpid()
        _held.add(self)

    def release(self) -> None:
        """Remove the file, unless it says that the owner is gone, then unlock: observers find it locked or missing."""
        with _mutex:
            if self not in _held or self._pid != os.getpid():
                return  # it is the parent's
            _held.discard(self)
            if not self._stays:
                _unlink(self._path)
            os.close(self._descriptor)

    def forget(self) -> None:
        """In a forked child. Closing a copy does not unlock the parent's; an explicit unlock would."""
        os.close(self._descriptor)


class _Files:
    """The files of a store's owners. `store`: they are beside it, and one that is missing says dead; None: they are in
    a folder that is one machine's, or one container's."""

    def __init__(self, prefix: str, store: str | None) -> None:
        self._prefix, self._store = prefix, store

    def claim(self) -> tuple[str, Callable[[], None]]:
        """Make a new owner: its id, and what ends it."""
        self._sweep()
        try:
            for _ in range(_TRIES):
                name = os.urandom(16).hex()
                held = self._create(self._prefix + name)
                if held is not None:
                    return name, held.release
        except OSError as error:
            if self._store is None:
                return os.urandom(16).hex(), _nothing  # no process will be certain about this one
            raise StoreError(
                f"cannot make and lock {self._prefix}…, which says that this process is alive: {error}; "
                "the store's folder must be writable and on a local disk that can lock"
            ) from error
        raise StoreError(f"something removes {self._prefix}… as soon as it is made; leave these files alone")

    def _create(self, path: str) -> _Held | None:
        """None if a sweep of another process came between creating and locking."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600 if self._store else 0o644)
        try:
            if self._store is not None:
                share_like(descriptor, self._store)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return _Held(path, descriptor, self._store is None)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            _unlink(path)
            raise
        os.close(descriptor)
        _unlink(path)  # the sweeper may not be allowed to
        return None

    def is_free(self, name: str) -> bool:
        """Whether the process of that owner has certainly ended."""
        path = self._prefix + name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            # With the folder gone, nothing is known.
            return self._store is not None and os.path.isdir(os.path.dirname(path))
        except OSError:
            return False
        try:
            # Shared: two observers must not take each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not _is_at(descriptor, path):
                return not os.path.lexists(path)  # another observer was faster
            if self._store is not None or os.fstat(descriptor).st_mtime < time.time() - _KEPT_S:
                _unlink(path)
            return True
        except OSError:  # held, or this file system cannot lock
            return False
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what killed processes left, which no row may name any more."""
        folder, start = os.path.split(self._prefix)
        try:
            with os.scandir(folder or ".") as entries:
                names = [entry.name for entry in islice(entries, _SWEEP_MAX) if entry.name.startswith(start)]
        except OSError:
            return
        for name in names:
            if _TEXT.fullmatch("f:" + name.removeprefix(start)):
                self.is_free(name.removeprefix(start))


def _is_at(descriptor: int, path: str) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or not ours to remove: an unlocked file says dead as well


def _nothing() -> None:
    """There is no file to release."""


# Held while a descriptor is open that a forked child must not keep unknowingly, and by a thread that forks. Reentrant,
# because a signal handler or a finalizer may come in between.
_mutex = RLock()
_held: set[_Held] = set()
_generation = 0  # how many forks this process is away from the first


def _before_fork() -> None:
    _mutex.acquire()


def _after_fork_in_parent() -> None:
    _mutex.release()


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    inherited = list(_held)
    _held.clear()  # first: from here on no finalizer can take them for its own
    for held in inherited:
        held.forget()
    _mutex.release()  # the thread that forked is the one that is left


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
