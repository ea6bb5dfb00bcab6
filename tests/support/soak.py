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
    """The numbers, from 1 on, of the last point of each kind ("statement:3" is a statement), of the first of all and
    of the one in the middle."""
    numbers = range(1, len(kinds) + 1)
    if SOAK:
        return list(numbers)
    last = {kind.partition(":")[0]: number for number, kind in zip(numbers, kinds, strict=True)}
    return sorted({*last.values(), *numbers[:1], *numbers[len(kinds) // 2 : len(kinds) // 2 + 1]})


def examples(most: int) -> int:
    """How many examples a property is tried with."""
    return most if SOAK else max(most // 5, 20)
