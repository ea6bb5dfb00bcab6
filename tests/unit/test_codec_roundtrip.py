"""What was saved comes back: equal, of the same type, at every level."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr, RootModel, field_validator
from soak import examples

from perdure.errors import Unstorable
from perdure.values.codec import Codec, decode, encode
from perdure.values.plain import is_plain_dict
from perdure.values.registry import register

CODEC = Codec()


def again(value: Any) -> Any:
    text = encode(value, CODEC)
    json.loads(text)  # any JSON parser reads it
    return decode(text, CODEC)


def same(left: Any, right: Any) -> bool:
    """Equality that tells types, nan, -0.0 and the order of dicts apart."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (set, frozenset)):
        return same(sorted(map(repr, left)), sorted(map(repr, right)))
    return bool(left == right)


@register
class Color(Enum):
    RED = "r"
    ROUGE = "r"  # noqa: PIE796
    GREEN = (1, 2)


@register
class Level(IntEnum):
    LOW = 1


@register
class Word(StrEnum):
    YES = "yes"


@register
class Right(Flag):
    READ = 1
    WRITE = 2


@register
@dataclass
class Base:
    title: str
    steps: list[Any] = field(default_factory=list)


@register
@dataclass
class Plan(Base):
    seed: InitVar[int] = 3
    derived: int = field(init=False)

    def __post_init__(self, seed: int) -> None:
        self.derived = seed * 2


@register
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float = 0.5


class Pair(NamedTuple):
    left: Any
    right: int = 7


register(Pair)


@register
class Job(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parts: list[Any] = msgspec.field(default_factory=list)
    limit: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.name == "never valid again":
            raise ValueError("__post_init__ ran")


@register
class Model(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    when: datetime | None = None
    tags: tuple[str, ...] = ()
    _cache: int = PrivateAttr(default=5)

    @field_validator("name")
    @classmethod
    def check(cls, value: str) -> str:
        if value == "invalid":
            raise ValueError("a validator ran")
        return value + "!"


Loose: Any = Model  # takes extra values, which a type checker does not know


@register
class Names(RootModel[list[str]]):
    pass


BUILTINS: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**5000,
    -(10**5000),
    0.1,
    -0.0,
    5e-324,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0],
    "",
    "é ☃ 𝄞",
    "\x00\x1f\u2028",
    "\ud800",
    "a\\ud800\udfff\\",
    "^tuple",
    '{"^tuple":[1]}',
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    {},
    (),
    set(),
    frozenset(),
    [[]],
    {"a": {}},
    ((),),
    [()],
    {1: "a", "1": "b", None: 0, (1, 2): []},
    {"^tuple": [1]},
    {"^a": 1, "b": 2},
    {"\ud800": 1},
    {"z": 1, "a": 2},
    {True: 1, 2.5: 2, b"x": 3, frozenset({1}): 4},
    {1, "a", None, (1, 2)},
    frozenset({1.5, b"x"}),
    {"deep": [{"list": [1, (2, {"x": {3}})]}]},
    datetime(2024, 2, 29, 12, 30, 1, 5),
    datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=61, microseconds=3), "odd")),
    datetime(2024, 10, 27, 2, 30, fold=1),
    datetime(1, 1, 1),
    datetime.max,
    date(2024, 1, 2),
    date.min,
    time(1, 2, 3, 4),
    time(23, 59, tzinfo=UTC, fold=1),
    timedelta(-1, 5, 7),
    timedelta.max,
    UTC,
    timezone(timedelta(hours=2)),
    timezone(timedelta(0), "zero"),
    Decimal("1.10"),
    Decimal("-0"),
    Decimal("Infinity"),
    Decimal("1E+9999"),
    Decimal("0." + "3" * 200),
    UUID(int=7),
    Path("/a/b c"),
    Path("."),
    PurePosixPath("/x/\udc80"),
    PureWindowsPath("C:\\x"),
    OrderedDict([("b", 1), ("a", (2,))]),
    Color.RED,
    Color.GREEN,
    Level.LOW,
    Word.YES,
    Right.READ,
    Right.READ | Right.WRITE,
    Right(0),
    Base("t", [(1,)]),
    Plan("t", seed=4),
    Point(1),
    Point(1, math.inf),
    Pair((1,), 2),
    Pair([]),
    Job(name="n"),
    Job(name="n", parts=[(1,)], limit=3),
    Loose(name="n", tags=("a",), other={"x": (1,)}),
    Model(name="m"),
    Names(["a"]),
    [Point(1), Pair(1, 2), Color.RED],
    {Point(1): {Color.RED}, Level.LOW: frozenset({Point(2)})},
]


