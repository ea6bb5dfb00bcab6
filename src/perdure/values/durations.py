"""Durations as people write them: "45s", "30m", "12h", "30d", "8w", or a timedelta. Never a bare number."""

from __future__ import annotations

import re
from datetime import timedelta

from perdure.errors import UsageError

Duration = timedelta | str
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MOST = timedelta(days=36_600)  # a hundred years: longer ones are a mistake, and exceed what a column holds


def parse_duration(text: str) -> timedelta | None:
    """Read a duration such as "12h". None if the text is not one."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([smhdw])", text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else MOST.total_seconds() + 1
    return timedelta(seconds=seconds) if seconds <= MOST.total_seconds() else None


def check_duration(value: object, option: str, *, zero: bool = False) -> timedelta:
    """Return a duration that a caller passed. Raises UsageError if it is not one; 0 is one only with `zero`."""
    span = parse_duration(value) if isinstance(value, str) else value
    if not isinstance(span, timedelta) or not timedelta(0) <= span <= MOST or not (span or zero):
        raise UsageError(f'{option}={value!r}: a duration such as "12h" or "30d", or a timedelta; None is for ever')
    return span


def show_duration(value: timedelta) -> str:
    """Write a duration in the largest unit that divides it: "30d"."""
    for unit in ("d", "h", "m"):
        if value and not value % timedelta(seconds=_SECONDS[unit]):
            return f"{value // timedelta(seconds=_SECONDS[unit])}{unit}"
    return f"{value.total_seconds():g}s"
