"""At which points an operation is struck: at every one in a soak (PERDURE_SOAK=1), else at a twentieth of them.

Which are drawn, so that it falls on every kind of point (begin, each statement, commit, after it), and always the
same for one test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

SOAK = bool(os.environ.get("PERDURE_SOAK"))


def points(name: str) -> Iterator[int]:
    """Numbers from 1 on, without end."""
    chance, at = random.Random(name), 0
    while True:
        at += 1 if SOAK else chance.randint(1, 39)
        yield at
