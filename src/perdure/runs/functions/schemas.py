"""JSON Schemas for tools (what a model may pass) and for questions (what a person may answer), and their checks.

A value is checked against the schema first, for reasons in one language, and then converted to the type (`forms`). So
nothing is guessed: "yes" is no bool and 1 is no string. The one exception: a number that a model wrote as text is
taken as a number, if only a number will do.

A question's schema is stored as JSON, and whoever answers may not have the type: then `check_answer` takes the schema.
Checks that only a class has (`__post_init__`, validators) are made when the run takes the answer.
"""

from __future__ import annotations

import enum
import math
import re
import types
import typing
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgspec

from perdure.errors import AnswerRefused, UsageError
from perdure.runs.functions.checking import Problem, check_schema, problems_of, show
from perdure.runs.functions.forms import Refused, checked, plain, schema_of_type
from perdure.runs.functions.inputs import annotations_of, is_key, receiver_of, signature_of

_PROBLEMS_MAX: Final = 10
_SECTION: Final = r"^(?:(?:Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?): *$|:\w)"


class Parameter(NamedTuple):
    """A parameter that a model may give."""

    name: str
    kind: Any  # its type
    schema: dict[str, Any]
    required: bool
    form: Literal["one", "rest", "extra"]  # rest: *args, extra: **kwargs


