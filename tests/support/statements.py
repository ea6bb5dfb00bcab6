"""The modules of Perdure that hold SQL, and the statements that they have under a name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import perdure
from perdure.storage.program import Sql


@cache
def sql_modules() -> list[ModuleType]:
    """Import them. Importing the others, adapters of frameworks among them, would take seconds."""
    source = Path(perdure.__file__).parent
    names = [path.relative_to(source) for path in sorted(source.rglob("*.py")) if "Sql(" in path.read_text()]
    return [import_module(".".join(("perdure", *name.with_suffix("").parts))) for name in names]


def named_statements() -> Iterator[tuple[str, Sql]]:
    """Yield every statement with its module and name; those of a list, tuple or dict with the name of that."""
    for module in sql_modules():
        for name, value in vars(module).items():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            yield from ((f"{module.__name__}.{name}", part) for part in parts if type(part) is Sql)
