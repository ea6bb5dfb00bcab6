"""A recorded ValidationError of pydantic is the same after a restart. Agents show its text to a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pydantic
import pytest
from lab import Interrupt, Once
from pydantic_core import PydanticCustomError

import perdure


class Client:
    """No plain data: the journal cannot keep one."""


class Login(pydantic.BaseModel, hide_input_in_errors=True):
    pin: int


def _refuse(value: int) -> int:
    raise PydanticCustomError("list_type", "{value} is not {{odd}}", {"value": value})


def of_python() -> None:
    pydantic.TypeAdapter(dict[str, list[int]]).validate_python({"a": 1, "b": ["x"]})


def of_json() -> None:
    """The messages name the types of JSON: an array, not a list."""
    pydantic.TypeAdapter(dict[str, list[int]]).validate_json('{"a": 1, "b": ["x"]}')


def without_inputs() -> None:
    Login.model_validate({"pin": "not a number"})


def of_a_custom_type() -> None:
    """It has the name of one of pydantic's types, and another message."""
    pydantic.TypeAdapter(Annotated[int, pydantic.AfterValidator(_refuse)]).validate_python(4)


def of_an_object() -> None:
    Login.model_validate(Client())


def of_an_object_inside() -> None:
    pydantic.TypeAdapter(dict[str, int]).validate_python({"a": Client()})


class Stay(pydantic.BaseModel):
    city: str
    nights: int


def of_an_object_beside() -> None:
    """The input of a missing field is all that was validated."""
    Stay.model_validate({"city": "Porto", "client": Client()})


PLAIN: dict[str, Callable[[pydantic.ValidationError], Any]] = {
    "errors": lambda e: e.errors(),
    "json": lambda e: e.json(),
}
NOT_PLAIN: dict[str, Callable[[pydantic.ValidationError], Any]] = {
    "errors": lambda e: [{**line, "input": None} for line in e.errors()],
    "json": lambda e: e.json(include_input=False),
}
ERRORS = {
    of_python: PLAIN,
    of_json: PLAIN,
    without_inputs: PLAIN,
    of_a_custom_type: PLAIN,
    of_an_object: NOT_PLAIN,
    of_an_object_inside: NOT_PLAIN,
    of_an_object_beside: NOT_PLAIN,
}


@pytest.mark.parametrize("raises", ERRORS, ids=lambda fn: fn.__name__)
def test_a_validation_error_reads_the_same_after_a_restart(store: perdure.Store, raises: Callable[[], None]) -> None:
    once, seen = Once(), list[dict[str, Any]]()

    @perdure.step(name="ask")
    def ask() -> None:
        raises()

    @perdure.durable(name="agent")
    def agent() -> str:
        try:
            ask()
        except pydantic.ValidationError as error:
            seen.append({"str": str(error), "repr": repr(error), "title": error.title, "count": error.error_count()})
            seen[-1] |= {name: read(error) for name, read in ERRORS[raises].items()}
            once.interrupt()
        return "continued"

    with pytest.raises(Interrupt):
        store.run(agent, id=raises.__name__)
    assert store.run(agent, id=raises.__name__).result() == "continued"
    assert seen[1] == seen[0]


def test_code_that_reads_an_input_that_is_no_plain_data_leaves_the_run_stuck(store: perdure.Store) -> None:
    once = Once()

    @perdure.step(name="ask")
    def ask() -> None:
        of_an_object_inside()

    @perdure.durable(name="agent")
    def agent() -> str:
        try:
            ask()
        except pydantic.ValidationError as error:
            once.interrupt()
            return str(error.errors()[0]["input"])
        return "continued"

    with pytest.raises(Interrupt):
        store.run(agent, id="reads")
    with pytest.raises(perdure.RunStuck, match="the input of a ValidationError"):
        store.run(agent, id="reads").result()
