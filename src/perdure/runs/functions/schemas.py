"""JSON Schemas for tools (what a model may pass) and for questions (what a person may answer), and their checks.

Types are msgspec's: `msgspec.json.schema` and `msgspec.convert`. What msgspec does not know (pydantic models, unions of
classes) is left to pydantic's `TypeAdapter`. A question's schema is stored as JSON, and the process that answers may
not have the type: an answer is checked by the `jsonschema` package (the extra `perdure[schema]`).
"""

from __future__ import annotations

import enum
import math
import re
import types
import typing
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import msgspec

from perdure.errors import AnswerRefused, UsageError
from perdure.runs.functions.inputs import annotations_of, is_key, receiver_of, signature_of
from perdure.values.showing import shown

_SECTION: Final = r"^(?:(?:Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?): *$|:\w)"
_RESULTS: Final = r"^(?:Returns?|Raises|Yields|Examples?|Notes?): *$"
# "name: text", "name (type): text" and ":param name: text", with the lines below that are indented further.
_ABOUT: Final = (
    r"^([ \t]*)(?::param\s+(?:[^:\n]*\s)?)?\*{0,2}(\w+)(?:\s*\([^)\n]*\))?\s*:[ \t]*(\S.*(?:\n\1[ \t]+\S.*)*)"
)


class Parameter(NamedTuple):
    """A parameter that a model may give."""

    name: str
    convert: Callable[[Any], Any]  # to its type
    schema: dict[str, Any]
    required: bool
    is_extra: bool  # **kwargs


