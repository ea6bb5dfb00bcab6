"""Answers of people and models are held against a type or a JSON Schema; and nothing hangs on a hostile one."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from schemas_kit import (
    EVERY_TYPE,
    Box,
    Color,
    Model,
    Node,
    NotData,
    Options,
    Point,
    Price,
    Seat,
    Tagged,
    Trip,
    WithModel,
)

from perdure.errors import AnswerRefused, UsageError
from perdure.runs.functions.checking import problems_of
from perdure.runs.functions.keys import Key
from perdure.runs.functions.patterns import PATTERN_LENGTH_MAX, TEXT_LENGTH_MAX, compiled
from perdure.runs.functions.schemas import (
    check_answer,
    schema_of,
)


@dataclass
class Breaking:
    x: int

    def __post_init__(self) -> None:
        raise KeyError("of its own")


# --- answers by type


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


# --- answers by JSON Schema


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


# --- nothing hangs


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
