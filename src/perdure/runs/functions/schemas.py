"""JSON Schemas for the arguments of tools and for the answers to questions, and checks against them.

msgspec makes the schemas and converts the values; pydantic does so for types that msgspec does not support. A
question's schema is stored as JSON, because the process that answers may not have the type. Answers are checked by the
`jsonschema` package (the extra `schema`). A process without it cannot ask a question with a schema.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec

from perdure.errors import AnswerRefused, ExtraMissing, UsageError
from perdure.runs.functions.inputs import annotations_of, is_key, receiver_of, signature_of
from perdure.values.safe_repr import shown


class Form(NamedTuple):
    """The parameters of a function that a model may pass."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    convert: Callable[[Any], Any]  # returns an object with the parameters as attributes


def parameters_schema(fn: Callable[..., Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a function's parameters, in the form that model APIs take.

    It omits `self`, the idempotency key, `*args`, `**kwargs` and the parameters in `skip`. The text in
    `Annotated[str, "…"]` describes a parameter.
    """
    return deepcopy(_form(fn, frozenset(skip)).schema)  # the caller may change it


def coerce_arguments(fn: Callable[..., Any], raw: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """Convert a model's arguments to the types of the parameters. Raises ValueError.

    A number or a bool written as text is converted, unless the parameter accepts text.
    """
    form = _form(fn, frozenset(skip))
    try:
        converted = form.convert(raw)
    except Exception as error:  # checks in a user's class may raise any exception
        raise ValueError(f"{error}; the arguments are: {', '.join(form.names) or 'none'}") from error
    return {name: getattr(converted, name) for name in form.names if name in raw}


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, or a copy of a JSON Schema.

    Raises UsageError if answers cannot be checked against it."""
    if not isinstance(kind, dict):
        if find_spec("jsonschema") is None:  # importing it is slow
            raise ExtraMissing("a question with a schema", "schema")
        return _schema(kind)
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kind))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema is not JSON: {error}") from error
    _validator(copied)
    return copied


def check_answer(value: Any, schema: dict[str, Any]) -> Any:
    """Return the answer as plain JSON. Raise AnswerRefused, with place and reason, if it does not fit the schema."""
    validator = _validator(schema)
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        plain = msgspec.json.decode(msgspec.json.encode(value))
        problem = best_match(validator.iter_errors(plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise AnswerRefused(f"answer: cannot be given as JSON: {error}") from error
    except Unresolvable as error:
        raise UsageError(f"the schema of the question refers to what is not in it: {error}") from error
    if problem is not None:
        raise AnswerRefused(f"answer{problem.json_path.removeprefix('$')}: {problem.message}")
    return plain


def _validator(schema: dict[str, Any]) -> Any:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise ExtraMissing("a question with a schema", "schema") from error
    validator: Any = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise UsageError(f"this is no JSON Schema: {error.json_path}: {error.message}") from error
    # An empty registry, so that references to other documents are never fetched.
    return validator(schema, registry=Registry(), format_checker=validator.FORMAT_CHECKER)


def _schema(kind: Any) -> dict[str, Any]:
    try:
        if not _needs_pydantic(kind):
            return msgspec.json.schema(kind)
        from pydantic import TypeAdapter

        return TypeAdapter(kind).json_schema()
    except Exception as error:  # pydantic raises many kinds, and may not be installed
        raise UsageError(f"{shown(kind)} has no form in JSON: {str(error).splitlines()[0]}") from error


def _needs_pydantic(kind: Any) -> bool:
    """Return whether msgspec does not support the type, or would ignore its pydantic annotations."""
    if any(type(note).__module__.partition(".")[0] in ("pydantic", "annotated_types") for note in _notes(kind)):
        return True
    try:
        msgspec.json.schema(kind)
    except TypeError:
        return True
    return any(_needs_pydantic(part) for part in typing.get_args(kind) if isinstance(part, type) or _notes(part))


def _notes(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())


@lru_cache(maxsize=256)
def _form(fn: Callable[..., Any], skip: frozenset[str]) -> Form:
    signature = signature_of(fn)
    annotations, receiver = annotations_of(fn, signature), receiver_of(fn, signature)
    kinds: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        kind = annotations.get(name, Any)
        is_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_many or name in skip or name == receiver or is_key(kind):
            continue
        if isinstance(kind, str):
            raise UsageError(
                f"{fn.__name__}: the type {kind!r} of its parameter {name!r} is not known; import or define it at the "
                f"top of the module, also at run time"
            )
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
            if parameter.default is None and kind is not Any:
                kind = typing.Optional[kind]  # noqa: UP045  # `x: str = None` means Optional
        try:
            _schema(kind)
        except UsageError as error:
            raise UsageError(f"{fn.__name__}: the parameter {name!r}: {error}") from error
        kinds[name] = kind
    schema, convert = (_by_pydantic if any(map(_needs_pydantic, kinds.values())) else _by_msgspec)(kinds, defaults)
    form = {key: schema[key] for key in ("type", "properties", "required", "$defs") if schema.get(key) is not None}
    return Form(tuple(kinds), {**form, "required": form.get("required", []), "additionalProperties": False}, convert)


def _by_msgspec(kinds: dict[str, Any], defaults: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    fields: list[Any] = []
    for name, kind in kinds.items():
        about = next((note for note in _notes(kind) if isinstance(note, str)), None)
        annotated = kind if about is None else typing.Annotated[kind, msgspec.Meta(description=about)]
        fields.append((name, annotated, _default(defaults[name])) if name in defaults else (name, annotated))
    struct = msgspec.defstruct("Parameters", fields, kw_only=True, forbid_unknown_fields=True)
    schema = msgspec.json.schema(struct)
    definitions = schema["$defs"]
    own = definitions.pop(schema["$ref"].rpartition("/")[2])
    return {**own, "$defs": definitions or None}, partial(msgspec.convert, type=struct, strict=False)


def _default(value: Any) -> Any:
    """Return a plain default as it is. Hide any other default from the schema, because a model cannot use it."""
    is_plain = isinstance(value, enum.Enum) or type(value) in (str, int, float, bool, type(None))
    return value if is_plain else msgspec.field(default_factory=lambda: value)


def _by_pydantic(kinds: dict[str, Any], defaults: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    from pydantic import ConfigDict, Field, create_model

    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        about = next((note for note in _notes(kind) if isinstance(note, str)), None)
        fields[name] = (kind, Field(defaults.get(name, ...), description=about))
    model = create_model("Parameters", __config__=ConfigDict(extra="forbid"), **fields)
    return model.model_json_schema(), model.model_validate
