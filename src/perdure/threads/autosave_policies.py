"""The policies that decide when autosave saves: `every(n)`, `periodic(seconds)`, `adaptive()`. They read no clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Protocol

from perdure.errors import UsageError


class Policy(Protocol):
    """A rule for when to save. Policies hold no state, so threads may share one."""

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        """Return whether to save now, from the changes and seconds since the last save and the time a save blocks."""


@dataclass(frozen=True, slots=True)
class Every:
    """Save after every `n` changes."""

    n: int

    def __post_init__(self) -> None:
        check_change_count(self.n, "autosave.every")

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        return changes >= self.n


@dataclass(frozen=True, slots=True)
class Periodic:
    """Save at the first change after `seconds` have passed since the last save."""

    seconds: float

    def __post_init__(self) -> None:
        _check_seconds("periodic", seconds=self.seconds)

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        return changes > 0 and elapsed_s >= self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """Save every W = sqrt(2 C M) seconds, the interval that wastes least time (Young 1974, Daly 2006).

    C is the measured cost of a save, M the mean time between failures. It begins with `mtbf_s` and follows the sessions
    of the thread: how long they ran, and how many of them were killed. W is at least `min_s` and at most `max_s`. A
    save happens at the first change after it.
    """

    mtbf_s: float = 3600.0
    min_s: float = 1.0
    max_s: float = 300.0

    def __post_init__(self) -> None:
        _check_seconds("adaptive", mtbf_s=self.mtbf_s, max_s=self.max_s)
        if not 0 <= self.min_s <= self.max_s:
            raise UsageError(f"autosave.adaptive(min_s={self.min_s!r}, max_s={self.max_s!r}): min_s is at most max_s")

    def interval_s(self, cost_s: float) -> float:
        return min(max(sqrt(2 * cost_s * self.mtbf_s), self.min_s), self.max_s)

    def due(self, changes: int, elapsed_s: float, cost_s: float) -> bool:
        return changes > 0 and elapsed_s >= self.interval_s(cost_s)


class autosave:
    """The policies of `thread.autosave`: `every(n)`, `periodic(seconds)`, `adaptive()`."""

    every, periodic, adaptive = Every, Periodic, Adaptive


def check_change_count(value: object, policy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{policy}({value!r}): a count of changes, 1 or more")


def _check_seconds(policy: str, **seconds: object) -> None:
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise UsageError(f"autosave.{policy}({name}={value!r}): a number of seconds above 0")
