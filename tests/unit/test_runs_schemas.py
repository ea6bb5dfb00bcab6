"""Schemas say what a type takes; what is outside of them is refused, with the path and the reason."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from schemas_kit import EVERY_TYPE, Box, Color, Model, Node, NotData, Options, Point, Price, Seat, Trip

from perdure.errors import UsageError
from perdure.runs.functions.checking import check_schema
from perdure.runs.functions.inputs import Binder
from perdure.runs.functions.keys import Key
from perdure.runs.functions.schemas import (
    coerce_arguments,
    described,
    description_of,
    parameters_schema,
    schema_of,
)

if TYPE_CHECKING:
    from nowhere import OnlyForCheckers  # type: ignore[import-not-found]


class Level(Enum):
    LOW = 1
    HIGH = 2


class Fractions(Enum):
    HALF = 0.5


UserId = NewType("UserId", int)


# --- schemas of types


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
        "import sys; from perdure.runs.functions import schemas; schemas.schema_of(int); schemas.check_answer(1, int);"
        "print([name for name in ('pydantic', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- schemas of parameters


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


# --- a model's arguments


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
