"""A JSON value against a JSON Schema: every problem with its path and a reason that a person or a model can act on.

The keywords that people use are checked. A schema with one that is not supported is refused when the question is
asked (`check_schema`), so that an answer never passes because nobody looked. Formats of dates, UUIDs and decimals are
checked too: what is accepted here must be convertible later, in the run.

Must never happen here: a check that does not end. Patterns take linear time (`patterns`), and the work is counted.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from perdure.errors import UsageError
from perdure.runs.functions.patterns import TEXT_LENGTH_MAX, compiled

CHECKS_MAX: Final = 1_000_000

TYPES: Final = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
FORMATS: Final[dict[str, Any]] = {
    "date-time": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "uuid": UUID,
    "decimal": Decimal,
}
# Where schemas stand in a schema.
ONE: Final = ("items", "additionalProperties", "not", "propertyNames")
MANY: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED: Final = ("properties", "$defs", "definitions")

# The keywords that are checked, with what they hold.
_SHAPES: Final[dict[str, tuple[type, ...]]] = {
    "type": (str, list),
    "enum": (list,),
    "const": (object,),
    "required": (list,),
    "nullable": (bool,),
    "uniqueItems": (bool,),
    "pattern": (str,),
    "$ref": (str,),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (int, float, bool)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), (int,)),
    **dict.fromkeys(ONE, (dict, bool)),
    **dict.fromkeys(MANY, (list,)),
    **dict.fromkeys(NAMED, (dict,)),
}
UNSUPPORTED: Final = frozenset(
    {"if", "then", "else", "patternProperties", "contains", "minContains", "maxContains", "additionalItems"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$recursiveRef"}
)


class Problem(NamedTuple):
    """What is wrong with a part of a value. `wanted` is set if its type is."""

    path: str
    reason: str
    wanted: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class TooMuchWork(Exception):
    """The value, or the schema on it, would take too long to check."""


def problems_of(value: Any, schema: Any, path: str) -> list[Problem]:
    """All that is wrong with a plain JSON value; nothing if it is as the schema says. The schema must be checked."""
    try:
        return list(_Check(schema).check(value, schema, path))
    except (TooMuchWork, RecursionError):
        return [Problem(path, "is too large or too deeply nested to be checked")]


def check_schema(schema: Any, where: str = "schema") -> None:
    """UsageError if the schema is not one, or has keywords that would not be checked."""
    try:
        _check_schema(schema, where, schema)
    except RecursionError as error:
        raise UsageError(f"{where} is nested too deeply") from error


def subschemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with each of the schemas in it changed."""
    made = dict(schema)
    for name in ONE:
        if isinstance(made.get(name), dict):
            made[name] = change(made[name])
    for name in MANY:
        if name in made:
            made[name] = [change(part) for part in made[name]]
    for name in NAMED:
        if name in made:
            made[name] = {key: change(part) for key, part in made[name].items()}
    return made


def show(value: Any) -> str:
    """A value as JSON, cut if it is long."""
    try:
        text = msgspec.json.encode(value).decode()
    except Exception:  # an integer with too many digits, or whatever else has no text
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"


def part_of(path: str, key: str) -> str:
    return f"{path}.{key}" if key.isidentifier() and len(key) <= 80 else f"{path}[{show(key)}]"


