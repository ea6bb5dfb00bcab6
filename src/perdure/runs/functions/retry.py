"""Retry rules: whether to run a failed body again, and after which delay. Pure: random numbers are passed in.

Attempts count from 1. Only an Exception is retried. Interrupts, exits and cancellations are requests, not failures.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure.errors import UsageError

Which = tuple[type[Exception], ...] | Callable[[Exception], bool]
_BACKOFF_MAX_S = 60.0  # the longest delay, unless backoff_s is longer


@dataclass(frozen=True)
class Retry:
    """The retry rule of a step or effect. `retry_on` is exception classes, or a function from the error to a bool."""

    retries: int = 0
    backoff_s: float = 1.0
    retry_on: Which = (Exception,)

    def __post_init__(self) -> None:
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise UsageError(f"retries={self.retries!r} must be a whole number from 0 on: how often to try again")
        good = isinstance(self.backoff_s, int | float) and not isinstance(self.backoff_s, bool)
        if not good or not math.isfinite(self.backoff_s) or self.backoff_s < 0:
            raise UsageError(f"backoff_s={self.backoff_s!r} must be a number of seconds from 0 on")
        object.__setattr__(self, "retry_on", _which(self.retry_on))

    def delay_s(self, attempt: int, chance: float) -> float:
        """Return the seconds to wait after this attempt failed.

        The delay doubles each time, up to a minute. `chance` (0 to 1) scales it between half and full, because runs
        that fail together must not all retry together."""
        # The bound on the exponent only keeps the power finite.
        full = min(max(_BACKOFF_MAX_S, self.backoff_s), self.backoff_s * 2.0 ** min(max(attempt, 1) - 1, 1000))
        return full * (1 + chance) / 2

    def wants(self, error: BaseException, attempt: int) -> bool:
        """Return whether to retry after this attempt failed with this error."""
        if attempt > self.retries or not isinstance(error, Exception):
            return False
        return isinstance(error, self.retry_on) if isinstance(self.retry_on, tuple) else bool(self.retry_on(error))


def _which(value: Any) -> Which:
    """Check `retry_on`, and return classes as a tuple or the function. A class is not taken for a function."""
    classes = (value,) if isinstance(value, type) else value
    if isinstance(classes, tuple | list):
        for kind in classes:
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                raise UsageError(
                    f"retry_on names {kind!r}, which is no kind of Exception; name exception classes, "
                    "for example retry_on=(ConnectionError, TimeoutError). Interrupts and cancellations are not retried"
                )
        return tuple(classes)
    if inspect.iscoroutinefunction(value):
        raise UsageError(f"retry_on={value!r} is async; give a plain function of the error")
    if callable(value):
        function: Callable[[Exception], bool] = value
        return function
    raise UsageError(
        f"retry_on={value!r} must be exception classes or a function of the error, "
        "for example retry_on=(ConnectionError, TimeoutError)"
    )
