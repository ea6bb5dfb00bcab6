"""Policies of namespaces: caps on items and bytes, age, expiry, history.

A policy is stored with its namespace and holds for all below it. Namespaces without a policy follow the store's
retention (log/retention.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from perdure.errors import Damaged, UsageError
from perdure.log.retention import Retention, read_policy
from perdure.storage.program import Program
from perdure.values.durations import check_duration
from perdure.values.registry import register

SECONDS_MAX = 36_600.0 * 86_400  # a hundred years
COUNT_MAX = 2**62
N = TypeVar("N", int, float)
KEEP: Any = object()  # default of a cap that is not passed: it stays as it is


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The caps of a namespace, and of each below it, down to those with a policy of their own. None means no limit.

    `max_items` and `max_bytes` count what is not pinned: if a put exceeds them, the oldest items are removed. An item
    that is not pinned expires after `max_age`. An item that was put without a `ttl_s` expires after `ttl`. Versions
    that were replaced or deleted are kept for `history`.
    """

    max_items: int | None = None
    max_bytes: int | None = None
    max_age: timedelta | None = None
    ttl: timedelta | None = None
    history: timedelta | None = timedelta(days=30)

    def changed(self, said: dict[str, Any]) -> MemoryPolicy:
        """Return the policy with the caps in `said` changed. Raises UsageError."""
        return replace(self, **{name: None if value is None else _check(name, value) for name, value in said.items()})

    def expires(self, at: int, said: int | None, pinned: bool) -> int | None:
        """Return when an item that is put at `at` expires, or None. `said` is the time that the caller asked for."""
        times = [] if said is None else [said]
        if said is None and self.ttl is not None:
            times.append(at + in_us(self.ttl))
        if self.max_age is not None and not pinned:
            times.append(at + in_us(self.max_age))
        return min(times, default=None)

    def is_aged(self, at: int, expires: int | None) -> bool:
        """Return whether `max_age`, and not the caller, set the expiry of an item that was put at `at`."""
        return self.max_age is not None and expires == at + in_us(self.max_age)


register(MemoryPolicy, name="perdure.memory.MemoryPolicy")  # a durable function may return it
DEFAULT = MemoryPolicy()


def store_policy(tenant: int) -> Program[MemoryPolicy]:
    """Return the policy of namespaces without their own, from the store's retention."""
    rules = Retention.of((yield from read_policy(tenant)))
    return MemoryPolicy(max_age=rules.memory, history=rules.memory_history)


def in_us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)


def _check(name: str, value: Any) -> Any:
    if name in ("max_items", "max_bytes"):
        return check_number(f"policy({name}=…)", value)
    return check_duration(value, name, zero=name == "history")


def check_number(subject: str, value: Any, most: N = COUNT_MAX) -> N:
    """Return a number above 0 and at most `most`, whole if `most` is an int. Raises UsageError."""
    kind = type(most)
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value <= most:
        raise UsageError(f"{subject} wants a number above 0 and up to {most:,}, not {value!r}")
    return kind(value)


def dump(policy: MemoryPolicy) -> str:
    return msgspec.json.encode(policy).decode()


def load(text: str) -> MemoryPolicy:
    """Return a policy from its stored text. Raises Damaged."""
    try:
        return msgspec.json.decode(text, type=MemoryPolicy)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Damaged(f"the policy of a namespace of memory is damaged ({error}): set it again") from error
