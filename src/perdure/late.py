"""Modules that are imported on first use, so that importing a package stays quick: of public names, of types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Modules that register types, by the beginnings of the tags and class names that they register.
_registrars: dict[str, str] = {}


def add_registrar(module: str, *starts: str) -> None:
    """Import a module when a value is first met whose tag or class name begins with one of `starts`."""
    _registrars.update(dict.fromkeys(starts, module))


def import_registrar(name: str) -> bool:
    """Import the module that registers the types with this tag or class name. Return False if there is none.

    The modules are named by code alone: stored text cannot add one.
    """
    module = next((module for start, module in _registrars.items() if name.startswith(start)), None)
    if module is not None:
        import_module(module)  # waits for a thread that is importing it
    return module is not None


def late_names(
    package: str, *, first: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package from its `__init__.pyi`, the one list of its names.

    A line of that file is `from MODULE import NAME as PUBLIC`, which type checkers read too. `first` is a module that
    is imported before the first name. Modules of the package itself are offered, but are not in `__all__`.
    """
    module = sys.modules[package]
    stub: bytes = module.__loader__.get_data(f"{str(module.__file__).removesuffix('c')}i")  # type: ignore[union-attr]
    lines = (line.split() for line in stub.decode().splitlines())
    places = {line[5]: (line[1], line[3]) for line in lines if line[:1] == ["from"]}
    public = sorted(name for name, (origin, _) in places.items() if origin != package)

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        origin, attribute = places[name]
        if origin == package:
            return import_module(f"{package}.{attribute}")
        if first is not None:
            import_module(first)
        value = getattr(import_module(origin), attribute)
        setattr(module, name, value)  # the next use finds it there
        return value

    def names() -> list[str]:
        return sorted({*places, *(name for name in vars(module) if name.startswith("__"))})

    return find, names, public
