"""Who holds a run, and whether that holder's process has certainly died.

A run's row names its owner. A lease says when others may take the run over anyway; this says that they need not
wait for it, because the process is gone. `is_dead` is True only if that is certain. It is never guessed: a process
that is stopped, swapped out or slow is alive.

    sqlite      `f:<id>`: the owner holds `flock` on `<store>-owner-<id>`. The kernel frees it when the process dies,
                however it dies, and not before. Ids are random and never used twice, so a file that is missing
                says dead, also in a copy of the store on another machine.
    postgresql  `p:<id>:<place>:<pid>:<start>`: the owner may be on another machine, so only an observer in the same
                place (boot, host name, pid namespace, time namespace) can be certain. Needs Linux's /proc. A virtual
                machine that is cloned while it runs, and keeps its host name, is one place for us.
    memory      `m:<id>`: alive while this process knows it.

The text comes from a row, which others write: what is not of this very form is not dead, and no path is made of it.
Nothing here waits, and a forked child is never its parent: it drops what it inherited (a native `fork` without
`exec`, which Python does not see, would keep a dead parent's lock until the child ends).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import weakref
from collections.abc import Callable
from itertools import islice
from threading import RLock
from typing import Protocol

from blake3 import blake3

from perdure.errors import StoreClosed, StoreError
from perdure.storage.files import share_like

_ID = r"[0-9a-f]{32}"
_FILE_TEXT = re.compile(rf"f:({_ID})")
_PLACE_TEXT = re.compile(rf"p:{_ID}:({_ID}):([1-9][0-9]{{0,6}}):([0-9]{{1,20}})")
_MEMORY_TEXT = re.compile(rf"m:{_ID}")
_TRIES = 5
_SWEEP_MAX = 1000  # names looked at beside the store

Claimed = tuple[str, Callable[[], None]]


class _Kind(Protocol):
    def claim(self) -> Claimed:
        """Make a new owner: its text, and what ends it."""
        ...

    def is_dead(self, text: str) -> bool: ...


class Owner:
    """One process as the owner of one store's runs. Nothing is made before `text` is first asked for."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self._text = ""
        self._generation = -1
        self._closed = False
        self._end: weakref.finalize[[], Owner] | None = None

    @classmethod
    def for_sqlite(cls, path: str) -> Owner:
        """For a store in this file. All processes must see its folder, as SQLite needs anyway."""
        return cls(_File(os.path.realpath(path)))

    @classmethod
    def for_place(cls) -> Owner:
        """For a store on a server, which processes of other machines use as well."""
        return cls(_Place())

    @classmethod
    def in_memory(cls) -> Owner:
        """For a store that lives in this process."""
        return cls(_Memory())

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
            self._text, release = self._kind.claim()
            self._end = weakref.finalize(self, release)  # also at exit
            self._generation = _generation
            return self._text

    @property
    def known(self) -> str:
        """`text`, if it was asked for before; else nothing is made, and nothing names this process."""
        with _mutex:
            return self._text if self._end is not None and self._generation == _generation else ""

    def is_dead(self, other: str) -> bool:
        """True only if that owner has certainly ended: its process died, or (except on a server) closed the store."""
        with _mutex:  # no fork meanwhile: a child would inherit the descriptor
            return self._kind.is_dead(other)

    def close(self) -> None:
        """Stop being an owner; release the runs first, because others may take them from now on. Idempotent."""
        with _mutex:
            self._closed = True
            if self._end is not None and self._generation == _generation:
                self._end()


# SQLite: a locked file


class _Held:
    """A lock file that this process holds."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor, self._pid = path, descriptor, os.getpid()
        _held.add(self)

    def release(self) -> None:
        """Remove the file, then unlock: whoever looks finds it locked or missing."""
        with _mutex:
            if self not in _held or self._pid != os.getpid():
                return  # it is the parent's
            _held.discard(self)
            _unlink(self._path)
            os.close(self._descriptor)

    def forget(self) -> None:
        """In a forked child. Closing a copy does not unlock the parent's; an explicit unlock would."""
        os.close(self._descriptor)