class _Check:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.left = CHECKS_MAX

    def check(self, value: Any, schema: Any, path: str) -> Iterator[Problem]:
        self.left -= 1
        if self.left < 0:
            raise TooMuchWork
        if schema is True:
            return
        if schema is False:
            yield Problem(path, "is not allowed")
            return
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(path, f"must be a finite number, not {value!r}")
            return
        if value is None and schema.get("nullable") is True:
            return
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(value, kind) for kind in kinds):
            yield _wrong_type(path, [TYPES[kind] for kind in kinds], value)
            return  # what else the schema says is about another type
        if "$ref" in schema:
            yield from self.check(value, _target(self.root, schema["$ref"]), path)
        yield from _choices(value, schema, path)
        if isinstance(value, str):
            yield from _string(value, schema, path)
        elif isinstance(value, list):
            yield from self._list(value, schema, path)
        elif isinstance(value, dict):
            yield from self._object(value, schema, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield from _number(value, schema, path)
        yield from self._combined(value, schema, path)

    def _list(self, value: list[Any], schema: dict[str, Any], path: str) -> Iterator[Problem]:
        yield from _size(len(value), "item", schema.get("minItems"), schema.get("maxItems"), path)
        first = schema.get("prefixItems", ())
        for at, item in enumerate(value):
            yield from self.check(item, first[at] if at < len(first) else schema.get("items", True), f"{path}[{at}]")
        if schema.get("uniqueItems") is True:
            self.left -= len(value)
            texts = {msgspec.json.encode(item, order="sorted") for item in value}
            if len(texts) < len(value):
                yield Problem(path, "must not have the same item twice")

    def _object(self, value: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[Problem]:
        yield from _size(len(value), "field", schema.get("minProperties"), schema.get("maxProperties"), path)
        for name in schema.get("required", ()):
            if name not in value:
                yield Problem(part_of(path, name), "is missing")
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        for name, item in value.items():
            if "propertyNames" in schema:
                yield from self.check(name, schema["propertyNames"], f"{path}.<name {show(name)}>")
            if name not in fields and others is False:
                known = ", ".join(fields) or "none"
                yield Problem(part_of(path, name), f"is not a field here; the fields are: {known}")
            else:
                yield from self.check(item, fields.get(name, others), part_of(path, name))

    def _combined(self, value: Any, schema: dict[str, Any], path: str) -> Iterator[Problem]:
        for part in schema.get("allOf", ()):
            yield from self.check(value, part, path)
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            found = [list(self.check(value, part, path)) for part in schema[keyword]]
            fitting = found.count([])
            if not fitting:
                yield from _nearest(found, value, path)
            elif keyword == "oneOf" and fitting > 1:
                yield Problem(path, f"must have one of the allowed forms, and could have {fitting} of them")
        if "not" in schema and not list(self.check(value, schema["not"], path)):
            yield Problem(path, f"has a form that is excluded: {show(value)}")


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return kind == "number" or isinstance(value, int) or value.is_integer()
    kinds: dict[str, Any] = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[kind])


def _wrong_type(path: str, wanted: Sequence[str], value: Any) -> Problem:
    text = " or ".join(dict.fromkeys(wanted))
    return Problem(path, f"must be {text}, not {show(value)}", text)


def _choices(value: Any, schema: dict[str, Any], path: str) -> Iterator[Problem]:
    for keyword in ("enum", "const"):
        items = [schema[keyword]] if keyword == "const" and keyword in schema else schema.get(keyword)
        if items is not None and not any(_same(value, item) for item in items):
            shown = ", ".join(show(item) for item in items[:20]) + (", …" if len(items) > 20 else "")
            yield Problem(path, f"must be {'one of ' if len(items) != 1 else ''}{shown}, not {show(value)}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other  # to Python, True is 1
    return bool(one == other)


def _string(value: str, schema: dict[str, Any], path: str) -> Iterator[Problem]:
    yield from _size(len(value), "character", schema.get("minLength"), schema.get("maxLength"), path)
    if "pattern" in schema:
        if len(value) > TEXT_LENGTH_MAX:
            yield Problem(path, f"must have at most {TEXT_LENGTH_MAX:,} characters to be compared with a pattern")
        elif not compiled(schema["pattern"]).occurs_in(value):
            yield Problem(path, f"must match the pattern {schema['pattern']}, not {show(value)}")
    form = schema.get("format")
    kind = bytes if schema.get("contentEncoding") == "base64" else FORMATS.get(form if isinstance(form, str) else "")
    if kind is not None:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            yield Problem(path, f"must be a {'base64 text' if kind is bytes else form}, not {show(value)} ({error})")


def _number(value: float, schema: dict[str, Any], path: str) -> Iterator[Problem]:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    # Until draft 4, and in OpenAPI 3.0, these were true or false, and meant the bound beside them.
    above, least = (least, None) if above is True else (None if above is False else above, least)
    below, most = (most, None) if below is True else (None if below is False else below, most)
    broken = (
        ("at least", least, least is not None and value < least),
        ("at most", most, most is not None and value > most),
        ("more than", above, above is not None and value <= above),
        ("less than", below, below is not None and value >= below),
    )
    for words, bound, is_broken in broken:
        if is_broken:
            yield Problem(path, f"must be {words} {show(bound)}, not {show(value)}")
    step = schema.get("multipleOf")
    if step and not _is_multiple(value, step):
        yield Problem(path, f"must be a multiple of {show(step)}, not {show(value)}")


def _is_multiple(value: float, step: float) -> bool:
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    try:
        quotient = value / step
    except OverflowError:
        return False
    # 0.3 is a multiple of 0.1 to people, and not quite to the machine.
    return math.isclose(quotient, round(quotient), rel_tol=1e-9) if math.isfinite(quotient) else False


def _size(count: int, what: str, least: int | None, most: int | None, path: str) -> Iterator[Problem]:
    for bound, words, fits in (
        (least, "at least", least is None or count >= least),
        (most, "at most", most is None or count <= most),
    ):
        if not fits:
            yield Problem(path, f"must have {words} {bound} {what}{'' if bound == 1 else 's'}, not {count}")


def _nearest(found: list[list[Problem]], value: Any, path: str) -> Iterator[Problem]:
    """Of several forms that do not fit: the problems of the one whose type does, or all their types."""
    near = [problems for problems in found if not (problems[0].wanted and problems[0].path == path)]
    if len(near) == 1:
        yield from near[0]
    elif near:
        reasons = "; or ".join(str(problems[0]).removeprefix(f"{path}: ") for problems in near[:5])
        yield Problem(path, f"has none of the allowed forms: {reasons}")
    else:
        yield _wrong_type(path, [problems[0].wanted for problems in found], value)


def _target(root: Any, reference: str) -> Any:
    """The schema that a reference inside the same document means."""
    found = root
    if reference != "#":
        if not reference.startswith("#/"):
            raise UsageError(f'"$ref": {show(reference)} is outside of the schema; put it under "$defs"')
        for part in reference[2:].split("/"):
            try:
                found = found[part.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError):
                raise UsageError(f'"$ref": {show(reference)} is not in the schema') from None
    if not isinstance(found, dict | bool):
        raise UsageError(f'"$ref": {show(reference)} is not a schema')
    return found


def _check_schema(schema: Any, where: str, root: Any) -> None:
    import difflib

    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise UsageError(f"{where} must be a JSON Schema: an object, not {show(schema)}")
    for name, value in schema.items():
        if not isinstance(name, str) or name in UNSUPPORTED:
            raise UsageError(f"{where} has {name!r}, which is not supported: an answer would not be checked by it")
        shapes = _SHAPES.get(name)
        if shapes is None:
            # Others are remarks for somebody else, unless they are mistakes.
            same = [known for known in _SHAPES if known.lower() == name.lower()]
            if similar := same or difflib.get_close_matches(name, _SHAPES, 1, 0.85):
                raise UsageError(f"{where} has {name!r}, which is not known; did you mean {similar[0]!r}?")
        elif not isinstance(value, shapes) or (isinstance(value, bool) and not {bool, object} & set(shapes)):
            raise UsageError(f"{where}: {name!r} cannot be {show(value)}")
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in TYPES:
            raise UsageError(f"{where}: there is no type {show(kind)}; there are {', '.join(TYPES)}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise UsageError(f"{where}: 'required' is a list of names")
    if "pattern" in schema:
        compiled(schema["pattern"])
    if "$ref" in schema:
        _target(root, schema["$ref"])
    for name in ONE:
        if name in schema:
            _check_schema(schema[name], f"{where}.{name}", root)
    for name in MANY:
        for at, part in enumerate(schema.get(name, ())):
            _check_schema(part, f"{where}.{name}[{at}]", root)
    for name in NAMED:
        for key, part in schema.get(name, {}).items():
            _check_schema(part, f"{where}.{name}.{key}", root)
