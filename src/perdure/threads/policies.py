"""When a state is worth a checkpoint: the policies of `thread.autosave`, as state machines without a clock.

A policy is what the user writes (`perdure.autosave.every(5)`): plain data that may be shared. `start` makes
the machine of one session. The session tells it what happens, with the time in seconds of whatever clock it has, and
asks it whether a save is due. No clock, no I/O and no thread is in here, so a simulation can put a machine through
years of work in a second (tests/ops/test_autosave_policies.py).

    every(n)             after n changes
    periodic(seconds)    at the first change when so much time has passed since the last save
    adaptive()           the same, but the time is computed: W = sqrt(2 C M), after Young and Daly

C is what a save costs (the time for which it stops the code), M the mean time between failures. C is measured, an
average in which old saves fade. M begins as a guess that counts like one failure, and every hour that passes and
every process that dies corrects it: M = (guess + time worked) / (1 + failures). What a session has learned goes with
its saves as `memory`, and the next process starts from there; how it finds out that the last one died is the session's
business (`autosave_session.py`). The first change of all, and the first one after a death, are saved at once: else a
process that dies early every time would never be counted, nor get anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Protocol

from perdure.errors import UsageError

Memory = dict[str, Any]
_FADE = 0.3  # how much the newest save counts in the average of what saves cost
_GUESS_WEIGHT = 1.0  # the first guess of M counts like so many failures
_COST_GUESS_S = 0.01  # of a save, until one was measured


class Machine(Protocol):
    """A policy at work in one session. Times are seconds of one clock that never goes back."""

    def due(self, now: float, changes: int) -> bool:
        """Whether to save now, with so many changes since the last save."""

    def due_at(self) -> float | None:
        """When a change that waits is due without another one; None: it is not a matter of time."""

    def saved(self, now: float, stall_s: float | None) -> None:
        """A save was taken, and stopped the code for so long; None: it turned out that there was nothing to save."""

    def memory(self, now: float) -> Memory | None:
        """What the next process should know; None: nothing."""


class Policy(Protocol):
    """When to save."""

    def start(self, now: float, memory: Mapping[str, Any] | None = None, *, died: bool = False) -> Machine:
        """A machine for a session that begins now, with what the last one left; `died`: it ended without an end."""


# --- every(n)


@dataclass(frozen=True, slots=True)
class Every:
    """After so many changes."""

    changes: int

    def start(self, now: float, memory: Mapping[str, Any] | None = None, *, died: bool = False) -> Machine:
        return _Counting(self.changes)


@dataclass(frozen=True, slots=True)
class _Counting:
    most: int

    def due(self, now: float, changes: int) -> bool:
        return changes >= self.most

    def due_at(self) -> float | None:
        return None

    def saved(self, now: float, stall_s: float | None) -> None:
        pass

    def memory(self, now: float) -> Memory | None:
        return None


# --- periodic(seconds)


@dataclass(frozen=True, slots=True)
class Periodic:
    """When so much time has passed since the last save."""

    seconds: float

    def start(self, now: float, memory: Mapping[str, Any] | None = None, *, died: bool = False) -> Machine:
        return _Waiting(self.seconds, now)


@dataclass(slots=True)
class _Waiting:
    wait_s: float
    since: float

    def due(self, now: float, changes: int) -> bool:
        return changes > 0 and now - self.since >= self.wait_s

    def due_at(self) -> float | None:
        return self.since + self.wait_s

    def saved(self, now: float, stall_s: float | None) -> None:
        self.since = now

    def memory(self, now: float) -> Memory | None:
        return None


# --- adaptive()


@dataclass(frozen=True, slots=True)
class Adaptive:
    """As often as the cost of a save and the observed failures make it worth while, within bounds."""

    min_s: float
    max_s: float
    overhead_max: float
    mtbf_s: float

    def start(self, now: float, memory: Mapping[str, Any] | None = None, *, died: bool = False) -> Machine:
        known = memory or {}
        return Learning(
            self,
            began=now,
            since=now,
            uptime_s=_number(known.get("uptime_s"), 0.0),
            failures=int(_number(known.get("failures"), 0.0)) + died,
            cost_s=_number(known.get("cost_s"), -1.0),
            is_first=died or not known,
        )


@dataclass(slots=True)
class Learning:
    """`adaptive()` at work."""

    policy: Adaptive
    began: float
    since: float
    uptime_s: float  # of the sessions before this one
    failures: int
    cost_s: float  # of a save; below 0: none was measured yet
    is_first: (
        bool  # the next save is the first that tells of this session; else a process that dies early is not counted
    )
    changes: int = 0
    changed_at: float | None = None
    gap_s: float = 0.0  # the mean time between two changes, and of its square
    gap_squared: float = 0.0

    def mtbf_s(self, now: float) -> float:
        """The mean time between failures, as far as is known."""
        worked = self.uptime_s + now - self.began
        return (_GUESS_WEIGHT * self.policy.mtbf_s + worked) / (_GUESS_WEIGHT + self.failures)

    def interval_s(self, now: float) -> float:
        """How much work to do between two saves."""
        cost_s = self.cost_s if self.cost_s >= 0 else _COST_GUESS_S
        best = max(sqrt(2 * cost_s * self.mtbf_s(now)), cost_s / self.policy.overhead_max)
        # max_s comes last: it is a promise about what a crash can cost.
        return min(max(best, self.policy.min_s), self.policy.max_s)

    def due(self, now: float, changes: int) -> bool:
        if changes != self.changes:
            self._note_gap(now, changes)
        if self.is_first:
            return changes > 0
        # The next chance is the next change: if that will overshoot by more than this one falls short, it is now.
        return changes > 0 and now - self.since >= max(self.interval_s(now) - self._overshoot_s(), self.policy.min_s)

    def _note_gap(self, now: float, changes: int) -> None:
        gap_s = now - (self.since if self.changed_at is None else max(self.changed_at, self.since))
        if self.changed_at is None:
            self.gap_s, self.gap_squared = gap_s, gap_s * gap_s
        self.gap_s += _FADE * (gap_s - self.gap_s)
        self.gap_squared += _FADE * (gap_s * gap_s - self.gap_squared)
        self.changes, self.changed_at = changes, now

    def _overshoot_s(self) -> float:
        """How long after an arbitrary moment the next change comes, on average. Long gaps are met more often."""
        return self.gap_squared / (2 * self.gap_s) if self.gap_s > 0 else 0.0

    def due_at(self) -> float | None:
        return self.since + self.interval_s(self.since)

    def saved(self, now: float, stall_s: float | None) -> None:
        self.since, self.changes, self.is_first = now, 0, False
        if stall_s is not None:
            stall_s = max(0.0, stall_s)
            self.cost_s = stall_s if self.cost_s < 0 else self.cost_s + _FADE * (stall_s - self.cost_s)

    def memory(self, now: float) -> Memory | None:
        known: Memory = {"uptime_s": round(self.uptime_s + now - self.began, 3), "failures": self.failures}
        if self.cost_s >= 0:
            known["cost_s"] = round(self.cost_s, 6)
        return known


def _number(value: object, otherwise: float) -> float:
    """A number from stored metadata, which anybody may have written."""
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0:
        return float(value)
    return otherwise


# --- what the user calls


class _Policies:
    """`perdure.autosave`: the policies by name."""

    @staticmethod
    def every(n: int) -> Every:
        """Save after every `n` changes."""
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise UsageError(f"autosave.every({n!r}): a count of changes, 1 or more")
        return Every(n)

    @staticmethod
    def periodic(seconds: float) -> Periodic:
        """Save at the first change when so many seconds have passed since the last save."""
        return Periodic(_seconds(seconds, "autosave.periodic(seconds)"))

    @staticmethod
    def adaptive(
        *, min_s: float = 1.0, max_s: float = 300.0, overhead_max: float = 0.05, mtbf_s: float = 3600.0
    ) -> Adaptive:
        """Save as often as is worth while: it measures what a save costs and counts the processes that died.

        Never more often than every `min_s` seconds, and not so often that saving takes more than `overhead_max` of the
        time; but at least every `max_s`. `mtbf_s` is the first guess of how long a process lives.
        """
        shortest, longest = _seconds(min_s, "adaptive(min_s)", zero=True), _seconds(max_s, "adaptive(max_s)")
        if shortest > longest:
            raise UsageError(f"autosave.adaptive(min_s={min_s!r}, max_s={max_s!r}): min_s is at most max_s")
        if not isinstance(overhead_max, int | float) or not 0 < overhead_max <= 1:
            raise UsageError(
                f"autosave.adaptive(overhead_max={overhead_max!r}): a share of the time, above 0, at most 1"
            )
        return Adaptive(shortest, longest, float(overhead_max), _seconds(mtbf_s, "adaptive(mtbf_s)"))

    def __repr__(self) -> str:
        return "perdure.autosave: every(n), periodic(seconds), adaptive()"


def _seconds(value: object, what: str, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UsageError(f"{what}: a number of seconds, not {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise UsageError(f"{what}: {value!r} seconds is not above 0")
    return float(value)


autosave = _Policies()
