"""Long-term memory: items in namespaces, found by their words and their meaning. Working memory: what a model reads.

The database stores, the process ranks: `words` makes the terms of an item, `segments` ranks the items of a scope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.late import late_names
from perdure.memory.handle import Memory as Memory
from perdure.memory.models import Item as Item
from perdure.memory.models import MemoryStats as MemoryStats
from perdure.memory.models import Namespace as Namespace
from perdure.memory.policies import MemoryPolicy as MemoryPolicy

if TYPE_CHECKING:
    from perdure.memory.agent import AgentMemory
    from perdure.memory.context import Context, Prompt
    from perdure.memory.conversation import Conversation, Transcript
    from perdure.memory.scratchpad import PadEntry, Scratchpad
    from perdure.memory.tokens import token_counter

# Imported when first used: a store needs none of them.
_LATE = {
    "AgentMemory": "perdure.memory.agent",
    "Context": "perdure.memory.context",
    "Conversation": "perdure.memory.conversation",
    "PadEntry": "perdure.memory.scratchpad",
    "Prompt": "perdure.memory.context",
    "Scratchpad": "perdure.memory.scratchpad",
    "Transcript": "perdure.memory.conversation",
    "token_counter": "perdure.memory.tokens",
}

__all__ = [
    "AgentMemory",
    "Context",
    "Conversation",
    "Item",
    "Memory",
    "MemoryPolicy",
    "MemoryStats",
    "Namespace",
    "PadEntry",
    "Prompt",
    "Scratchpad",
    "Transcript",
    "token_counter",
]

__getattr__, __dir__ = late_names(__name__, __all__, _LATE)
