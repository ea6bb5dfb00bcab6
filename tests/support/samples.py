"""Values of every type that the codec knows, and the strictest equality: types, order, nan and all.

`every_type()` makes a fresh state each time, so that a test may change one and compare with another.
"""

from __future__ import annotations

import enum
import importlib.util
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec

from perdure.values.registry import register


@register("perdure.samples.Mood")
class Mood(enum.Enum):
    CALM = "calm"
    EAGER = "eager"


@register("perdure.samples.Plan")
@dataclass
class Plan:
    goal: str
    steps: list[str] = field(default_factory=list)
    mood: Mood = Mood.CALM


@register("perdure.samples.Spot")
class Spot(NamedTuple):
    x: float
    y: float


@register("perdure.samples.Tool")
class Tool(msgspec.Struct):
    name: str
    cost: Decimal


def every_type() -> dict[str, Any]:
    """A state with a value of every type, nested where it can be."""
    state: dict[str, Any] = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**53 + 1, -(2**200)],
        "floats": [0.5, -0.0, 1e300, math.inf, -math.inf, math.nan],
        "text": ["", "plain", 'quotes " \\ and \n controls \x00\x1f', "汉字 עברית 👩‍👩‍👧", "\ud800 lone", "^tag"],
        "bytes": [b"", bytes(range(256))],
        "tuple": (1, (2, [3, (4,)]), ()),
        "sets": [set(), {1, 2, 3}, frozenset({"a", ("b", 1)})],
        "keys": {1: "int", (2, 3): "tuple", None: "none", False: "bool", "1": "text", 2.5: "float", b"k": "bytes"},
        "order": {"z": 1, "a": 2, "m": 3},
        "tagged": {"^tuple": [1], "^": {"^^": 2}},
        "times": [
            datetime(2024, 2, 29, 12, 30, 15, 123456),
            datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
            datetime(1999, 12, 31, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
            date(2000, 1, 1),
            time(23, 59, 59, 999999),
            timedelta(days=-3, microseconds=7),
        ],
        "decimal": [Decimal("0.10"), Decimal("-1E+50")],
        "uuid": uuid.UUID("12345678-1234-5678-1234-567812345678"),
        "path": PurePosixPath("/tmp/some/where"),
        "plan": Plan("travel", ["pack", "go"], Mood.EAGER),
        "spot": Spot(1.5, -2.5),
        "tool": Tool("search", Decimal("0.02")),
        "empty": {"dict": {}, "list": [], "deep": {"er": {"est": {}}}},
    }
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        state["array"] = numpy.arange(24, dtype="<f4").reshape(2, 3, 4)
        state["scalar"] = numpy.int16(-7)
    return state


def same(one: Any, other: Any) -> bool:
    """Equal in value, type and order, all the way down; nan equals nan, -0.0 does not equal 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    if hasattr(one, "dtype"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return bool(one == other)
