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


@dataclass(frozen=True)
class Retry:
    """The rule of one step or effect.

    `retry_on` and `give_up_on` are exception classes, or a function of the error that says yes or no; `give_up_on`
    wins. With `jitter` it waits between half of the time and all of it.
    """

    retries: int = 0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    jitter: bool = True
    retry_on: Which = (Exception,)
    give_up_on: Which = ()

    def __post_init__(self) -> None:
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise UsageError(f"retries={self.retries!r} must be a whole number from 0 on: how often to try again")
        _check_seconds("backoff_s", self.backoff_s)
        _check_seconds("backoff_max_s", self.backoff_max_s)
        if self.backoff_s > self.backoff_max_s:
            raise UsageError(
                f"backoff_s={self.backoff_s:g} is above backoff_max_s={self.backoff_max_s:g}; raise backoff_max_s too"
            )
        object.__setattr__(self, "retry_on", _which("retry_on", self.retry_on))
        object.__setattr__(self, "give_up_on", _which("give_up_on", self.give_up_on))

    def delay_s(self, attempt: int, chance: float) -> float:
        """How long to wait after this attempt failed; it doubles each time. `chance` is from 0 to 1."""
        # The bound on the exponent only keeps the power finite.
        full = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(max(attempt, 1) - 1, 1000))
        return full * (1 + chance) / 2 if self.jitter else full

    def wants(self, error: BaseException, attempt: int) -> bool:
        """Whether to try again after this attempt failed with this error."""
        if attempt > self.retries or not isinstance(error, Exception):
            return False
        return _matches(error, self.retry_on) and not _matches(error, self.give_up_on)


def _matches(error: Exception, which: Which) -> bool:
    return isinstance(error, which) if isinstance(which, tuple) else bool(which(error))


def _check_seconds(name: str, value: Any) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0:
        raise UsageError(f"{name}={value!r} must be a number of seconds from 0 on")


def _which(name: str, value: Any) -> Which:
    """Classes as a tuple, or a function. A class alone is meant as a class, though it can be called as well."""
    classes = (value,) if isinstance(value, type) else value
    if isinstance(classes, tuple | list):
        for kind in classes:
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                raise UsageError(
                    f"{name} names {kind!r}, which is no kind of Exception; name exception classes, "
                    f"for example {name}=(ConnectionError, TimeoutError). Interrupts and cancellations are not retried"
                )
        return tuple(classes)
    if inspect.iscoroutinefunction(value):
        raise UsageError(f"{name}={value!r} is async; give a plain function of the error")
    if callable(value):
        function: Callable[[Exception], bool] = value
        return function
    raise UsageError(
        f"{name}={value!r} must be exception classes or a function of the error, "
        f"for example {name}=(ConnectionError, TimeoutError)"
    )