def parameters_schema(fn: Callable[..., Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """The JSON Schema of a function's parameters, as the APIs of models want it.

    Without `self`, the idempotency key, and what is skipped. `*args` is a list under its name. Call the function with
    the arguments by `Binder.restore`.
    """
    parameters = _parameters(fn, frozenset(skip))
    # Copies: those are kept for the next call, and whoever gets these may change them.
    schemas = {parameter.name: deepcopy(parameter.schema) for parameter in parameters}
    extra = [schemas.pop(parameter.name) for parameter in parameters if parameter.form == "extra"]
    return {
        "type": "object",
        "properties": schemas,
        "required": [parameter.name for parameter in parameters if parameter.required],
        "additionalProperties": extra[0] if extra else False,
    }


def coerce_arguments(fn: Callable[..., Any], raw: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """A model's arguments as the types of the parameters. ValueError with one sentence for each problem."""
    if not isinstance(raw, dict):
        raise ValueError(f"the arguments must be an object, not {show(raw)}")
    parameters = {parameter.name: parameter for parameter in _parameters(fn, frozenset(skip))}
    extra = next((parameter for parameter in parameters.values() if parameter.form == "extra"), None)
    if extra is not None:
        del parameters[extra.name]
    problems = [
        Problem(parameter.name, "is missing")
        for parameter in parameters.values()
        if parameter.required and parameter.name not in raw
    ]
    coerced: dict[str, Any] = {}
    for name in [*(name for name in parameters if name in raw), *(name for name in raw if name not in parameters)]:
        parameter = parameters.get(name, extra)
        if parameter is None:
            problems.append(Problem(name, f"is no argument; the arguments are: {', '.join(parameters) or 'none'}"))
            continue
        try:
            value = _number_from_text(raw[name], parameter.schema)
            coerced[name] = checked(value, parameter.kind, parameter.schema, name)
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise ValueError(_joined(problems, "\n"))
    return coerced


def check_answer(value: Any, schema: Any) -> Any:
    """The answer as the type says, or as plain JSON if `schema` is a JSON Schema. AnswerRefused says where and why."""
    known = schema_of(schema)
    try:
        given = plain(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise AnswerRefused(f"answer: cannot be given as JSON: {error}") from error
    try:
        if not isinstance(schema, dict):
            return checked(given, schema, known, "answer")
        problems = problems_of(given, known, "answer")
    except Refused as refused:
        problems = refused.problems
    if problems:
        raise AnswerRefused(_joined(problems, "; "))
    return given


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type, as plain JSON without references. A schema is checked, and given back as a copy.

    UsageError if the type has no form in JSON, or the schema has keywords by which nothing would be checked.
    """
    if not isinstance(kind, dict):
        return schema_of_type(kind)
    check_schema(kind)
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kind))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema is not JSON: {error}") from error
    return copied


def description_of(fn: Callable[..., Any]) -> str:
    """What the docstring says about the function, without the sections about its parameters and its result."""
    import inspect

    text = inspect.getdoc(fn) or ""
    end = re.search(_SECTION, text, re.MULTILINE)
    return (text[: end.start()] if end else text).strip()


def described(doc: str) -> dict[str, str]:
    """What a docstring says about each parameter: Google's "Args:" section, and `:param x:`."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    section, item = -1, -1  # the indentation of "Args:", and of its items
    for line in doc.expandtabs().splitlines():
        indent, words = len(line) - len(line.lstrip()), line.strip()
        if field := re.match(r":param\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)", words):
            section, current = -1, found.setdefault(field[1], [field[2]])
            item = indent
        elif re.fullmatch(r"(?:Args|Arguments|Parameters):", words):
            section, item, current = indent, -1, None
        elif not words:
            current = current if section >= 0 else None
        elif section >= 0 and indent <= section:
            section, current = -1, None
        elif section >= 0 and (item < 0 or indent <= item):
            item = indent
            named = re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", words)
            current = found.setdefault(named[1], [named[2]]) if named else None
        elif current is not None and indent > item:
            current.append(words)
        else:
            current = None
    return {name: text for name, lines in found.items() if (text := " ".join(lines).strip())}


@lru_cache(maxsize=256)
def _parameters(fn: Callable[..., Any], skip: frozenset[str]) -> tuple[Parameter, ...]:
    import inspect

    signature = signature_of(fn)
    annotations = annotations_of(fn, signature)
    texts = described(inspect.getdoc(fn) or "")
    receiver = receiver_of(fn, signature)
    made: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = annotations.get(name, Any)
        if name in skip or name == receiver or is_key(kind):
            continue
        if isinstance(kind, str):
            raise UsageError(
                f"{fn.__name__}: the type {kind!r} of its parameter {name!r} is not known; import or define it at the "
                f"top of the module, also at run time"
            )
        forms: dict[Any, Any] = {parameter.VAR_POSITIONAL: "rest", parameter.VAR_KEYWORD: "extra"}
        form = forms.get(parameter.kind, "one")
        if form == "rest":
            kind = types.GenericAlias(list, (kind,))
        elif parameter.default is None and kind is not Any:
            kind = typing.Optional[kind]  # noqa: UP045  # `x: str = None` is meant so, and shown as the default
        try:
            schema = schema_of_type(kind, for_models=True)
        except UsageError as error:
            raise UsageError(f"{fn.__name__}: the parameter {name!r}: {error}") from error
        if name in texts:
            schema.setdefault("description", texts[name])
        required = form == "one" and parameter.default is parameter.empty
        if form == "one" and not required:
            schema |= _default(parameter.default)
        made.append(Parameter(name, kind, schema, required, form))
    return tuple(made)


def _default(value: Any) -> dict[str, Any]:
    """The default for the schema, if it is plain: others are objects that a model need not know."""
    value = value.value if isinstance(value, enum.Enum) else value
    if type(value) is float and not math.isfinite(value):
        return {}
    return {"default": value} if type(value) in (str, int, float, bool, type(None)) else {}


def _number_from_text(value: Any, schema: dict[str, Any]) -> Any:
    """The number that a model wrote as text, if only a number will do."""
    parts = [schema, *schema.get("anyOf", ())]
    kinds = {part.get("type") for part in parts if "anyOf" not in part}
    if not isinstance(value, str) or not kinds <= {"integer", "number", "null"}:
        return value
    if "integer" in kinds and re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
        return int(value)
    if "number" in kinds and re.fullmatch(r"[+-]?\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,2})?", value, re.ASCII):
        return float(value)
    return value


def _joined(problems: list[Problem], between: str) -> str:
    more = len(problems) - _PROBLEMS_MAX
    return between.join(map(str, problems[:_PROBLEMS_MAX])) + (f"{between}and {more} more" if more > 0 else "")
