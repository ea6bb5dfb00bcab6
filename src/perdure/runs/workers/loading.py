"""Import the module that a user names: `app.py` or `myapp.agents`, with or without `:name`.

A file is imported under its own name with its folder on the path, as if a script beside it imported it. A file of a
package is imported under its full name. So functions and classes have the names that stored runs know them by. An
error inside the module becomes one line with its place; the original error is the cause.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from perdure.errors import UsageError
from perdure.values.names import of_file

_HINT = "give a file (app.py) or a module (myapp.agents)"
_loaded: set[str] = set()  # modules imported from a file here: a file of the same name may replace them


def split_app(text: str) -> tuple[str, str | None]:
    """Split `app.py:travel` into its two parts. The name is None if there is none."""
    where, colon, name = text.rpartition(":")
    if not colon or "/" in name or name.endswith(".py"):
        return text, None
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{text!r}: write app.py:name, or myapp.agents:name")
    return where, name


def load_app(text: str) -> ModuleType:
    """Import a file or a module, and ignore a `:name` after it. Raises UsageError."""
    where, _ = split_app(text)
    if where.endswith(".py") or "/" in where:
        return _load_file(where)
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(f"{where!r} names no module; {_HINT}")
    _look_in(Path.cwd())
    return _import(where, where)


def load_script(text: str) -> ModuleType:
    """Import a file or a module as the main script of this process, as multiprocessing does in its children.

    Code below `if __name__ == "__main__":` does not run, and the module of its classes is `__mp_main__`."""
    where, _ = split_app(text)
    name, folder = of_file(Path(where)) if where.endswith(".py") or "/" in where else (where, Path.cwd())
    _look_in(folder)
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, InspectLoader) or (code := spec.loader.get_code(name)) is None:
        raise UsageError(f"{where!r} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__mp_main__"
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    try:
        exec(code, vars(module))
    except BaseException as error:
        raise _explained(where, error) from error
    return module


def load_named(text: str) -> Any:
    """Return the object that `app.py:name` names, or the module for `app.py` alone."""
    module = load_app(text)
    where, name = split_app(text)
    member: Any = module
    for part in name.split(".") if name else ():
        if not hasattr(member, part):
            raise UsageError(f"{where} has no {name!r}; it has {_names(module)}")
        member = getattr(member, part)
    return member


def _names(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if hasattr(value, "perdure_durable"))
    return "the durable functions " + ", ".join(names) if names else "no durable function"


def _load_file(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise UsageError(f"there is no file {where!r}; {_HINT}. This is {Path.cwd()}")
    full = path.resolve()
    if not full.stem.isidentifier():
        raise UsageError(f"{where!r} cannot be imported: {full.stem!r} is no Python name; rename the file")
    name, folder = of_file(full)
    _look_in(folder)
    known = sys.modules.get(name)
    if known is not None and name in _loaded and not _is_file(known, full):
        del sys.modules[name]  # import the other file afresh, to compare its code
        known = None
    if (known is None and name in sys.stdlib_module_names) or not _is_file(module := _import(name, where), full):
        raise UsageError(
            f"{where!r} has the name of another module, {name!r}, which Python would find first: rename it"
        )
    if known is None:
        _loaded.add(name)
    return module


def _is_file(module: ModuleType, full: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == full


def _look_in(folder: Path) -> None:
    # At the front: the installed script does not search the user's folder by itself.
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _import(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"there is no module {name!r}; {_HINT}. This is {Path.cwd()}") from error
        raise _explained(where, error) from error
    except BaseException as error:
        raise _explained(where, error) from error


def _explained(where: str, error: BaseException) -> BaseException:
    """Return a UsageError of one line with the place in the user's code. Return KeyboardInterrupt unchanged."""
    if isinstance(error, KeyboardInterrupt):
        return error
    if isinstance(error, SystemExit):
        return UsageError(
            f"{where} ended itself while it was imported: put what starts the program under "
            'if __name__ == "__main__":, and leave the functions outside'
        )
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return UsageError(f"{where} is not Python that this version understands: {said}")
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith("<frozen") and code.co_filename != __file__:
            place = f" ({Path(code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return UsageError(f"{where} could not be loaded: {said}{place}")
