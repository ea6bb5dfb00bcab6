# The public names: see `perdure/__init__.pyi`.

from perdure.memory.agent import AgentMemory as AgentMemory
from perdure.memory.context import Context as Context
from perdure.memory.context import Prompt as Prompt
from perdure.memory.conversation import Conversation as Conversation
from perdure.memory.conversation import Transcript as Transcript
from perdure.memory.handle import Memory as Memory
from perdure.memory.history import acompact_history as acompact_history
from perdure.memory.history import compact_history as compact_history
from perdure.memory.models import Item as Item
from perdure.memory.models import MemoryStats as MemoryStats
from perdure.memory.models import Namespace as Namespace
from perdure.memory.policies import MemoryPolicy as MemoryPolicy
from perdure.memory.schemas import migration as migration
from perdure.memory.scratchpad import PadEntry as PadEntry
from perdure.memory.scratchpad import Scratchpad as Scratchpad
from perdure.memory.tokens import token_counter as token_counter
