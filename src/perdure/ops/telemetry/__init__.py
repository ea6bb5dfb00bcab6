"""Telemetry: logs, metrics, traces."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`perdure.ops.logs` and `perdure.ops.metrics`, imported when they are first asked for."""
    if name in ("logs", "metrics"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
