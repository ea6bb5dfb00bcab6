"""When a failed body is tried again, and how long to wait before. Pure: chance is passed in.

Attempts count from 1. Only errors are retried: an interrupt, an exit or a cancellation is requested,
not a failure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure.errors import UsageError

Which = tuple[type[Exception], ...] | Callable[[Exception], bool]
_BACKOFF_MAX_S = 60.0  # unless the first wait is longer


@dataclass(frozen=True)
class Retry:
    """The rule of one step or effect. `retry_on`: exception classes, or a function of the error that says yes or no."""

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
        """How long to wait after this attempt failed: it doubles each time, up to a minute. By `chance`, from 0 to 1,
        it is between half of that and all of it, so that many runs that fail together do not come back together."""
        # The bound on the exponent only keeps the power finite.
        full = min(max(_BACKOFF_MAX_S, self.backoff_s), self.backoff_s * 2.0 ** min(max(attempt, 1) - 1, 1000))
        return full * (1 + chance) / 2

    def wants(self, error: BaseException, attempt: int) -> bool:
        """Whether to try again after this attempt failed with this error."""
        if attempt > self.retries or not isinstance(error, Exception):
            return False
        return isinstance(error, self.retry_on) if isinstance(self.retry_on, tuple) else bool(self.retry_on(error))


def _which(value: Any) -> Which:
    """Classes as a tuple, or a function. A class alone is meant as a class, though it can be called as well."""
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