def parameters_schema(fn: Callable[..., Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """The JSON Schema of a function's parameters, as the APIs of models want it.

    Without `self`, the idempotency key, and what is skipped. `*args` is a list under its name. Call the function with
    the arguments by `Binder.restore`.
    """
    parameters = _parameters(fn, frozenset(skip))
    definitions: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for parameter in parameters:
        schema = schemas[parameter.name] = deepcopy(parameter.schema)  # the caller may change it
        for name, definition in schema.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise UsageError(f"{fn.__name__}: two of the types of its parameters are called {name!r}")
    extra = [schemas.pop(parameter.name) for parameter in parameters if parameter.is_extra]
    return {
        "type": "object",
        "properties": schemas,
        "required": [parameter.name for parameter in parameters if parameter.required],
        "additionalProperties": extra[0] if extra else False,
        **({"$defs": definitions} if definitions else {}),
    }


def coerce_arguments(fn: Callable[..., Any], raw: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """A model's arguments as the types of the parameters. ValueError with one sentence for each problem.

    A number or a bool that a model wrote as text is taken as one, where a text will not do.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"the arguments must be an object, not {shown(raw)}")
    parameters = {parameter.name: parameter for parameter in _parameters(fn, frozenset(skip))}
    extra = next((parameters.pop(name) for name, parameter in list(parameters.items()) if parameter.is_extra), None)
    problems = [f"{name}: is missing" for name, found in parameters.items() if found.required and name not in raw]
    coerced: dict[str, Any] = {}
    for name in [*(name for name in parameters if name in raw), *(name for name in raw if name not in parameters)]:
        parameter = parameters.get(name, extra)
        if parameter is None:
            problems.append(f"{name}: is no argument; the arguments are: {', '.join(parameters) or 'none'}")
            continue
        try:
            coerced[name] = parameter.convert(raw[name])
        except Exception as error:  # a class may have checks of its own, which raise whatever they like
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return coerced


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type; a JSON Schema is checked, and given back as a copy. UsageError if it is neither."""
    if not isinstance(kind, dict):
        return _form_of(kind)[0]
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kind))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema is not JSON: {error}") from error
    _validator(copied)
    return copied


def check_answer(value: Any, schema: dict[str, Any]) -> Any:
    """The answer as plain JSON, if it fits the JSON Schema. AnswerRefused says where and why it does not."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    validator = _validator(schema)
    try:
        given = msgspec.json.decode(msgspec.json.encode(value))
        problem = best_match(validator.iter_errors(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise AnswerRefused(f"answer: cannot be given as JSON: {error}") from error
    except Unresolvable as error:
        raise UsageError(f"the schema of the question refers to what is not in it: {error}") from error
    if problem is not None:
        raise AnswerRefused(f"answer{problem.json_path.removeprefix('$')}: {problem.message}")
    return given


def description_of(fn: Callable[..., Any]) -> str:
    """What the docstring says about the function, without the sections about its parameters and its result."""
    import inspect

    text = inspect.getdoc(fn) or ""
    end = re.search(_SECTION, text, re.MULTILINE)
    return (text[: end.start()] if end else text).strip()


def described(doc: str) -> dict[str, str]:
    """What a docstring says about each parameter: Google's "Args:" section, and `:param x:`."""
    before = re.split(_RESULTS, doc.expandtabs(), maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(_ABOUT, before, re.MULTILINE)
    return {name: " ".join(text.split()) for _, name, text in found if text.strip()}


def _validator(schema: dict[str, Any]) -> Any:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise UsageError("questions with a schema need the package jsonschema: pip install perdure[schema]") from error
    made: Any = validator_for(schema, default=Draft202012Validator)
    try:
        made.check_schema(schema)
    except SchemaError as error:
        raise UsageError(f"this is no JSON Schema: {error.json_path}: {error.message}") from error
    # An empty registry: a reference to another document is never fetched.
    return made(schema, registry=Registry(), format_checker=made.FORMAT_CHECKER)


def _form_of(kind: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """The JSON Schema of a type, and what converts plain JSON to it."""
    if not _is_for_pydantic(kind):
        try:
            return msgspec.json.schema(kind), partial(msgspec.convert, type=kind, strict=False)
        except TypeError as error:
            refusal = str(error).splitlines()[-1]
    else:
        refusal = "it needs pydantic"
    try:
        from pydantic import TypeAdapter

        adapter = TypeAdapter(kind)
        return adapter.json_schema(), adapter.validate_python
    except Exception as error:  # pydantic has many reasons; not being installed is one of them
        raise UsageError(f"{shown(kind)} has no form in JSON: {refusal}") from error


def _is_for_pydantic(kind: Any) -> bool:
    """Whether a note on the type is pydantic's: msgspec would pass over it."""
    notes = getattr(kind, "__metadata__", ())
    return any(type(note).__module__.partition(".")[0] in ("pydantic", "annotated_types") for note in notes) or any(
        _is_for_pydantic(part) for part in typing.get_args(kind)
    )


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
        about = next((note for note in getattr(kind, "__metadata__", ()) if isinstance(note, str)), texts.get(name))
        if parameter.kind is parameter.VAR_POSITIONAL:
            kind = types.GenericAlias(list, (kind,))
        elif parameter.default is None and kind is not Any:
            kind = typing.Optional[kind]  # noqa: UP045  # `x: str = None` is meant so, and shown as the default
        try:
            schema, convert = _form_of(kind)
        except UsageError as error:
            raise UsageError(f"{fn.__name__}: the parameter {name!r}: {error}") from error
        if about:
            schema.setdefault("description", about)
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        has_default = parameter.default is not parameter.empty
        if has_default:
            schema |= _default(parameter.default)
        is_extra = parameter.kind is parameter.VAR_KEYWORD
        made.append(Parameter(name, convert, schema, is_one and not has_default, is_extra))
    return tuple(made)


def _default(value: Any) -> dict[str, Any]:
    """The default for the schema, if it is plain: others are objects that a model need not know."""
    value = value.value if isinstance(value, enum.Enum) else value
    if type(value) is float and not math.isfinite(value):
        return {}
    return {"default": value} if type(value) in (str, int, float, bool, type(None)) else {}
