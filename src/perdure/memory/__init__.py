"""Long-term memory: items in namespaces, found by their words and their meaning.

The database stores, the process ranks: `words` makes the terms of an item, `segments` ranks the items of a scope.
"""

from perdure.memory.handle import Memory as Memory
from perdure.memory.models import Item as Item
from perdure.memory.models import MemoryStats as MemoryStats
from perdure.memory.models import Namespace as Namespace
from perdure.memory.policies import MemoryPolicy as MemoryPolicy

__all__ = ["Item", "Memory", "MemoryPolicy", "MemoryStats", "Namespace"]
