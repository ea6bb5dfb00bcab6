"""A pause of the garbage collector while a value that other threads may change is copied (`snapshot.py`).

A collection calls Python code. Without the pause another thread could change the value in the middle of the copy.
"""

from __future__ import annotations

import gc
import os
import threading
from types import TracebackType


class _Pause:
    """A context in which the collector rests. It resumes when the last user has left; if it was off
    before, it stays off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._resume = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._resume = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._resume:
                gc.enable()

    def after_fork(self) -> None:
        """In the child no thread is inside: the threads that were are not there."""
        self._lock = threading.Lock()
        if self._inside and self._resume:
            gc.enable()
        self._inside = 0


collector_pause = _Pause()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_pause.after_fork)
