"""Schemas say what a type takes; what is outside of them is refused, with the path and the reason."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator

from holdfast.errors import AnswerRefused, UsageError
from holdfast.runs.functions.checking import check_schema, problems_of
from holdfast.runs.functions.inputs import Binder
from holdfast.runs.functions.keys import Key
from holdfast.runs.functions.patterns import PATTERN_LENGTH_MAX, TEXT_LENGTH_MAX, compiled
from holdfast.runs.functions.schemas import (
    check_answer,
    coerce_arguments,
    described,
    description_of,
    parameters_schema,
    schema_of,
)

if TYPE_CHECKING:
    from nowhere import OnlyForCheckers  # type: ignore[import-not-found]

T = TypeVar("T")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


class Fractions(Enum):
    HALF = 0.5


@dataclass
class Seat:
    row: int
    letter: Annotated[str, "A to F"] = "A"

    def __post_init__(self) -> None:
        if self.row == 13:
            raise ValueError("there is no row 13")


@dataclass
class Trip:
    """A journey."""

    seat: Seat
    stops: list[Seat] = field(default_factory=list)


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


class Options(TypedDict):
    meal: str
    window: NotRequired[Annotated[bool, "wants to look out"]]


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Price(msgspec.Struct, rename="camel"):
    amount_cents: Annotated[int, msgspec.Meta(ge=0, le=50_000, description="in cents")]
    currency: Literal["EUR", "USD"] = "EUR"


class Tagged(msgspec.Struct, tag="tagged"):
    value: int


class Box(msgspec.Struct, Generic[T]):
    content: T


class Model(BaseModel):
    """A pydantic model."""

    count: int = Field(ge=1, description="how many")
    inner: list[Model] = []

    @field_validator("count")
    @classmethod
    def not_seven(cls, value: int) -> int:
        if value == 7:
            raise ValueError("not seven")
        return value


@dataclass
class WithModel:
    model: Model


@dataclass
class Breaking:
    x: int

    def __post_init__(self) -> None:
        raise KeyError("of its own")


class NotData:
    def __repr__(self) -> str:  # ids of tests must be the same in every process
        return "NotData()"


UserId = NewType("UserId", int)


# ---- schemas of types


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (object, {}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Iterable[int], {"type": "array", "items": {"type": "integer"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Mapping[str, Any], {"type": "object", "additionalProperties": {}}),
        (dict, {"type": "object", "additionalProperties": True}),
        (Literal["b", "a"], {"type": "string", "enum": ["b", "a"]}),
        (Literal["a", 1, None], {"enum": ["a", 1, None]}),
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (
            Annotated[int, msgspec.Meta(ge=1), "how many"],
            {"type": "integer", "minimum": 1, "description": "how many"},
        ),
        (
            Annotated[str, "why"] | None,
            {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "why"},
        ),
        (datetime, {"type": "string", "format": "date-time"}),
        (date, {"type": "string", "format": "date"}),
        (UUID, {"type": "string", "format": "uuid"}),
        (Decimal, {"type": "string", "format": "decimal"}),
        (UserId, {"type": "integer"}),
        (Annotated[int, Field(ge=1, description="d")], {"type": "integer", "minimum": 1, "description": "d"}),
    ],
)
def test_the_schema_of_a_type(kind: Any, schema: dict[str, Any]) -> None:
    assert schema_of(kind) == schema


def test_a_dataclass_is_an_object_with_the_descriptions_of_its_fields() -> None:
    assert schema_of(Trip) == {
        "title": "Trip",
        "description": "A journey.",
        "type": "object",
        "properties": {
            "seat": (
                seat := {
                    "title": "Seat",
                    "type": "object",
                    "properties": {
                        "row": {"type": "integer"},
                        "letter": {"type": "string", "description": "A to F", "default": "A"},
                    },
                    "required": ["row"],
                    "additionalProperties": False,
                }
            ),
            "stops": {"type": "array", "items": seat},
        },
        "required": ["seat"],
        "additionalProperties": False,
    }


def test_a_typed_dict_and_a_struct_are_objects_with_the_names_they_have_in_json() -> None:
    options, price = schema_of(Options), schema_of(Price)
    assert options["properties"]["window"] == {"type": "boolean", "description": "wants to look out"}
    assert options["required"] == ["meal"]
    assert price["properties"]["amountCents"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 50_000,
        "description": "in cents",
    }
    assert price["properties"]["currency"] == {"type": "string", "enum": ["EUR", "USD"], "default": "EUR"}


def test_a_class_that_holds_itself_is_an_object_inside_of_itself() -> None:
    assert schema_of(Node)["properties"]["children"]["items"] == {"type": "object", "title": "Node"}
    inner = schema_of(Model)["properties"]["inner"]["items"]
    assert inner == {"type": "object", "title": "Model"}


EVERY_TYPE = [
    *(Trip, Options, Point, Price, Tagged, Node, Model, WithModel, Box[int], Seat | Price, list[Seat | Model]),
    *(tuple[Seat, ...], dict[str, Seat], Color | None, bytes, Annotated[Decimal, Field(gt=0)]),
    *(Annotated[list[Annotated[int, "n"]], msgspec.Meta(min_length=1)], Annotated[Seat, "where"]),
    Annotated[str, msgspec.Meta(pattern=r"(?=a)b")],
]


@pytest.mark.parametrize("kind", EVERY_TYPE, ids=str)
def test_every_schema_is_plain_json_without_references_and_can_be_checked(kind: Any) -> None:
    schema = schema_of(kind)
    assert "$ref" not in str(schema)
    assert schema_of(schema) == schema
    check_schema(schema)


@pytest.mark.parametrize("kind", [NotData, complex, type, Fractions, Literal[b"x"], "int", Callable, Box[NotData]])
def test_a_type_without_a_form_in_json_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError):
        schema_of(kind)


def test_pydantic_is_not_imported() -> None:
    code = (
        "import sys; from holdfast.runs.functions import schemas; schemas.schema_of(int); schemas.check_answer(1, int);"
        "print([name for name in ('pydantic', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- schemas of parameters


def book(
    flight: Annotated[str, "such as LH400"],
    seats: int,
    seat: Seat | None = None,
    *,
    color: Color = Color.RED,
    extras: tuple[str, int] = ("none", 0),
    when: datetime = None,  # type: ignore[assignment]  # noqa: RUF013
    key: Key,
    **more: float,
) -> str:
    """Book a flight.

    It is not asked for twice.

    Args:
        flight: not shown, the annotation is nearer
        seats (int): How many seats,
            counted with children: all of them.
        color: Of the seat.

        **more: What else.

    Returns:
        seat: the seat
    """
    return flight


def test_the_schema_of_a_functions_parameters() -> None:
    schema = parameters_schema(book)
    properties = schema["properties"]
    assert (schema["type"], schema["required"]) == ("object", ["flight", "seats"])
    assert list(properties) == ["flight", "seats", "seat", "color", "extras", "when"]
    assert properties["flight"] == {"type": "string", "description": "such as LH400"}
    assert properties["seats"]["description"] == "How many seats, counted with children: all of them."
    assert properties["color"] == {
        "type": "string",
        "enum": ["red", "blue"],
        "description": "Of the seat.",
        "default": "red",
    }
    assert properties["when"] == {
        "anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}],
        "default": None,
    }
    assert schema["additionalProperties"] == {"type": "number", "description": "What else."}


def test_arrays_for_models_have_items_and_no_prefix_items() -> None:
    """The APIs of models refuse an array without `items`, and many do not know `prefixItems`."""

    def tool(pair: tuple[int, str], point: Point, anything: list) -> None: ...  # type: ignore[type-arg]

    tool.__annotations__.update(pair=tuple[int, str], point=Point, anything=list)
    properties = parameters_schema(tool)["properties"]
    assert properties["pair"] == {
        "type": "array",
        "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "minItems": 2,
        "maxItems": 2,
    }
    assert "prefixItems" not in str(properties)
    assert properties["anything"] == {"type": "array", "items": {}}


def test_no_parameters_and_no_others_are_allowed() -> None:
    def tool() -> None: ...

    empty = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert parameters_schema(tool) == empty


def test_skipped_parameters_self_and_the_key_are_not_shown() -> None:
    class Agent:
        def tool(self, text: str, client: NotData, key: Key | None = None) -> None: ...

    assert list(parameters_schema(Agent.tool, skip=["client"])["properties"]) == ["text"]


def test_a_changed_schema_changes_no_other() -> None:
    parameters_schema(book)["properties"]["flight"]["type"] = "integer"
    assert parameters_schema(book)["properties"]["flight"]["type"] == "string"


def unknown_type(x: OnlyForCheckers) -> None: ...
def no_json(x: complex) -> None: ...


@pytest.mark.parametrize("fn", [unknown_type, no_json])
def test_a_parameter_whose_type_has_no_schema_is_named(fn: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=rf"{fn.__name__}: .*'x'"):
        parameters_schema(fn)


@pytest.mark.parametrize(
    ("doc", "found"),
    [
        ("", {}),
        ("Args:\n    x: one\n    *y (list[int], optional): two: three\n        four\n\n    z: five\n", None),
        ("Does it.\n\n:param x: one\n:param list[int] y: two: three\n    four\n:param z: five\n:returns: six", None),
        ("Arguments:\n\tx: one\n\ty: two: three four\n\tz: five\nReturns:\n\tw: six", None),
        ("Args:\n  some words without a name\n  x: one\n", {"x": "one"}),
        ("Args: x is one", {}),
    ],
)
def test_descriptions_in_docstrings(doc: str, found: dict[str, str] | None) -> None:
    assert described(doc) == (found if found is not None else {"x": "one", "y": "two: three four", "z": "five"})


def test_the_description_of_a_function_ends_before_its_parameters() -> None:
    assert description_of(book) == "Book a flight.\n\nIt is not asked for twice."
    assert description_of(lambda: None) == ""


@given(st.text(alphabet="Args:\n paramx()*\t", max_size=200))
def test_no_docstring_breaks_it(doc: str) -> None:
    described(doc)


# ---- a model's arguments


def test_arguments_become_what_the_types_say() -> None:
    raw = {
        "color": "blue",
        "seats": 2,
        "flight": "LH400",
        "seat": {"row": 3},
        "extras": ["meal", 2],
        "when": "2026-11-16T10:00:00Z",
        "tip": 5,
    }
    coerced = coerce_arguments(book, raw)
    assert coerced == {
        "flight": "LH400",
        "seats": 2,
        "seat": Seat(3),
        "color": Color.BLUE,
        "extras": ("meal", 2),
        "when": datetime.fromisoformat("2026-11-16T10:00:00+00:00"),
        "tip": 5.0,
    }
    assert list(coerced) == ["flight", "seats", "seat", "color", "extras", "when", "tip"]
    args, kwargs = Binder(book).restore(coerced)
    assert book(*args, **kwargs, key=Key("k")) == "LH400"


def test_each_problem_is_one_sentence_that_names_the_argument() -> None:
    raw = {"seats": "two", "seat": {"row": "x", "nose": 1}, "color": "green", "extras": ["a"], "tip": "much"}
    with pytest.raises(ValueError) as refused:
        coerce_arguments(book, raw)
    assert str(refused.value).splitlines() == [
        "flight: is missing",
        'seats: must be an integer, not "two"',
        'seat.row: must be an integer, not "x"',
        "seat.nose: is not a field here; the fields are: row, letter",
        'color: must be one of "red", "blue", not "green"',
        "extras: must have at least 2 items, not 1",
        'tip: must be a number, not "much"',
    ]


def simple(n: int = 0, x: float = 0.0, flag: bool = False, text: str = "", either: int | str = 0) -> None: ...


def test_an_argument_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"^m: is no argument; the arguments are: n, x, flag, text, either$"):
        coerce_arguments(simple, {"m": 1})


def test_the_key_cannot_be_given_by_a_model() -> None:
    def pay(amount: int, key: Key) -> None: ...

    with pytest.raises(ValueError, match="key: is no argument"):
        coerce_arguments(pay, {"amount": 1, "key": "mine"})


@pytest.mark.parametrize(
    ("raw", "coerced"),
    [
        ({"n": "3"}, {"n": 3}),
        ({"n": "-3"}, {"n": -3}),
        ({"n": 3.0}, {"n": 3}),
        ({"x": "3"}, {"x": 3.0}),
        ({"x": "2.5e3"}, {"x": 2500.0}),
        ({"x": 3}, {"x": 3.0}),
        ({"text": "3"}, {"text": "3"}),
        ({"either": "3"}, {"either": "3"}),
    ],
)
def test_a_number_as_text_is_taken_where_only_a_number_will_do(raw: dict[str, Any], coerced: dict[str, Any]) -> None:
    found = coerce_arguments(simple, raw)
    assert found == coerced
    assert [type(value) for value in found.values()] == [type(value) for value in coerced.values()]


@pytest.mark.parametrize(
    "raw",
    [
        *({"flag": value} for value in ("yes", "true", "1", 1, 0, None)),
        *({"n": value} for value in ("3.5", 3.5, True, "", " 3", "0x3", "nan", None, "٣", [3], math.inf)),
        *({"x": value} for value in ("nan", "inf", "1_0", True, math.nan)),
        *({"text": value} for value in (3, True, None, ["a"])),
        {"either": 1.5},
    ],
    ids=str,
)
def test_nothing_else_is_guessed(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(raw))}: must be"):
        coerce_arguments(simple, raw)


@pytest.mark.parametrize("raw", [None, [], "x", 3])
def test_arguments_are_an_object(raw: Any) -> None:
    with pytest.raises(ValueError, match="must be an object"):
        coerce_arguments(simple, raw)


def test_a_class_that_refuses_a_value_is_heard() -> None:
    with pytest.raises(ValueError, match=r"^seat: there is no row 13$"):
        coerce_arguments(book, {"flight": "x", "seats": 1, "seat": {"row": 13}})


def test_of_many_problems_the_first_are_said_and_the_rest_counted() -> None:
    with pytest.raises(ValueError, match="and 5 more") as refused:
        coerce_arguments(simple, {f"m{at}": 1 for at in range(15)})
    assert len(str(refused.value).splitlines()) == 11


# ---- answers by type


@pytest.mark.parametrize(
    ("value", "kind", "answer"),
    [
        (3, int, 3),
        (3.0, int, 3),
        (None, int | None, None),
        ("a", Literal["a", "b"], "a"),
        ("red", Color, Color.RED),
        (Color.RED, Color, Color.RED),
        ({"row": 1}, Seat, Seat(1)),
        (Seat(1, "B"), Seat, Seat(1, "B")),
        ({"seat": {"row": 1}, "stops": [{"row": 2}]}, Trip, Trip(Seat(1), [Seat(2)])),
        ({"meal": "fish"}, Options, {"meal": "fish"}),
        ([1, 2], Point, Point(1, 2.0)),
        (Point(1, 2.0), Point, Point(1, 2.0)),
        ({"amountCents": 5}, Price, Price(5)),
        ({"type": "tagged", "value": 1}, Tagged, Tagged(1)),
        ({"count": 2}, Model, Model(count=2)),
        (Model(count=2), Model, Model(count=2)),
        ({"model": {"count": 2}}, WithModel, WithModel(Model(count=2))),
        ({"content": 1}, Box[int], Box(1)),
        ({"amountCents": 5}, Seat | Price, Price(5)),
        ([{"row": 1}, {"amountCents": 5}], list[Seat | Price], [Seat(1), Price(5)]),
        ([{"row": 1}, 3], tuple[Seat | Price, int], (Seat(1), 3)),
        ({"x": {"row": 1}}, dict[str, Seat | Price | None], {"x": Seat(1)}),
        ({"count": 2}, Model | int, Model(count=2)),
        ({"1": "a"}, dict[int, str], {1: "a"}),
        ("2026-01-02", date, date(2026, 1, 2)),
        (date(2026, 1, 2), date, date(2026, 1, 2)),
        ([1, 2], set[int], {1, 2}),
        ({"x": (1, (2,))}, dict[str, tuple[int, list[int]]], {"x": (1, [2])}),
        ("x", Key, Key("x")),
        (5, Annotated[int, Field(ge=1)], 5),
        ({"a": [1, None]}, Any, {"a": [1, None]}),
    ],
    ids=str,
)
def test_an_answer_becomes_what_the_type_says(value: Any, kind: Any, answer: Any) -> None:
    found = check_answer(value, kind)
    assert found == answer
    assert type(found) is type(answer)


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        ("x", int, 'answer: must be an integer, not "x"'),
        (True, int, "answer: must be an integer, not true"),
        ("c", Literal["a", "b"], 'answer: must be one of "a", "b", not "c"'),
        ("x", int | None, 'answer: must be an integer or null, not "x"'),
        ({"amountCents": 70_000}, Price, "answer.amountCents: must be at most 50000, not 70000"),
        ({"amountCents": 1, "curency": "USD"}, Price, "answer.curency: is not a field here"),
        ({"seat": {}}, Trip, "answer.seat.row: is missing"),
        ({"seat": {"row": 1}, "stops": [{"row": 13}]}, Trip, "answer.stops[0]: there is no row 13"),
        ({"count": 0}, Model, "answer.count: must be at least 1, not 0"),
        ({"count": 7}, Model, "answer.count: Value error, not seven"),
        ({"model": {"count": 7}}, WithModel, "answer.model: Model.count: Value error, not seven"),
        ({"name": "a", "children": [{"name": 1}]}, Node, "answer.children[0].name: Expected `str`, got `int`"),
        ([1, 2, 3], Point, "answer: must have at most 2 items, not 3"),
        (["x", 2], Point, 'answer[0]: must be an integer, not "x"'),
        ({"row": "x"}, Seat | int, 'answer.row: must be an integer, not "x"'),
        ("x", Seat | Price, 'answer: must be an object, not "x"'),
        ("2026-13-01", date, "answer: must be a date, not"),
        ("%", bytes, "answer: must be a base64 text, not"),
        (math.nan, float, "answer: must be a finite number, not nan"),
        (0, Annotated[int, Field(ge=1)], "answer: must be at least 1, not 0"),
        (NotData(), int, "answer: cannot be given as JSON: a NotData is no JSON"),
        ({"x": 1}, Breaking, "answer: KeyError: 'of its own'"),
    ],
    ids=str,
)
def test_an_answer_of_another_type_is_refused_with_path_and_reason(value: Any, kind: Any, reason: str) -> None:
    with pytest.raises(AnswerRefused) as refused:
        check_answer(value, kind)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    "kind", [*EVERY_TYPE, datetime, UUID, tuple[int, str], dict[str, int], Literal["a", None]], ids=str
)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["a", "red", "1", "2026-01-02"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["row", "count", "name", "children", "meal", "a"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(max_examples=60)
def test_whatever_is_answered_is_taken_or_refused(kind: Any, value: Any) -> None:
    """Nothing else is raised, and what the stored schema refuses the type refuses too."""
    try:
        check_answer(value, schema_of(kind))
        fits = True
    except AnswerRefused:
        fits = False
    try:
        check_answer(value, kind)
    except AnswerRefused:
        return
    assert fits


# ---- answers by JSON Schema


PLAN = {
    "type": "object",
    "properties": {
        "price": {"type": "number", "minimum": 0, "maximum": 500},
        "note": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-z]+$"},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "uniqueItems": True},
        "class": {"enum": ["first", "second", 3]},
        "fixed": {"const": {"a": 1}},
        "old": {"type": "string", "nullable": True},
    },
    "required": ["price"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "value",
    [
        {"price": 500},
        {"price": 0.5, "note": "abc", "days": [1, 2], "class": 3, "fixed": {"a": 1}, "old": None},
    ],
)
def test_an_answer_inside_the_schema_is_taken_as_it_is(value: Any) -> None:
    assert check_answer(value, PLAN) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "answer: must be an object, not []"),
        ({}, "answer.price: is missing"),
        ({"price": 700}, "answer.price: must be at most 500, not 700"),
        ({"price": -1}, "answer.price: must be at least 0, not -1"),
        ({"price": "700"}, 'answer.price: must be a number, not "700"'),
        ({"price": 1, "note": "a"}, "answer.note: must have at least 2 characters, not 1"),
        ({"price": 1, "note": "abcdef"}, "answer.note: must have at most 5 characters, not 6"),
        ({"price": 1, "note": "ABC"}, 'answer.note: must match the pattern ^[a-z]+$, not "ABC"'),
        ({"price": 1, "days": []}, "answer.days: must have at least 1 item, not 0"),
        ({"price": 1, "days": [1, "x"]}, 'answer.days[1]: must be an integer, not "x"'),
        ({"price": 1, "days": [1, 1]}, "answer.days: must not have the same item twice"),
        ({"price": 1, "class": "third"}, 'answer.class: must be one of "first", "second", 3, not "third"'),
        ({"price": 1, "fixed": {"a": 2}}, 'answer.fixed: must be {"a":1}, not {"a":2}'),
        ({"price": 1, "old": 1}, "answer.old: must be a string, not 1"),
        ({"price": 1, "a b": 1}, 'answer["a b"]: is not a field here'),
        ({"price": 700, "note": "a"}, "answer.price: must be at most 500, not 700; answer.note: must have"),
    ],
)
def test_an_answer_outside_the_schema_is_refused_with_path_and_reason(value: Any, reason: str) -> None:
    with pytest.raises(AnswerRefused) as refused:
        check_answer(value, PLAN)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, [1, None, {"a": []}], []),
        ({"type": ["string", "null"]}, ["a", None], [1]),
        ({"type": "integer"}, [1, 1.0, -(10**30)], [1.5, True, "1", None]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"type": "null"}, [None], [0, False, ""]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2, "x"], [1, 3]),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}, [2, 3], [1, 4]),
        ({"multipleOf": 3}, [0, 9, -3], [1, 1.5]),
        ({"multipleOf": 0.1}, [0.3, 1, 1e300], [0.25]),
        ({"multipleOf": 1e-300}, [0], [1e300]),
        ({"enum": [1, "a", None, [1]]}, [1, 1.0, "a", None, [1]], [True, "b", [2]]),
        ({"enum": []}, [], [1, None]),
        ({"const": None}, [None], [0, False]),
        ({"const": 1, "enum": [1, 2]}, [1], [2, 3]),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}, [1, "ab"], ["a", None, 1.5]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, [1, 5.5, "x"], [7, 1.5]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
        ({"not": {"type": "string"}}, [1], ["a"]),
        ({"items": {"type": "integer"}}, [[], [1], {}], [["a"]]),
        ({"items": False}, [[]], [[1]]),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[1, "a"], []], [["a"], [1, 1]]),
        ({"additionalProperties": {"type": "integer"}, "properties": {"a": {}}}, [{"a": "x", "b": 1}], [{"b": "x"}]),
        ({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
        ({"propertyNames": {"pattern": "^x"}}, [{"x1": 1}], [{"y": 1}]),
        ({"type": "string", "enum": ["a"], "nullable": True}, ["a", None], ["b"]),
        ({"format": "uuid"}, [str(UUID(int=1)), 5], ["x"]),
        ({"format": "date-time"}, ["2026-11-16T10:00:00Z", "2026-11-16T10:00:00"], ["2026-11-16", ""]),
        ({"format": "phone number"}, ["whatever"], []),
        ({"pattern": "b"}, ["abc", 1], ["ac"]),
        (
            {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
            [{"next": {"next": {}}}],
            [{"next": {"next": 1}}],
        ),
        ({"definitions": {"a/b": {"type": "integer"}}, "items": {"$ref": "#/definitions/a~1b"}}, [[1]], [["a"]]),
    ],
    ids=str,
)
def test_the_keywords(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert check_answer(value, schema) == value
    for value in bad:
        with pytest.raises(AnswerRefused):
            check_answer(value, schema)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1.5, "answer: must be an integer or a string, not 1.5"),
        ("a", "answer: must have at least 2 characters, not 1"),
    ],
)
def test_of_several_forms_the_nearest_is_spoken_of(value: Any, reason: str) -> None:
    schema = {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}
    with pytest.raises(AnswerRefused, match=re.escape(reason)):
        check_answer(value, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strnig"},
        {"type": 3},
        {"maximun": 3},
        {"Type": "string"},
        {"maximum": "3"},
        {"maximum": True},
        {"required": "price"},
        {"required": [1]},
        {"enum": "a"},
        {"properties": {"a": 1}},
        {"items": [{"type": "string"}]},
        {"if": {}},
        {"patternProperties": {}},
        {"pattern": "("},
        {"pattern": r"(?=a)b"},
        {"$ref": "http://elsewhere/schema"},
        {"$ref": "#/$defs/missing"},
        {"anyOf": [{"properties": {"x": {"contains": {}}}}]},
        {"default": NotData()},
    ],
    ids=str,
)
def test_a_schema_by_which_something_would_not_be_checked_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        schema_of(schema)
    with pytest.raises(UsageError):
        check_answer(1, schema)


def test_what_a_schema_says_to_others_is_kept() -> None:
    schema = {"type": "string", "title": "t", "x-widget": "big", "examples": ["a"], "default": "a", "$schema": "…"}
    assert schema_of(schema) == schema
    assert schema_of(schema) is not schema


# ---- nothing hangs


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#"}, 1),
        ({"allOf": [{"$ref": "#"}]}, 1),
        (
            {
                "$defs": {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(40)} | {"d40": {}},
                "$ref": "#/$defs/d0",
            },
            1,
        ),
        ({"type": "array"}, [0] * 1_100_000),
    ],
    ids=["itself", "around", "doubling", "large"],
)
def test_a_check_without_end_is_given_up(schema: dict[str, Any], value: Any) -> None:
    with pytest.raises(AnswerRefused, match="too large or too deeply nested"):
        check_answer(value, schema)


def test_a_value_that_is_nested_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(AnswerRefused):
        check_answer(value, {"type": "array"})


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * (TEXT_LENGTH_MAX - 1) + "b"),
        ("(a|a)*c", "a" * TEXT_LENGTH_MAX),
        ("a*a*a*a*a*a*c", "a" * TEXT_LENGTH_MAX),
        ("(.*){20}c", "a" * TEXT_LENGTH_MAX),
        ("^(a?){100}a{100}$", "a" * 99),
    ],
)
def test_a_hostile_pattern_takes_time_by_the_length_of_the_text(pattern: str, text: str) -> None:
    start = time.perf_counter()
    assert problems_of(text, {"pattern": pattern}, "answer")
    assert time.perf_counter() - start < 10


def test_a_long_text_is_not_compared_with_a_pattern() -> None:
    with pytest.raises(AnswerRefused, match="at most 10,000 characters"):
        check_answer("a" * (TEXT_LENGTH_MAX + 1), {"pattern": "a"})


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "(a)\\1", "(?!a)", "(?i)a", "(?i:a)", "(?>a)", "a{5000}", "(a{100}){100}"),
        *("a" * (PATTERN_LENGTH_MAX + 1), "(" * 500 + ")" * 500),
    ],
    ids=lambda pattern: pattern[:20],
)
def test_patterns_that_are_not_supported_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="pattern"):
        compiled(pattern)


PATTERNS = [
    *("", "a", "^a", "^$", "a|b", "a|", "ab*", "a+?b", "(ab)+", "(a|ab)(c|bcd)", "[a-c]+", "[^a]b", "^a|b", "é"),
    *("a{2}", "a{1,2}b", "a{2,}", "(a*)*b", r"\bab", r"a\B", "a.c", "(?:a|b)(?P<n>c)", r"[\d_]", r"[^\w ]"),
    *("[b-]", "(a?b?)*c", "((a|b)c?){2}", r"\d\w\s", r"\D\W\S"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text(alphabet="abc1_ \né-", min_size=1, max_size=8))
def test_patterns_mean_what_they_mean_to_python(pattern: str, text: str) -> None:
    assert compiled(pattern).occurs_in(text) == bool(re.search(pattern.replace("$", r"\Z"), text))


def test_the_end_is_the_very_end() -> None:
    assert compiled("^a$").occurs_in("a")
    assert not compiled("^a$").occurs_in("a\n")
