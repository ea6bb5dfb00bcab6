"""Strikes an operation that works on SQLite files at any point: a statement, or something done to a file.

Every statement of every connection counts, whoever opens it; and every write, sync, truncation and deletion, by SQLite
(a VFS that is the default meanwhile) or by Python. At the chosen point it fails as a disk or a database would; or the
process is killed there, in a child.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import apsw

import perdure
from perdure.testing.processes import Say

_CALLS = ("fsync", "link", "replace", "unlink", "ftruncate")


class Struck(Exception):
    """What a statement raises."""


class Blows:
    """`with Blows(at) as blows: operation()`: the point number `at` fails (0: none, they are counted)."""

    def __init__(self, at: int, *, kill: bool = False) -> None:
        self.points: list[str] = []
        self._at, self._kill = at, kill
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        self._disk = _Disk(self)
        apsw.connection_hooks.append(self._connected)
        for name in _CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._call(name, self._real[name]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        apsw.connection_hooks.remove(self._connected)
        self._disk.unregister()

    def point(self, what: str, failure: Callable[[str], Exception]) -> None:
        self.points.append(what)
        if len(self.points) == self._at:
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise failure(f"struck at point {self._at}: {what}")

    def _connected(self, connection: apsw.Connection) -> None:
        connection.exec_trace = self._statement

    def _statement(self, _cursor: apsw.Cursor, text: str, _bindings: Any) -> bool:
        self.point(text, Struck)
        return True

    def _call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.point(f"os.{name}", lambda words: OSError(errno.EIO, words))
            return real(*args, **kwargs)

        return call


class _Disk(apsw.VFS):
    def __init__(self, blows: Blows) -> None:
        self.blows = blows
        super().__init__("blows", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self.blows, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.blows.point("xDelete", apsw.IOError)
        super().xDelete(filename, syncdir)


class _File(apsw.VFSFile):
    def __init__(self, blows: Blows, name: Any, flags: list[int]) -> None:
        self._blows = blows
        super().__init__("unix", name, flags)  # by its name: the default is the disk above

    def xWrite(self, data: bytes, offset: int) -> None:
        self._blows.point("xWrite", apsw.IOError)
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._blows.point("xTruncate", apsw.IOError)
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self._blows.point("xSync", apsw.IOError)
        super().xSync(flags)


# --- in child processes


def restore_killed(say: Say, backup: str, place: str, force: bool, at: int) -> None:
    """Restore, and be killed at a point of it."""
    with Blows(at, kill=True):
        perdure.restore(backup, place, force=force)
    say("done")
