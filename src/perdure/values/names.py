"""The names under which classes and functions are recorded, and the way back from a name to a loaded module.

A script is `__main__` in its own process, and `app` in a worker that loads `app.py`. Both must record the same name. So
no other module records `__module__` directly, or looks up a recorded name in `sys.modules`. Nothing is imported here.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_MAIN = ("__main__", "__mp_main__")  # the second one is a script in the children of multiprocessing


def module_name(name: str) -> str:
    """Return the name by which another process would import a module.

    A script has the name of its file, and a module that `python -m` runs its own name. `__main__` stays where there is
    no such name: at a prompt, for code from a pipe, for a file like my-app.
    """
    if name not in _MAIN:
        return name
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name not in _MAIN:
        return str(spec.name)
    file = getattr(module, "__file__", None)
    return name if file is None else _of_script(file)


def class_name(cls: type) -> tuple[str, str]:
    """Return the module and the qualified name under which a class is recorded."""
    return module_name(cls.__module__), cls.__qualname__


def loaded(name: str, home: str | None = None) -> ModuleType | None:
    """Return the loaded module with a recorded name, or None.

    A script that is also imported is loaded twice. Then it is the copy `home`, the module of the calling code, if that
    is one of the two, and else the script.
    """
    if home is not None and module_name(home) == name:
        return sys.modules.get(home)
    for main in _MAIN:
        if main in sys.modules and module_name(main) == name:
            return sys.modules[main]
    return sys.modules.get(name)


def is_doubled(home: str) -> bool:
    """Return whether a module is loaded twice, as the script and by import."""
    name = module_name(home)
    return name in sys.modules and any(main in sys.modules and module_name(main) == name != main for main in _MAIN)


def find_class(module: str, qualname: str, home: str | None = None) -> type | None:
    """Return the class with a recorded name, or None if this process has not loaded it."""
    member: Any = loaded(module, home)
    for part in qualname.split("."):
        member = None if member is None or part == "<locals>" else getattr(member, part, None)
    return member if isinstance(member, type) else None


def of_file(file: Path) -> tuple[str, Path]:
    """Return the name by which a file is imported, and the folder that holds its outermost package."""
    full = file.resolve()
    parts, folder = [full.stem], full.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts if parts[-1] != "__init__" else parts[:-1]), folder


@cache
def _of_script(file: str) -> str:
    name = of_file(Path(file))[0]
    importable = file.endswith(".py") and all(part.isidentifier() for part in name.split("."))
    return name if importable else "__main__"
