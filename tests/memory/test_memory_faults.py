"""A fault at each statement of each write of memory: all of it happened, or none; and trying again works."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import perdure
from perdure import Store
from perdure.errors import OutcomeUnknown
from perdure.memory.handle import Memory

_copies = itertools.count()


class Fault(Exception):
    """What the hook raises."""


class Hook:
    """Counts the points it is called at, and raises at one of them."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.strike_at = 0

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.strike_at:
            raise Fault("injected")


WRITES: dict[str, Callable[[Memory], Any]] = {
    "put": lambda memory: memory.put("new", {"fact": "hiking"}),
    "overwrite": lambda memory: memory.put("a", {"fact": "hiking"}, expect=1),
    "supersede": lambda memory: memory.put("b2", {"fact": "hiking"}, supersedes="b"),
    "put_many": lambda memory: memory.put_many({"x": 1, "y": 2, "a": 3}),
    "delete": lambda memory: memory.delete("a"),
    "update": lambda memory: memory.update("a", lambda value: [value, 1]),
    "capped": lambda memory: memory.policy(max_items=1) and memory.put("c", 1, expect=0),
}


def dump(memory: Memory) -> list[Any]:
    return [
        [(one.version, one.value, one.gone, one.valid_to is None) for one in memory.history(key)]
        for key in ("a", "b", "b2", "c", "new", "x", "y")
    ] + [sorted(item.key for item in memory.search("hiking"))]


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize("name", WRITES)
def test_all_of_it_happened_or_none(url: str, name: str) -> None:
    hook, write = Hook(), WRITES[name]
    with (
        perdure.open(url, durability="normal") as plain,
        perdure.open(url, durability="normal", hook=hook) as struck,
    ):
        fresh, armed = _copy(plain, struck)
        before = dump(fresh)
        hook.points, hook.strike_at = [], 0
        write(armed)
        count, after = len(hook.points), dump(fresh)
        assert count > 3
        assert before != after
        for strike_at in range(1, count + 1):
            fresh, armed = _copy(plain, struck)
            hook.points, hook.strike_at = [], strike_at
            try:
                write(armed)
            except (Fault, OutcomeUnknown):
                pass
            hook.strike_at = 0
            found = dump(fresh)
            if name != "capped":  # which is two transactions
                assert found in (before, after), strike_at
            if found != after:
                write(armed)
                assert dump(fresh) == after, strike_at
        assert plain.ops.verify().ok


def _copy(plain: Store, struck: Store) -> tuple[Memory, Memory]:
    labels = ("copy", str(next(_copies)))
    plain.memory(*labels).put_many({"a": {"fact": "hiking once"}, "b": {"fact": "lives in Rome"}})
    struck.memory(*labels).get("a")
    return plain.memory(*labels), struck.memory(*labels)
