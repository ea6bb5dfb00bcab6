"""A pause of the garbage collector while many values are made at once.

The collector runs after every few hundred new objects and looks for circles among them. While a state is decoded all of
them are new and none is garbage, so that it finds nothing, again and again, and takes them for long-lived: with a
program's whole heap to go through it takes four times as long as the decoding.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
# Between two whole collections of ours: how often objects were made old, and about how many of them.
_CALLS_MAX = 500
_OBJECTS_MAX = 5_000_000


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
_calls = _objects = 0


def make_old(make: Callable[[], T], objects: int, *, in_row: bool = False) -> T:
    """What `make` gives: about so many objects, none of them garbage. The collector takes them for old ones at once,
    and does not go through them again and again until they are.

    What was young beside them is collected first, or it would be taken for old too; not within a row of such calls
    (`in_row`), between which nothing else happens. Nothing counts what becomes old so: now and then all is
    collected here."""
    global _calls, _objects
    if not gc.isenabled() or gc.get_freeze_count():
        with collector_pause:
            return make()
    if in_row:
        _objects += objects
    elif _calls >= _CALLS_MAX or _objects > _OBJECTS_MAX:
        _calls = _objects = 0
        gc.collect()
    else:
        _calls, _objects = _calls + 1, _objects + objects
        gc.collect(1)
    with collector_pause:
        made = make()
        gc.freeze()
        gc.unfreeze()
    return made


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_pause.after_fork)
