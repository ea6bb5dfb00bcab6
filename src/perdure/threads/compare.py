"""Compare two states, path by path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.threads.models import Change

DEPTH_MAX = 200


def compare(before: Any, after: Any) -> list[Change]:
    """Return what was added, removed and changed from one value to the other, path by path, in the values' order.

    Dicts and lists are compared inside; what is inserted into the middle of a list is one addition. Any other two
    values are the same if they have the same class and are equal."""
    return list(_compare(before, after, ()))


def _compare(before: Any, after: Any, path: tuple[Any, ...]) -> Iterator[Change]:
    if type(before) is type(after) and len(path) < DEPTH_MAX:
        if isinstance(before, dict):
            yield from _compare_mappings(before, after, path)
            return
        if isinstance(before, list | tuple):
            yield from _compare_sequences(before, after, path)
            return
    if not _same(before, after):
        yield Change(path, "changed", before, after)


def _compare_mappings(before: dict[Any, Any], after: dict[Any, Any], path: tuple[Any, ...]) -> Iterator[Change]:
    for key, value in before.items():
        if key in after:
            yield from _compare(value, after[key], (*path, key))
        else:
            yield Change((*path, key), "removed", before=value)
    for key, value in after.items():
        if key not in before:
            yield Change((*path, key), "added", after=value)


def _compare_sequences(before: Any, after: Any, path: tuple[Any, ...]) -> Iterator[Change]:
    """Skip equal beginnings and ends, so that an insertion in the middle is one addition and not many changes."""
    head = 0
    shorter = min(len(before), len(after))
    while head < shorter and _same(before[head], after[head]):
        head += 1
    tail = 0
    while tail < shorter - head and _same(before[-1 - tail], after[-1 - tail]):
        tail += 1
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    for position in range(max(len(old), len(new))):
        where = (*path, head + position)
        if position >= len(new):
            yield Change(where, "removed", before=old[position])
        elif position >= len(old):
            yield Change(where, "added", after=new[position])
        else:
            yield from _compare(old[position], new[position], where)


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    try:
        return bool(before == after)
    except Exception:  # == of arrays returns an array; other classes may refuse to compare
        comparable = getattr(before, "tobytes", None)
        if comparable is None:
            return False
        return bool(comparable() == after.tobytes() and before.shape == after.shape and before.dtype == after.dtype)
