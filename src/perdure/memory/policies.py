"""What a namespace keeps: caps on items and bytes, age, expiry, history. Stored with it, and good for all below it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from perdure.errors import Damaged, UsageError

HISTORY_DAYS = 30.0
DAY_US = 86_400_000_000
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
        for name, value in said.items():
            whole = name in ("max_items", "max_bytes")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int if whole else int | float)):
                raise UsageError(f"policy({name}={value!r}): a number, or None for no limit")
            if value is not None and (value < 0 or (value == 0 and name != "history_days")):
                raise UsageError(f"policy({name}={value!r}): a number above 0, or None for no limit")
        return replace(self, **said)

    def expires(self, at: int, said: int | None, pinned: bool) -> int | None:
        """When an item that was put at a time expires. `said`: what the caller wants."""
        found = [] if said is None else [said]
        if said is None and self.ttl_s is not None:
            found.append(at + int(self.ttl_s * 1e6))
        if self.max_age_days is not None and not pinned:
            found.append(at + int(self.max_age_days * DAY_US))
        return min(found, default=None)

    def history_us(self) -> int | None:
        return None if self.history_days is None else int(self.history_days * DAY_US)


DEFAULT = MemoryPolicy()


def dump(policy: MemoryPolicy) -> str:
    return msgspec.json.encode(policy).decode()


def load(text: str) -> MemoryPolicy:
    """A policy as it is stored. Raises Damaged."""
    try:
        return msgspec.json.decode(text, type=MemoryPolicy)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Damaged(f"the policy of a namespace of memory is damaged ({error}): set it again") from error
