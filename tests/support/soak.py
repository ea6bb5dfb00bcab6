"""PERDURE_SOAK=1, as `make soak` sets it: everything that `make test` runs a sample of is run in full.

A sample is always the same, and has each kind of what it is taken from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
SOAK = bool(os.environ.get("PERDURE_SOAK"))


def spread(values: Sequence[T], most: int) -> list[T]:
    """So many of them, from the first to the last at even distances."""
    if SOAK or len(values) <= most:
        return list(values)
    return [values[number * (len(values) - 1) // (most - 1)] for number in range(most)]


def of_each_kind(kinds: Sequence[str]) -> list[int]:
    """The numbers, from 1 on, of the first and the last point of each kind, and of the one in the middle of all."""
    numbers = range(1, len(kinds) + 1)
    if SOAK:
        return list(numbers)
    first = {kind: number for number, kind in zip(reversed(numbers), reversed(kinds), strict=True)}
    last = {kind: number for number, kind in zip(numbers, kinds, strict=True)}
    return sorted({*first.values(), *last.values(), (len(kinds) + 1) // 2})
