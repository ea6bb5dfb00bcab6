"""The types that the tests of schemas share."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Annotated, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import msgspec
from pydantic import BaseModel, Field, field_validator

T = TypeVar("T")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


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


class NotData:
    def __repr__(self) -> str:  # ids of tests must be the same in every process
        return "NotData()"


EVERY_TYPE = [
    *(Trip, Options, Point, Price, Tagged, Node, Model, WithModel, Box[int], Seat | Price, list[Seat | Model]),
    *(tuple[Seat, ...], dict[str, Seat], Color | None, bytes, Annotated[Decimal, Field(gt=0)]),
    *(Annotated[list[Annotated[int, "n"]], msgspec.Meta(min_length=1)], Annotated[Seat, "where"]),
    Annotated[str, msgspec.Meta(pattern=r"(?=a)b")],
]
