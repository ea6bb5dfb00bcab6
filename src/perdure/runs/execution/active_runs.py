"""Which runs are active in this process, and what stands for a run where there is none (a task of an adapter)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.runs.execution.scope import Scope

if TYPE_CHECKING:
    from perdure.runs.functions.specs import StepSpec

Provider = Callable[["StepSpec"], Scope | None]
_lock = threading.Lock()
_active = 0
_providers: list[Provider] = []


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


def add_provider(provider: Provider) -> None:
    """Let an adapter say what stands for the run of a step where there is none; it gives None where it does not know
    either, and raises where an effect must not run."""
    _providers.append(provider)


def outside_scope(spec: StepSpec) -> Scope | None:
    for provider in _providers:
        scope = provider(spec)
        if scope is not None:
            return scope
    return None
