"""Modules that are imported on first use, so that importing a package stays quick: of public names, of types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
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
    package: str, public: Sequence[str], places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package. `public` are all its names, for completion and `dir()`.

    `places` has the module of each late name; after a colon its name there, if another.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = places[name].partition(":")
        value = getattr(import_module(module), attribute or name)
        setattr(sys.modules[package], name, value)  # the next use finds it there
        return value

    def names() -> list[str]:
        return sorted({*public, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return find, names
