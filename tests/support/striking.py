"""At which points an operation is struck, and a hook that kills its process at one of them.

In a soak (PERDURE_SOAK=1) every point is struck, else a twentieth of them. Those are drawn, so that every kind of point
(begin, each statement, commit, after it) is among them, and are always the same for one test.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator

SOAK = bool(os.environ.get("PERDURE_SOAK"))


def points(name: str) -> Iterator[int]:
    """Numbers from 1 on, without end."""
    chance, at = random.Random(name), 0
    while True:
        at += 1 if SOAK else chance.randint(1, 39)
        yield at


def die_at(number: int | None) -> Callable[..., None]:
    """Return a hook that kills this process when it is called for the n-th time; None: never."""
    calls = itertools.count(1)

    def hook(*_: object) -> None:
        if next(calls) == number:  # one step: branches may come to it from several threads
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