@pytest.mark.parametrize("value", BUILTINS, ids=lambda value: f"{type(value).__name__}")
@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: {"a": [v, v]}, lambda v: ((v,), [[[[[v]]]]]), lambda v: [*["x", 1, None] * 99, v]]
)
def test_every_type_comes_back_equal_and_of_its_type(value: Any, wrap: Any) -> None:
    assert same(again(wrap(value)), wrap(value))


@pytest.mark.parametrize("zone", ["Europe/Paris", "UTC", "America/New_York"])
def test_zones_come_back_as_zones_with_the_fold(zone: str) -> None:
    try:
        info = ZoneInfo(zone)
    except KeyError:
        pytest.skip("this machine has no time zone data")
    value = datetime(2024, 10, 27, 2, 30, tzinfo=info, fold=1)
    back = again([value, info])
    assert back[0] == value
    assert back[0].tzinfo is info
    assert back[0].fold == 1
    assert back[1] is info


def test_not_a_number_decimals_come_back() -> None:
    assert str(again(Decimal("sNaN12"))) == "sNaN12"
    assert str(again(Decimal("-NaN"))) == "-NaN"


ARRAYS: list[Any] = [
    np.arange(6, dtype="<i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3.5),
    np.zeros((0, 4)),
    np.array([1, 2], ">u2"),
    np.array([True]),
    np.array([1 + 2j]),
    np.array(["ab", "c"]),
    np.array([b"ab"]),
    np.array(["2024-01-01", "NaT"], "M8[us]"),
    np.array([5], "m8[25s]"),
    np.array([1.5], "f2"),
    np.arange(10)[::2],
    np.arange(10)[::-1],
    np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype.str}-{value.shape}")
def test_arrays_come_back_with_dtype_shape_and_as_writable_copies(value: Any) -> None:
    back = again({"a": value})["a"]
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert np.array_equal(back, value, equal_nan=value.dtype.kind in "fM")
    assert back.flags.writeable
    assert back.flags.f_contiguous == value.flags.f_contiguous or not value.flags.contiguous


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.5),
        np.float32("nan"),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1j),
        np.str_("a\0"),
        np.str_(""),
        np.str_("\ud800"),
        np.bytes_(b""),
        np.datetime64("2024-01-01", "D"),
        np.void(b"abc"),
        np.timedelta64(3, "s"),
        np.longdouble("0.1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    back = again([value])[0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.zeros(1, [("a", "O")]), np.array(["a"], "T"), np.ma.array([1])]
)
def test_arrays_that_would_be_pickled_or_changed_are_refused(value: Any) -> None:
    with pytest.raises(Unstorable):
        encode({"a": value}, CODEC)


def test_a_model_keeps_which_fields_were_set_and_runs_no_validator() -> None:
    model = Loose(name="n", color=3)
    back = again(model)
    assert back.name == "n!"
    assert back.model_fields_set == {"name", "color"}
    assert back.__pydantic_extra__ == {"color": 3}
    assert back._cache == 5
    object.__setattr__(model, "__dict__", {**model.__dict__, "name": "invalid"})
    assert again(model).name == "invalid"


