"""Where the steps of a run lie in time, as positions from 0 to 1000. Pure.

An agent waits for hours and works for seconds. Drawn to scale, its work would be invisible: so a pause in which nothing
ran is drawn as a short gap that says how long it was, and everything else is to scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from perdure.inspector.values import lasted

WIDTH, GAP, GAPS_MAX = 1000.0, 40.0, 10
_LABEL = 260.0  # how wide a text is
_WAITS = ("ask", "sleep", "receive", "result")
Mark = tuple[str, float, float | None]
"""A step as its kind, when it began and when it ended, in seconds."""


class Timeline:
    """Positions of moments. `gaps` are the pauses that are drawn short; none with `to_scale`."""

    def __init__(self, marks: Sequence[Mark], end: float, *, to_scale: bool = False) -> None:
        self.start = min((begin for _, begin, _ in marks), default=end)
        self.end = max((until or begin for _, begin, until in marks), default=end)
        self.end = max(self.end, end, self.start + 1e-6)
        busy = [(self.start, self.start), *_merged(marks), (self.end, self.end)]
        between = [(a[1], b[0]) for a, b in pairwise(busy)]
        long = max(5.0, sum(b - a for a, b in busy) / 4)
        pauses = sorted((one for one in between if one[1] - one[0] > long), key=lambda one: one[0] - one[1])
        self.gaps = [] if to_scale else sorted(pauses[:GAPS_MAX])
        real = self.end - self.start - sum(b - a for a, b in self.gaps)
        self._scale = (WIDTH - GAP * len(self.gaps)) / max(real, 1e-6)

    def labels(self) -> list[tuple[float, str]]:
        """Return where the gaps are drawn and how long they were, from left to right; "" where texts would overlap."""
        placed = [(self.at(a), b - a) for a, b in self.gaps]
        named: list[float] = []
        for x, _ in sorted(placed, key=lambda one: -one[1]):
            if all(abs(x - other) >= _LABEL for other in named):
                named.append(x)
        return [(x, lasted(seconds) if x in named else "") for x, seconds in placed]

    def at(self, moment: float) -> float:
        """Return where a moment is drawn."""
        x = (moment - self.start) * self._scale
        for a, b in self.gaps:
            if moment <= a:
                break
            inside = min(moment, b) - a
            x += GAP * inside / (b - a) - inside * self._scale
        return round(min(max(x, 0.0), WIDTH), 2)

    def bar(self, begin: float, end: float | None) -> tuple[float, float]:
        """Return where a bar begins and how wide it is, in percent; one that has not ended lasts until now."""
        a, b = self.at(begin), self.at(self.end if end is None else end)
        return round(min(a / 10, 98.8), 2), round(max((b - a) / 10, 1.2), 2)


def _merged(marks: Iterable[Mark]) -> list[tuple[float, float]]:
    """Return the times in which something ran, without overlaps."""
    busy: list[tuple[float, float]] = []
    for a, b in sorted((begin, end or begin) for kind, begin, end in marks if kind not in _WAITS):
        if busy and a <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(b, busy[-1][1]))
        else:
            busy.append((a, b))
    return busy
