"""Telemetry: logs, metrics, traces."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `perdure.ops.logs` or `perdure.ops.metrics` at first use."""
    if name in ("logs", "metrics"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
