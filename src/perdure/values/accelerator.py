"""The optional C accelerator: the package perdure-speed. Each of its functions has a twin in Python.

`speed` is the module, or None if it is not installed, is of another version, or PERDURE_SPEED is 0.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

_INTERFACE: Final = 6


def _accelerator() -> Any:
    try:
        module = import_module("perdure_speed") if os.environ.get("PERDURE_SPEED") != "0" else None
    except ImportError:
        return None
    return module if getattr(module, "INTERFACE", 0) == _INTERFACE else None


speed: Any = _accelerator()
