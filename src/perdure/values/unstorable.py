"""Errors for values that cannot be kept exactly: the path of the value, the reason, and what to do."""

from __future__ import annotations

from types import CoroutineType
from typing import Any, NoReturn

from perdure.errors import Unstorable
from perdure.values.registry import default_name

# A path is a chain, the innermost part first: (outer, kind of part, key). It is rendered only for an error.
Trail = tuple[Any, str, object] | None


def render(trail: Trail) -> str:
    """Return a path as Python code: `state["plan"][3].callback`."""
    parts: list[str] = []
    while trail is not None:
        trail, kind, key = trail
        if kind == "attribute":
            parts.append(f".{key}")
        elif kind == "item":
            parts.append(f"[{_show(key)}]")
        else:
            parts.append(f".<{kind} {_show(key)}>")
    return "state" + "".join(reversed(parts))


def _show(key: object) -> str:
    # Only built-in types are shown by value: another class's repr may fail, or be long.
    if type(key) is str:
        inner = repr(key)[1:-1].replace('"', '\\"')
        return f'"{inner if len(inner) <= 80 else inner[:80] + "…"}"'
    if type(key) in (bool, float, type(None)) or (type(key) is int and abs(key) < 10**18):
        return repr(key)
    return type(key).__qualname__


def unstorable(reason: str, trail: Trail) -> Unstorable:
    path = render(trail)
    return Unstorable(f"{path} cannot be saved: {reason}", path=path)


def refuse(reason: str, trail: Trail) -> NoReturn:
    raise unstorable(reason, trail)


def refuse_type(kind: type, trail: Trail) -> NoReturn:
    if kind is CoroutineType:
        refuse("it is a coroutine: an await is missing where it was made", trail)
    name = default_name(kind)
    if kind.__module__ in ("builtins", "types", "_thread", "threading", "_io", "_asyncio", "weakref"):
        refuse(f"a {name} is not data; keep what it was made from, and make it again after loading", trail)
    if "<locals>" in name:
        refuse(
            f"its type {name} is defined inside a function, so that nothing finds it by its name when the value is "
            f"loaded, and trust= cannot help; define it at the top of its module, or decorate it with "
            f'@perdure.register("a.name"), which has to run before a value is loaded',
            trail,
        )
    refuse(
        f"its type {name} is neither registered nor trusted; if it is a dataclass, NamedTuple, "
        f"msgspec Struct, pydantic "
        f"model or Enum, decorate it with @perdure.register or open the store with "
        f'trust=["{name.partition(".")[0]}."]; else perdure.register({kind.__name__}, '
        f"dump=…, load=…)",
        trail,
    )