class _File:
    def __init__(self, store: str) -> None:
        self._prefix = store + "-owner-"
        self._store = store

    def claim(self) -> Claimed:
        self._sweep()
        try:
            for _ in range(_TRIES):
                name = _new_id()
                held = self._create(self._prefix + name)
                if held is not None:
                    return f"f:{name}", held.release
        except OSError as error:
            raise StoreError(
                f"cannot make and lock {self._prefix}…, which says that this process is alive: {error}; "
                "the store's folder must be writable and on a local disk that can lock"
            ) from error
        raise StoreError(f"something removes {self._prefix}… as soon as it is made; leave these files alone")

    def is_dead(self, text: str) -> bool:
        found = _FILE_TEXT.fullmatch(text)
        return found is not None and self._is_free(self._prefix + found[1])

    def _create(self, path: str) -> _Held | None:
        """None if a sweep of another process came between creating and locking."""
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
        _unlink(path)  # the sweeper may not be allowed to
        return None

    def _is_free(self, path: str) -> bool:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return os.path.isdir(os.path.dirname(path))  # with the folder gone, nothing is known
        except OSError:
            return False
        try:
            # Shared: two observers must not take each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                _unlink(path)
                return True
            return not os.path.lexists(path)  # another observer was faster
        except OSError:  # held, or this file system cannot lock
            return False
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what killed processes left, which no row may name any more. A missing file says dead as well."""
        folder, start = os.path.split(self._prefix)
        try:
            with os.scandir(folder or ".") as entries:
                names = [entry.name for entry in islice(entries, _SWEEP_MAX) if entry.name.startswith(start)]
        except OSError:
            return
        for name in names:
            self.is_dead("f:" + name.removeprefix(start))


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


# PostgreSQL: a process in a place


class _Place:
    def claim(self) -> Claimed:
        pid, here = os.getpid(), _here()
        status = _status(pid) if here else None
        if status is None:
            return f"p:{_new_id()}", _nothing  # nobody will be certain about this one
        return f"p:{_new_id()}:{here}:{pid}:{status[1]}", _nothing

    def is_dead(self, text: str) -> bool:
        found = _PLACE_TEXT.fullmatch(text)
        return found is not None and found[1] == _here() and _has_ended(int(found[2]), int(found[3]))


def _here() -> str:
    """What two processes must have in common so that one can look at the other; empty if that is not possible."""
    try:
        # With the /proc of another pid namespace (a container that was given the host's), pids mean nothing.
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        # Start times are shown in the reader's time namespace.
        parts = (boot, os.uname().nodename, os.readlink("/proc/self/ns/pid"), _link("/proc/self/ns/time"))
    except OSError:
        return ""
    return blake3("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest(16)


def _has_ended(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)  # first: /proc may hide the processes of other users as if they were gone
    except ProcessLookupError:
        return True
    except OSError:
        pass
    status = _status(pid)
    if status is None:
        return False  # hidden, or it went in this moment: the next look will be certain
    dead, started = status
    return dead or started != start


def _status(pid: int) -> tuple[bool, int] | None:
    """Whether it is only a zombie, and when it started (ticks since boot)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may contain anything, also ")"
        # A zombie with threads is a process whose first thread has ended.
        return fields[0] in (b"Z", b"X") and int(fields[17]) <= 1, int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ""  # an older kernel
        raise


def _nothing() -> None:
    """A process's place ends with the process."""


# In memory


class _Memory:
    def claim(self) -> Claimed:
        text = f"m:{_new_id()}"
        _living.add(text)
        return text, lambda: _living.discard(text)

    def is_dead(self, text: str) -> bool:
        return _MEMORY_TEXT.fullmatch(text) is not None and text not in _living


def _new_id() -> str:
    return os.urandom(16).hex()


# Held while a descriptor is open that a forked child must not keep unknowingly, and so by whoever forks. Reentrant,
# because a signal handler or a finalizer may come in between.
_mutex = RLock()
_held: set[_Held] = set()
_living: set[str] = set()
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
    _living.clear()
    for held in inherited:
        held.forget()
    _mutex.release()  # the thread that forked is the one that is left


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
