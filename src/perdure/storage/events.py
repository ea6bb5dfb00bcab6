"""Events of the Python log: the name of a message, which never changes, and its fields, for machines.

Fields are ids, names, counts and classes of errors. Must never be among them: a value of a state, an argument, the text
of an error that user code raised, a URL with its password. `ops/telemetry/logs.py` makes JSON of them.
"""

from __future__ import annotations

import traceback
from typing import Any

from perdure.errors import Conflict, StoreError

FIELD = "perdure"  # one attribute of the log record, so that no name of ours meets one of logging's own


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a line of the log."""
    return {FIELD: {"event": name, **fields}}


def said(error: BaseException) -> str:
    """Return an error as the log may show it: the text of an error of another library may hold data of users."""
    return f"{type(error).__name__}: {error}" if isinstance(error, StoreError | Conflict) else type(error).__name__


def where(error: BaseException, depth: int = 5) -> str:
    """Return the files, lines and functions where an error was raised, the innermost last, without its text."""
    frames = traceback.extract_tb(error.__traceback__)[-depth:]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames)
