"""`Finding`, and helpers that the doctor's checks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from perdure.storage.program import Flow
from perdure.threads.context import StoreContext

Level = Literal["ok", "note", "warning", "problem"]
MB = 10**6
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: its level, a message, and a hint of what to do."""

    check: str
    level: Level
    message: str
    hint: str = ""  # empty: nothing to do

    @classmethod
    def of(cls, check: str, is_bad: bool, message: str, hint: str) -> Finding:
        """Return a warning with the hint if `is_bad`, else an "ok" without it."""
        return cls(check, "warning", message, hint) if is_bad else cls(check, "ok", message)


Check = Callable[[StoreContext], Flow[list[Finding]]]


def span(seconds: float) -> str:
    """Format a time for people, in its largest unit."""
    for unit, each in (("days", DAY_S), ("hours", HOUR_S), ("minutes", MINUTE_S)):
        if seconds >= 2 * each:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"
