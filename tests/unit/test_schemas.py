"""Schemas say what a type takes; what is outside of them is refused, with the path and the reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field, field_validator

from perdure.errors import AnswerRefused, UsageError
from perdure.runs.functions.inputs import Binder
from perdure.runs.functions.keys import IdempotencyKey
from perdure.runs.functions.schemas import (
    check_answer,
    coerce_arguments,
    parameters_schema,
    schema_of,
)

if TYPE_CHECKING:
    from nowhere import OnlyForCheckers  # type: ignore[import-not-found]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Seat:
    row: int
    letter: str = "A"

    def __post_init__(self) -> None:
        if self.row == 13:
            raise ValueError("there is no row 13")


@dataclass
class Trip:
    seats: list[Seat]


class Price(msgspec.Struct, rename="camel"):
    amount_cents: Annotated[int, msgspec.Meta(ge=0)]
    currency: Literal["EUR", "USD"] = "EUR"


class Model(BaseModel):
    count: int = Field(ge=1, description="how many")

    @field_validator("count")
    @classmethod
    def not_seven(cls, value: int) -> int:
        if value == 7:
            raise ValueError("not seven")
        return value


def book(
    flight: Annotated[str, "such as LH400"],
    seats: int,
    seat: Seat | None = None,
    *,
    color: Color = Color.RED,
    when: datetime = None,  # type: ignore[assignment]  # noqa: RUF013
    model: Model | None = None,
    key: IdempotencyKey,
    **more: float,
) -> str:
    return flight


def book_seat(flight: Annotated[str, "such as LH400"], seat: Seat, *, color: Color = Color.RED) -> None: ...


# --- schemas


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, 1, "1"),
        (bool, True, 1),
        (date, "2026-11-16", 5),
        (Literal["a", "b"], "a", "c"),
        (list[Seat], [{"row": 1}], [{"row": "x"}]),
        (Price, {"amountCents": 5}, {"amountCents": -1}),
        (Model | None, {"count": 1}, {"count": 0}),
        (Annotated[int, Field(ge=1)], 1, 0),
        (Seat | Model, {"count": 3}, {"nothing": 3}),
        ({"type": "object", "properties": {"a": {"minimum": 3}}}, {"a": 3}, {"a": 2}),
    ],
    ids=str,
)
def test_an_answer_is_checked_by_the_schema_of_the_type_which_is_plain_json(kind: Any, good: Any, bad: Any) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(schema_of(kind)))
    assert check_answer(good, stored) == good
    with pytest.raises(AnswerRefused, match=r"^answer"):
        check_answer(bad, stored)


def test_a_refused_answer_says_where_and_why() -> None:
    with pytest.raises(AnswerRefused, match=r"^answer.seats\[1\].row: 'x' is not of type 'integer'$"):
        check_answer({"seats": [{"row": 1}, {"row": "x"}]}, schema_of(Trip))
    with pytest.raises(AnswerRefused, match="cannot be given as JSON"):
        check_answer(object(), {})


@pytest.mark.parametrize("kind", [type, Callable, {"type": "int"}, {"const": object()}])
def test_what_is_no_schema_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError):
        schema_of(kind)


def test_a_reference_out_of_the_schema_is_not_followed() -> None:
    with pytest.raises(UsageError, match="not in it"):
        check_answer(1, {"$ref": "http://localhost/schema.json"})


def test_neither_pydantic_nor_jsonschema_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys; from perdure.runs.functions import schemas; schemas.schema_of(int);"
        "print([name for name in ('pydantic', 'jsonschema', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- parameters


@pytest.mark.parametrize("fn", [book, book_seat])
def test_the_schema_of_a_functions_parameters(fn: Callable[..., Any]) -> None:
    """By pydantic, where a type is one of pydantic's, and by msgspec."""
    schema = parameters_schema(fn)
    properties = schema["properties"]
    assert schema["type"] == "object"
    assert schema["required"] == (["flight", "seats"] if fn is book else ["flight", "seat"])
    assert [name for name in properties if name in ("flight", "seat", "color")] == ["flight", "seat", "color"]
    assert not {"key", "more"} & set(properties)
    assert (properties["flight"]["type"], properties["flight"]["description"]) == ("string", "such as LH400")
    assert properties["color"]["default"] == "red"
    assert set(schema["$defs"]) == {"Seat", "Color", *(["Model"] if fn is book else [])}
    properties["flight"]["type"] = "integer"
    assert parameters_schema(fn)["properties"]["flight"]["type"] == "string"


def test_skipped_parameters_self_and_the_key_are_not_shown() -> None:
    class Agent:
        def tool(self, text: str, client: object, key: IdempotencyKey | None = None) -> None: ...

    assert parameters_schema(Agent.tool, skip=["client"]) == {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    }


def unknown_type(x: OnlyForCheckers) -> None: ...


def no_json(x: Callable[..., Any]) -> None: ...


@pytest.mark.parametrize("fn", [unknown_type, no_json])
def test_a_parameter_whose_type_has_no_schema_is_named(fn: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=rf"{fn.__name__}: .*'x'"):
        parameters_schema(fn)


# --- a model's arguments


def test_arguments_become_what_the_types_say() -> None:
    raw = {
        "color": "blue",
        "seats": "2",  # a number as text, where a text will not do
        "flight": "LH400",
        "seat": {"row": 3},
        "when": "2026-11-16T10:00:00Z",
        "model": {"count": 1},
    }
    coerced = coerce_arguments(book, raw)
    assert coerced == {
        "flight": "LH400",
        "seats": 2,
        "seat": Seat(3),
        "color": Color.BLUE,
        "when": datetime.fromisoformat("2026-11-16T10:00:00+00:00"),
        "model": Model(count=1),
    }
    assert list(coerced) == ["flight", "seats", "seat", "color", "when", "model"]
    args, kwargs = Binder(book).restore(coerced)
    assert book(*args, **kwargs, key=IdempotencyKey("k")) == "LH400"


@pytest.mark.parametrize("fn", [book, book_seat])
def test_a_problem_is_named_with_its_place(fn: Callable[..., Any]) -> None:
    for wrong, reason in (({"seat": {"row": "x"}}, "row"), ({"color": "green"}, "color"), ({"m": 1}, "m")):
        with pytest.raises(ValueError, match=reason):
            coerce_arguments(fn, {"flight": "a", "seat": {"row": 1}} | ({"seats": 1} if fn is book else {}) | wrong)
    with pytest.raises(ValueError, match="there is no row 13"):
        coerce_arguments(book_seat, {"flight": "a", "seat": {"row": 13}})
    with pytest.raises(ValueError, match="not seven"):
        coerce_arguments(book, {"flight": "a", "seats": 1, "model": {"count": 7}})


def simple(n: int = 0, flag: bool = False, text: str = "", either: int | str = 0) -> None: ...


def test_an_argument_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"unknown field `m`; the arguments are: n, flag, text, either$"):
        coerce_arguments(simple, {"m": 1})
    with pytest.raises(ValueError, match="Expected `object`"):
        coerce_arguments(simple, [1])


@pytest.mark.parametrize("raw", [{"n": "much"}, {"n": 1.5}, {"n": None}, {"text": 1}, {"flag": "yes"}])
def test_nothing_else_is_guessed(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        coerce_arguments(simple, raw)
    assert coerce_arguments(simple, {"either": "1"}) == {"either": "1"}
