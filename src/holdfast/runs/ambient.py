"""Which runs are active in this process, and what stands for a run where there is none (a LangGraph node)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.runs.scope import Scope

_lock = threading.Lock()
_active = 0
_providers: list[Callable[[], Scope | None]] = []


def enter() -> None:
    """A run begins in this process."""
    global _active
    with _lock:
        _active += 1


def leave() -> None:
    """A run ends in this process."""
    global _active
    with _lock:
        _active -= 1


def some_run_is_active() -> bool:
    return _active > 0


def add_provider(provider: Callable[[], Scope | None]) -> None:
    """Let an adapter say what stands for the run where there is none; it gives None where it does not know either."""
    _providers.append(provider)


def outside_scope() -> Scope | None:
    for provider in _providers:
        scope = provider()
        if scope is not None:
            return scope
    return None
