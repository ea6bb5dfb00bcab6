"""Long-term memory: items in namespaces, found by their words and their meaning. Working memory: what a model reads.

The database stores, the process ranks: `words` makes the terms of an item, `segments` ranks the items of a scope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.memory.handle import Memory as Memory
from perdure.memory.models import Item as Item
from perdure.memory.models import MemoryStats as MemoryStats
from perdure.memory.models import Namespace as Namespace
from perdure.memory.policies import MemoryPolicy as MemoryPolicy

if TYPE_CHECKING:
    from perdure.memory.scratchpad import PadEntry, Scratchpad

# Imported when first used: a store needs none of them.
_LATE = {
    "PadEntry": "perdure.memory.scratchpad",
    "Scratchpad": "perdure.memory.scratchpad",
}

__all__ = ["Item", "Memory", "MemoryPolicy", "MemoryStats", "Namespace", "PadEntry", "Scratchpad"]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'perdure.memory' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
