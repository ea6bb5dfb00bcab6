"""Named points in a run's execution where a test or the drill may kill the process.

`hook`, unless None, is called with a `Point` right before and right after each commit and each body. Nothing in
Perdure depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Point(NamedTuple):
    """A point of an execution. `kind` is the operation: claim, intent, body, done, park, finish …"""

    kind: str
    path: str
    name: str
    attempt: int
    when: str  # before, after

    def __str__(self) -> str:
        return f"{self.when} {self.kind} of {self.name} at {self.path or 'the top'} (attempt {self.attempt})"


hook: Callable[[Point], None] | None = None


def fault_point(kind: str, path: str, name: str, attempt: int, when: str) -> None:
    """Call the hook, if there is one, with the point that was reached."""
    if hook is not None:
        hook(Point(kind, path, name, attempt, when))
