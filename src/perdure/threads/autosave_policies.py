"""When an autosaved state is worth a checkpoint: `every(n)`, `periodic(seconds)` and `adaptive()`. Pure, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Protocol

from perdure.errors import UsageError


class Policy(Protocol):
    """When to save. Policies hold no state: one may be shared between threads."""

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        """Whether to save now: changes and seconds since the last save, and how long a save stops the code."""


@dataclass(frozen=True, slots=True)
class Every:
    """Save after `changes` changes."""

    changes: int

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        return changes >= self.changes


@dataclass(frozen=True, slots=True)
class Periodic:
    """Save at the first change when `seconds` have passed since the last save."""

    seconds: float

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        return changes > 0 and elapsed_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Save every W = sqrt(2 C M) seconds, which wastes least time (Young 1974, Daly 2006): C is the measured cost of a
    save, M the mean time between failures."""

    mtbf_s: float
    min_s: float
    max_s: float

    def interval_s(self, cost_s: float) -> float:
        return min(max(sqrt(2 * cost_s * self.mtbf_s), self.min_s), self.max_s)

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        return changes > 0 and elapsed_s >= self.interval_s(cost_s)


class _Policies:
    """`perdure.autosave`: the policies by name."""

    @staticmethod
    def every(n: int) -> Every:
        """Save after every `n` changes."""
        return Every(check_change_count(n, "autosave.every"))

    @staticmethod
    def periodic(seconds: float) -> Periodic:
        """Save at the first change when so many seconds have passed since the last save."""
        return Periodic(_seconds(seconds, "autosave.periodic(seconds)"))

    @staticmethod
    def adaptive(*, mtbf_s: float = 3600.0, min_s: float = 1.0, max_s: float = 300.0) -> Adaptive:
        """Save as often as is worth while, given what a save costs (measured) and how long a process lives (`mtbf_s`);
        never more often than every `min_s` seconds, and at the first change after `max_s`."""
        shortest, longest = _seconds(min_s, "autosave.adaptive(min_s)", zero=True), _seconds(max_s, "adaptive(max_s)")
        if shortest > longest:
            raise UsageError(f"autosave.adaptive(min_s={min_s!r}, max_s={max_s!r}): min_s is at most max_s")
        return Adaptive(_seconds(mtbf_s, "autosave.adaptive(mtbf_s)"), shortest, longest)

    def __repr__(self) -> str:
        return "perdure.autosave: every(n), periodic(seconds), adaptive()"


def check_change_count(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{what}({value!r}): a count of changes, 1 or more")
    return value


def _seconds(value: object, what: str, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UsageError(f"{what}: a number of seconds, not {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise UsageError(f"{what}: {value!r} seconds is not above 0")
    return float(value)


autosave = _Policies()
