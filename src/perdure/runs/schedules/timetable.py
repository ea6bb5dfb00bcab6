"""The instants of a schedule: computed from its cron expression and time zone, or from its interval. No I/O here.

Instants are microseconds since 1970 and fall on whole seconds. A local time that daylight saving skips happens right
after the gap, and one that it repeats happens once, unless the expression has a wildcard for the hour (cronsim follows
Debian's cron).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo

from perdure.errors import UsageError
from perdure.runs.journal.rows import NEVER
from perdure.values.durations import check_duration
from perdure.values.safe_repr import shown

_US = 1_000_000
_DAY_US = 86_400 * _US
CAUGHT_UP_MAX = 100  # more missed instants than this are not started
_WALKED_MAX = 2_000  # a day has fewer: a cron expression has at most one instant a minute
_GRACE_US = 60 * _US  # an instant that is fired within this time was not missed


class Timetable(NamedTuple):
    """When a schedule is due: by a cron expression in a time zone, or every so many microseconds since 1970."""

    cron: str | None
    every_us: int | None
    timezone: str = "UTC"

    def after(self, at: int) -> int:
        """Return the first instant after `at`, or NEVER."""
        return next(self.instants(at), NEVER)

    def instants(self, after: int) -> Iterator[int]:
        """Yield the instants after a time, in order. Raises UsageError if this machine cannot read the timetable."""
        if self.every_us is not None:
            at = (after // self.every_us + 1) * self.every_us
            while at < NEVER:
                yield at
                at += self.every_us
            return
        from cronsim import CronSim, CronSimError

        start = datetime.fromtimestamp(after // _US, UTC).astimezone(zone_of(self.timezone))
        try:
            instants = CronSim(self.cron or "", start)
        except CronSimError as error:
            raise UsageError(f"{self.cron!r} is no cron expression: {error}; minute hour day month weekday") from error
        for instant in instants:  # it ends if there is none within 50 years
            yield int(instant.timestamp()) * _US

    def between(self, first: int, until: int, most: int) -> list[int]:
        """Return the instants from `first` on and before `until`, at most `most`."""
        return list(islice(takewhile(lambda at: at < until, self.instants(first - 1)), most))


class Due(NamedTuple):
    """The instants of a schedule that are to be started, and its new position."""

    instants: list[int]
    skipped: int  # instants that are not started; if very many were missed, not all of them are counted
    last_at: int
    next_at: int


def due(timetable: Timetable, next_at: int, now: int, catch_up: str) -> Due:
    """Choose the instants to start, of those from `next_at` up to now."""
    passed = timetable.between(next_at, now + 1, _WALKED_MAX)
    if len(passed) == _WALKED_MAX:
        recent = now - (timetable.every_us * CAUGHT_UP_MAX if timetable.every_us is not None else _DAY_US)
        passed += timetable.between(max(passed[-1] + 1, recent), now + 1, _WALKED_MAX)
    if not passed:  # its position was changed meanwhile
        return Due([], 0, next_at, timetable.after(now))
    if catch_up == "none":
        chosen = [at for at in passed[-1:] if now - at <= _GRACE_US]
    else:
        chosen = passed[-1:] if catch_up == "last" else passed[-CAUGHT_UP_MAX:]
    return Due(chosen, len(passed) - len(chosen), passed[-1], timetable.after(passed[-1]))


def check_timetable(cron: str | None, every: str | timedelta | None, timezone: str) -> Timetable:
    """Return the timetable that a caller describes. Raises UsageError."""
    if (cron is None) == (every is None):
        raise UsageError('schedule(…): give either a cron expression, "0 7 * * MON-FRI", or every="15m"')
    if every is not None:
        if timezone != "UTC":
            raise UsageError(f"schedule(every={every!r}): an interval has no timezone; a cron expression has")
        every_us = check_duration(every, "every") // timedelta(microseconds=1)
        if every_us < _US or every_us % _US:
            raise UsageError(f'schedule(every={every!r}): whole seconds, at least "1s"')
        return Timetable(None, every_us)
    if not isinstance(cron, str) or len(cron.split()) != 5:
        raise UsageError(
            f"schedule(…, {cron!r}): a cron expression has five fields, minute hour day month weekday; seconds are "
            'not among them: every="10s"'
        )
    table = Timetable(" ".join(cron.split()), None, timezone)
    table.after(0)
    return table


def zone_of(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise UsageError(
            f'timezone={shown(name)}: not a time zone that this machine knows; write one such as "Europe/Lisbon"'
        ) from None
