"""The names under which classes and functions are recorded, and the way back from a name to a loaded module.

A script is `__main__` in the process that it started, and `app` in a worker that was given `app.py`. Both must write
and read the same name, so no other module may record `__module__` as it stands or look up a recorded name in
`sys.modules` by itself. Nothing is imported here.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_MAIN = ("__main__", "__mp_main__")  # the second one is a script in the children of multiprocessing


def module_name(name: str) -> str:
    """A module's name as another process would import it: for a script that of its file, for `python -m` the one given.

    `__main__` stays what it is where there is no such name: at a prompt, for code from a pipe, for a file like my-app.
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
    """The module and the name in it under which a class is recorded."""
    return module_name(cls.__module__), cls.__qualname__


def loaded(name: str, home: str | None = None) -> ModuleType | None:
    """The module with a recorded name, if this process has it. A script that is imported too is there twice: then it is
    the copy that is `home`, the module of the code that asks, or else the script."""
    if home is not None and module_name(home) == name:
        return sys.modules.get(home)
    for main in _MAIN:
        if main in sys.modules and module_name(main) == name:
            return sys.modules[main]
    return sys.modules.get(name)


def is_doubled(home: str) -> bool:
    """Whether a module is there twice, as the script and imported."""
    name = module_name(home)
    return name in sys.modules and any(main in sys.modules and module_name(main) == name != main for main in _MAIN)


def find_class(module: str, qualname: str, home: str | None = None) -> type | None:
    """The class with a recorded name, if its module is loaded here."""
    found: Any = loaded(module, home)
    for part in qualname.split("."):
        found = None if found is None or part == "<locals>" else getattr(found, part, None)
    return found if isinstance(found, type) else None


def of_file(file: Path) -> tuple[str, Path]:
    """The name that a file is imported by, and the folder to import it from: that of its outermost package."""
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