def test_rebuilding_a_struct_does_not_run_its_post_init() -> None:
    job = Job(name="n")
    msgspec.structs.force_setattr(job, "name", "never valid again")
    back = again(job)
    assert type(back) is Job
    assert msgspec.json.encode(back) == msgspec.json.encode(job)


def test_a_list_of_messages_with_odd_ones_among_them_comes_back() -> None:
    messages = [Loose(name=f"m{i}", x={"^k": i} if i == 3 else {}) for i in range(10)]
    messages.append(Loose(name="\ud800", big=2**70, nan=math.inf))
    assert again({"messages": messages}) == {"messages": messages}


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
    | st.decimals()
    | st.uuids()
    | st.sampled_from(Color)
    | st.text(st.characters(codec=None))
    | st.sampled_from(["^", "^tuple", "\ud800", "a"])
)
hashables = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.sampled_from(["^x", "^"]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.just("^tuple"), inner)
        | st.dictionaries(hashables, inner)
        | st.tuples(inner, inner)
        | st.sets(hashables)
        | st.builds(Base, st.text(), inner)
    ),
    max_leaves=25,
)


@settings(max_examples=examples(300))
@given(values)
def test_any_value_comes_back(value: Any) -> None:
    back = again(value)
    if "sNaN" not in repr(value):  # a signalling NaN refuses to be compared
        assert repr_of(back) == repr_of(value)


def repr_of(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}{sorted(map(repr_of, value))}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}{[repr_of(item) for item in value]}"
    if type(value) is dict:
        return f"dict{[(repr_of(key), repr_of(item)) for key, item in value.items()]}"
    return f"Base{value.title!r}{repr_of(value.steps)}" if type(value) is Base else repr(value)


@given(st.sets(st.text() | st.integers() | st.tuples(st.integers())))
def test_equal_sets_have_equal_texts(value: set[Any]) -> None:
    other: set[Any] = set()
    for item in reversed(list(value)):
        other.add(item)
    assert encode(value, CODEC) == encode(other, CODEC)


@given(st.dictionaries(st.text() | st.integers() | st.just("^k"), st.none()))
def test_a_plain_dict_is_one_that_json_holds_as_it_is(value: dict[Any, None]) -> None:
    expected = all(
        type(k) is str and not k.startswith("^") and k.encode("utf-8", "ignore").decode() == k for k in value
    )
    assert is_plain_dict(value) is expected


def test_a_plain_dict_is_an_exact_dict() -> None:
    assert not is_plain_dict(OrderedDict())
    assert not is_plain_dict([])
    assert is_plain_dict({})


def test_a_text_shares_nothing_with_its_value() -> None:
    value = {"a": [1], "b": Base("t", [1])}
    text = encode(value, CODEC)
    value["a"].append(2)  # type: ignore[attr-defined]
    first, second = decode(text, CODEC), decode(text, CODEC)
    first["a"].append(3)
    first["b"].steps.append(3)
    assert second == {"a": [1], "b": Base("t", [1])}


def test_carets_in_plain_text_cost_no_tags() -> None:
    value = {"a": 'x^y "^ {"^tuple": 1}' * 100, "b": ["^", "^a"]}
    assert b"^dict" not in encode(value, CODEC)
    assert again(value) == value


def test_an_ordered_dict_keeps_an_order_that_was_changed() -> None:
    value = OrderedDict(a=1, b=2, c=3)
    value.move_to_end("a")
    assert list(again(value)) == ["b", "c", "a"]


def test_the_dict_of_an_object_is_looked_through() -> None:
    """From Python 3.13 on such a dict does not show its values to the garbage collector, which the walk asks."""

    class Plain:
        def __init__(self) -> None:
            self.pair = (1, 2)
            self.nothing = float("nan")

    found = decode(encode({"v": vars(Plain())}, CODEC), CODEC)["v"]
    assert found["pair"] == (1, 2)
    assert type(found["pair"]) is tuple
    assert found["nothing"] != found["nothing"]
