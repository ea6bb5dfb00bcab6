"""The forms of Python types in JSON: the schema of a type, and a plain value as that type.

The leaves, the shapes of classes and the conversion are msgspec's. Here is what it lacks: descriptions, pydantic
models, several classes in one union, and schemas without references, which the APIs of models want. A class that
holds itself is described once; inside of itself it is just an object, and only the conversion checks it there.

Must never happen here: pydantic is imported (it is used if it is there already).
"""

from __future__ import annotations

import collections.abc
import datetime
import enum
import sys
import types
import typing
from typing import Any, Final, Literal

import msgspec

from perdure.errors import UsageError
from perdure.runs.functions.checking import UNSUPPORTED, Problem, problems_of, subschemas
from perdure.runs.functions.patterns import compiled

_UNIONS: Final = (typing.Union, types.UnionType)
_WRAPPERS: Final = (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar)
_SETS: Final = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)
_LISTS: Final = (
    list,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_DICTS: Final = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class Refused(Exception):
    """A value is not of the type. `problems` say where and why."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def schema_of_type(kind: Any, *, for_models: bool = False) -> dict[str, Any]:
    """The JSON Schema of a type, without references. UsageError if it has no form in JSON.

    For models it is said in the words that all their APIs know; a tuple then is a list of any of its types.
    """
    made: dict[str, Any] = _tidied(_schema(kind, ()), for_models)
    return made


def plain(value: Any) -> Any:
    """A value as JSON has it. TypeError, ValueError or RecursionError if it cannot be."""
    return _with_lists(msgspec.to_builtins(value, str_keys=True, enc_hook=_dumped))


def _with_lists(value: Any) -> Any:
    """The value with lists for tuples, which msgspec leaves as they are."""
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    return {name: _with_lists(item) for name, item in value.items()} if isinstance(value, dict) else value


def checked(value: Any, kind: Any, schema: dict[str, Any], path: str) -> Any:
    """A plain value as the type, whose schema this is. Raises Refused."""
    problems = problems_of(value, schema, path)
    if problems:
        raise Refused(problems)
    try:
        return _converted(value, kind)
    except UsageError:
        raise
    except Exception as error:  # a class may have checks of its own, which raise whatever they like
        raise Refused(_said(error, path)) from error


def _unwrapped(kind: Any) -> Any:
    """The type behind a NewType, an alias, or a mark of a field."""
    while True:
        if isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif type(kind).__name__ == "TypeAliasType":
            kind = kind.__value__
        elif isinstance(kind, typing.TypeVar):
            kind = kind.__bound__ or Any
        elif typing.get_origin(kind) in _WRAPPERS:
            kind = typing.get_args(kind)[0]
        else:
            return kind


def _schema(kind: Any, outer: tuple[Any, ...]) -> dict[str, Any]:
    """The schema of a type; `outer` are the classes around it."""
    kind = _unwrapped(kind)
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    adapter = _adapter(kind)
    if adapter is not None:
        return _inlined(adapter.json_schema())
    if kind in (Any, object):
        return {}
    if origin is typing.Annotated:
        return _annotated(kind, outer)
    if origin in _UNIONS:
        return _union([_schema(arg, outer) for arg in args])
    if origin is Literal:
        return _choice(kind, args)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        _leaf(kind)  # for its refusal of values that cannot be converted back
        return _choice(kind, tuple(member.value for member in kind))
    if origin in _LISTS or origin in _SETS:
        unique = {"uniqueItems": True} if origin in _SETS else {}
        return {"type": "array", "items": _schema(args[0], outer) if args else {}, **unique}
    if origin is tuple:
        return _tuple(args, outer)
    if origin in _DICTS:
        return {"type": "object", "additionalProperties": _schema(args[1], outer) if args else True}
    if _has_fields(origin):
        return _class(kind, origin, outer)
    return _leaf(kind)


def _annotated(kind: Any, outer: tuple[Any, ...]) -> dict[str, Any]:
    base, *notes = typing.get_args(kind)
    metas = [note for note in notes if isinstance(note, msgspec.Meta)]
    schema = _schema(base, outer)
    if metas:
        # The constraints, where msgspec puts them: in a union they belong to one of its parts.
        without, constrained = _leaf(base), _leaf(kind)
        schema |= {name: part for name, part in constrained.items() if part != without.get(name)}
    texts = [note for note in notes if isinstance(note, str)]
    return schema | ({"description": " ".join(texts)} if texts else {})


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    distinct = [part for at, part in enumerate(parts) if part not in parts[:at]]
    texts = [part["description"] for part in distinct if "description" in part and "properties" not in part]
    if len(texts) == 1:
        # `Annotated[str, "…"] | None` describes the parameter, not one of its forms.
        distinct = [part if part.get("properties") else _without(part, "description") for part in distinct]
        return {"anyOf": distinct, "description": texts[0]}
    return {"anyOf": distinct} if len(distinct) > 1 else distinct[0]


def _without(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name}


def _choice(kind: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    names = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
    kinds = {type(value) for value in values}
    if not kinds <= names.keys():
        raise UsageError(f"{_name(kind)} has values that are neither text nor integers, and so no form in JSON")
    one = {"type": names[type(values[0])]} if len(kinds) == 1 else {}
    return {**one, "enum": list(values)}


def _tuple(args: tuple[Any, ...], outer: tuple[Any, ...]) -> dict[str, Any]:
    if not args or args[-1] is Ellipsis:
        return {"type": "array", "items": _schema(args[0], outer) if args else {}}
    size = {"minItems": len(args), "maxItems": len(args)}
    return {"type": "array", "prefixItems": [_schema(arg, outer) for arg in args], **size}


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (
        hasattr(kind, "__dataclass_fields__")
        or issubclass(kind, msgspec.Struct)
        or typing.is_typeddict(kind)
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


def _class(kind: Any, cls: Any, outer: tuple[Any, ...]) -> dict[str, Any]:
    """The schema of a class with fields: msgspec's, and what the annotations of its fields say beyond it."""
    if cls in outer:
        return {"type": "object", "title": cls.__name__}
    schema = _leaf(kind)
    fields = schema.get("properties")
    if fields is None:
        return schema  # a tuple with names, or a Struct that is written as a list
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:  # whatever the evaluation of somebody's annotation raises
        raise UsageError(f"the fields of {_name(cls)} are not known: {error}") from error
    names = dict.fromkeys(hints)
    if issubclass(cls, msgspec.Struct):
        names |= {field.name: field.encode_name for field in msgspec.structs.fields(cls)}
    for name, hint in hints.items():
        known = fields.get(names[name] or name)
        if known is not None and not typing.get_args(kind):  # of Box[int] only msgspec knows what is in it
            rest = {key: known[key] for key in ("default",) if key in known}
            fields[names[name] or name] = {**_schema(hint, (*outer, cls)), **rest}
    # What a class does not have would be dropped without a word.
    return {**schema, "additionalProperties": False}


def _leaf(kind: Any) -> dict[str, Any]:
    """The schema that msgspec makes."""
    try:
        schema = _inlined(msgspec.json.schema(kind, schema_hook=_hooked))
    except (TypeError, NameError) as error:
        raise UsageError(f"{_name(kind)} has no form in JSON: {str(error).splitlines()[-1]}") from error
    return _with_formats(kind, schema)


def _with_formats(kind: Any, schema: dict[str, Any]) -> dict[str, Any]:
    # msgspec is silent where a zone is optional; a model must know nevertheless that it is a time.
    base = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    form = "date-time" if base is datetime.datetime else "time" if base is datetime.time else None
    return {**schema, "format": form} if form else schema


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions where they are referred to."""
    definitions = schema.get("$defs", {})

    def inline(part: Any, inside: tuple[str, ...]) -> Any:
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).rpartition("/")[2]
        own = _without(_without(part, "$ref"), "$defs")
        if not name:
            return subschemas(own, lambda inner: inline(inner, inside))
        if name in inside:
            return {"type": "object", "title": name}
        return {**inline(definitions[name], (*inside, name)), **own}

    made: dict[str, Any] = inline(schema, ())
    return made


def _tidied(schema: Any, for_models: bool) -> Any:
    """The schema without what is not checked by it; the conversion checks that."""
    if not isinstance(schema, dict):
        return schema
    made = {name: value for name, value in schema.items() if name not in UNSUPPORTED and name != "discriminator"}
    made = subschemas(made, lambda part: _tidied(part, for_models))
    if for_models and made.get("type") == "array":
        # All APIs know `items`, and some want it; few know `prefixItems`.
        parts = made.pop("prefixItems", [])
        made["items"] = _union(parts) if parts else made.get("items") or {}
    if "pattern" in made:
        try:
            compiled(made["pattern"])
        except UsageError:
            del made["pattern"]
    return made


def _adapter(kind: Any) -> Any:
    """pydantic's adapter for its models, and for types with its notes; None for all else, and without pydantic."""
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is None:
        return None
    if typing.get_origin(kind) is typing.Annotated:
        notes = typing.get_args(kind)[1:]
        ours = any(type(note).__module__.partition(".")[0] in ("pydantic", "annotated_types") for note in notes)
    else:
        ours = isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
    return pydantic.TypeAdapter(kind) if ours else None


def _hooked(kind: Any) -> dict[str, Any]:
    """For msgspec: the schema of a type that it does not know."""
    adapter = _adapter(kind)
    if adapter is not None:
        return _inlined(adapter.json_schema())
    if kind is object:
        return {}
    if isinstance(kind, type) and issubclass(kind, str):
        return {"type": "string"}
    raise NotImplementedError


def _dumped(value: Any) -> Any:
    """For msgspec: a value of a type that it does not know, as one that it does."""
    if _adapter(type(value)) is not None:
        return value.model_dump(mode="json")
    raise TypeError(f"a {_name(type(value))} is no JSON")


def _made(kind: Any, value: Any) -> Any:
    """For msgspec: a value of a type that it does not know, from a plain one."""
    adapter = _adapter(kind)
    if adapter is not None:
        try:
            return adapter.validate_python(value)
        except ValueError as error:
            raise ValueError("; ".join(str(problem) for problem in _said(error, _name(kind)))) from error
    if isinstance(kind, type) and issubclass(kind, str) and isinstance(value, str):
        return kind(value)
    raise NotImplementedError


def _converted(value: Any, kind: Any) -> Any:
    """A plain value that fits the schema of a type, as that type. ValueError if the type's own checks refuse it."""
    adapter = _adapter(kind)
    if adapter is not None:
        return adapter.validate_python(value)
    try:
        # Not strict, because types were compared already: now 3.0 may be an int, and the key "3" too.
        return msgspec.convert(value, kind, strict=False, str_keys=True, dec_hook=_made)
    except (TypeError, NotImplementedError) as error:
        return _by_parts(value, _unwrapped(kind), error)


def _by_parts(value: Any, kind: Any, error: Exception) -> Any:
    """The same for types that msgspec refuses as a whole: mostly unions of several classes."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _converted(value, args[0])
    if origin in _UNIONS:
        fitting = [arg for arg in args if not problems_of(value, schema_of_type(arg), "")]
        for arg in fitting[:-1]:
            try:
                return _converted(value, arg)
            except Exception:  # as in `checked`
                continue
        return _converted(value, fitting[-1])
    if origin in _LISTS or origin in _SETS or (origin is tuple and args[-1] is Ellipsis):
        items = [_converted(item, args[0]) for item in value]
        made: Any = origin if origin in (list, tuple, set, frozenset) else set if origin in _SETS else list
        return made(items)
    if origin is tuple:
        return tuple(_converted(item, arg) for item, arg in zip(value, args, strict=True))
    if origin in _DICTS:
        return {_converted(name, args[0]): _converted(item, args[1]) for name, item in value.items()}
    raise UsageError(f"a value of type {_name(kind)} cannot be made from JSON: {error}") from error


def _said(error: Exception, path: str) -> list[Problem]:
    """The problems that msgspec, pydantic or a class itself found, with their paths."""
    if type(error).__module__.startswith("pydantic") and hasattr(error, "errors"):
        return [
            Problem(path + "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in item["loc"]), item["msg"])
            for item in error.errors(include_url=False, include_context=False, include_input=False)
        ]
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    reason, _, where = said.rpartition(" - at `$")
    return [Problem(path + where.rstrip("`"), reason)] if reason else [Problem(path, said)]


def _name(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
