"""Schemas of values, and the migrations between their versions.

`@perdure.memory.migration("profile", 1, 2)` makes a value of version 2 from one of version 1. An item that was put with
`schema="profile:1"` is read as the newest version that migrations lead to. A missing step is an error, never a misread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from perdure.errors import UnknownType, UsageError
from perdure.threads.checks import check_name

Migration = Callable[[Any], Any]
F = TypeVar("F", bound=Migration)
_SCHEMA = re.compile(r"[^:]+:[1-9][0-9]*")
_steps: dict[str, dict[int, tuple[int, Migration]]] = {}  # by name and version: the next version and its migration


def migration(name: str, old: int, new: int) -> Callable[[F], F]:
    """Register the decorated function, which makes a value of version `new` from one of version `old`."""
    check_schema(f"{name}:{old}")
    if type(old) is not int or type(new) is not int or new <= old:
        raise UsageError(f"migration({name!r}, {old!r}, {new!r}): it leads from a version to a later one")

    def add(function: F) -> F:
        _steps.setdefault(name, {})[old] = (new, function)
        return function

    return add


def migrations() -> int:
    """Return the number of migrations of this process: values that were read before may differ from those read now."""
    return sum(map(len, _steps.values()))


def check_schema(schema: object) -> str:
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
        raise UsageError(f'schema={schema!r}: a name and a version, such as "profile:2"')
    return check_name(schema, "schema")


def is_old(schema: str | None) -> bool:
    """Return whether an item of this schema is read as a later version. Raises UnknownType if a step is missing."""
    if schema is None:
        return False
    name, _, version = schema.rpartition(":")
    return int(version) < _newest(name, int(version)) and bool(steps_from(schema))


def migrated(schema: str, value: Any) -> tuple[str, Any]:
    """Return the newest version of a schema, and the value in it. Raises UnknownType if a step is missing."""
    name, _, version = schema.rpartition(":")
    for new, step in steps_from(schema):
        version, value = str(new), step(value)
    return f"{name}:{version}", value


def steps_from(schema: str) -> list[tuple[int, Migration]]:
    """Return the migrations from a schema to its newest version. Raises UnknownType if one is missing."""
    name, _, text = schema.rpartition(":")
    steps, version = _steps.get(name, {}), int(text)
    newest = _newest(name, version)
    path = []
    while version != newest:
        if version not in steps:
            missing = f'no @perdure.memory.migration("{name}", {version}, …)'
            where = "newer code wrote it" if version > newest else missing
            raise UnknownType(
                f"an item of schema {name}:{version} cannot be read as {name}:{newest}: {where}", type_name=schema
            )
        path.append(steps[version])
        version = path[-1][0]
    return path


def _newest(name: str, version: int) -> int:
    """Return the newest version that the migrations of a schema lead to, or `version` if it has none."""
    return max((new for new, _ in _steps.get(name, {}).values()), default=version)
