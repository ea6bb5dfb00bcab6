"""Holdfast under LangGraph: a checkpointer that stores what changed.

    from holdfast.langgraph import HoldfastSaver

    graph = builder.compile(checkpointer=HoldfastSaver("agent.db"))

Needs the extra: `pip install "holdfast[langgraph]"`.
"""

from __future__ import annotations

from holdfast.errors import UsageError

try:
    import langgraph.checkpoint.base  # noqa: F401
except ModuleNotFoundError as error:
    raise UsageError('holdfast.langgraph needs LangGraph: pip install "holdfast[langgraph]"') from error

from holdfast.langgraph import nodes as _nodes  # noqa: F401 - lets steps and effects find the graph they run in
from holdfast.langgraph.compacting import Compacted
from holdfast.langgraph.importing import Imported, aimport_langgraph, import_langgraph
from holdfast.langgraph.saver import HoldfastSaver

__all__ = ["Compacted", "HoldfastSaver", "Imported", "aimport_langgraph", "import_langgraph"]
