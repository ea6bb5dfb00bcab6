"""What a namespace keeps: caps on items and bytes, age, expiry, history. Stored with it, and good for all below it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from perdure.errors import Damaged, UsageError
from perdure.values.registry import register

HISTORY_DAYS = 30.0
DAYS_MAX = 36_600.0  # a hundred years
SECONDS_MAX = DAYS_MAX * 86_400
DAY_US = 86_400_000_000
COUNT_MAX = 2**62
N = TypeVar("N", int, float)
KEEP: Any = object()  # stands for "as it is"


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The caps of each namespace at or below the one it was set for, unless one between has its own. None: no limit.

    `max_items` and `max_bytes` count what is not pinned: if a put exceeds them, the oldest items go. After
    `max_age_days` an item that is not pinned expires, after `ttl_s` one that was put without a `ttl_s` of its own.
    Versions that were replaced or deleted are kept for `history_days`.
    """

    max_items: int | None = None
    max_bytes: int | None = None
    max_age_days: float | None = None
    ttl_s: float | None = None
    history_days: float | None = HISTORY_DAYS

    def changed(self, said: dict[str, Any]) -> MemoryPolicy:
        """The policy with what a caller says. Raises UsageError."""
        checked = {name: value for name, value in said.items() if value is None or (name, value) == ("history_days", 0)}
        for name in said.keys() - checked.keys():
            checked[name] = check_number(f"policy({name}=…)", said[name], _MOST[name])
        return replace(self, **checked)

    def expires(self, at: int, said: int | None, pinned: bool) -> int | None:
        """When an item that was put at a time expires. `said`: what the caller wants."""
        found = [] if said is None else [said]
        if said is None and self.ttl_s is not None:
            found.append(at + int(self.ttl_s * 1e6))
        if self.max_age_days is not None and not pinned:
            found.append(at + int(self.max_age_days * DAY_US))
        return min(found, default=None)

    def is_aged(self, at: int, expires: int | None) -> bool:
        """Whether an item that was put at a time expires by its age, not by what its caller said."""
        return self.max_age_days is not None and expires == at + int(self.max_age_days * DAY_US)

    def history_us(self) -> int | None:
        return None if self.history_days is None else int(self.history_days * DAY_US)


register(MemoryPolicy, name="perdure.memory.MemoryPolicy")  # a durable function may return it
DEFAULT = MemoryPolicy()
_MOST = {
    "max_items": COUNT_MAX,
    "max_bytes": COUNT_MAX,
    "ttl_s": SECONDS_MAX,
    "max_age_days": DAYS_MAX,
    "history_days": DAYS_MAX,
}


def check_number(what: str, value: Any, most: N = COUNT_MAX) -> N:
    """A number above 0, whole if `most` is. Raises UsageError."""
    kind = type(most)
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value <= most:
        raise UsageError(f"{what} wants a number above 0 and up to {most:,}, not {value!r}")
    return kind(value)


def dump(policy: MemoryPolicy) -> str:
    return msgspec.json.encode(policy).decode()


def load(text: str) -> MemoryPolicy:
    """A policy as it is stored. Raises Damaged."""
    try:
        return msgspec.json.decode(text, type=MemoryPolicy)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Damaged(f"the policy of a namespace of memory is damaged ({error}): set it again") from error
