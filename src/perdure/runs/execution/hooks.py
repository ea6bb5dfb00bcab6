"""Named points of a run's life, where a test or the drill may kill the process.

`hook` is None, or called with a `Point` right before and right after each commit and each body. Nothing else in
Perdure calls it or depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Point(NamedTuple):
    """A point: what is being done (claim, intent, body, done, park, finish …), where, in which attempt, and when."""

    kind: str
    path: str
    name: str
    attempt: int
    when: str  # before, after

    def __str__(self) -> str:
        return f"{self.when} {self.kind} of {self.name} at {self.path or 'the top'} (attempt {self.attempt})"


hook: Callable[[Point], None] | None = None


def fault_point(kind: str, path: str, name: str, attempt: int, when: str) -> None:
    """Say that a point was reached."""
    if hook is not None:
        hook(Point(kind, path, name, attempt, when))
