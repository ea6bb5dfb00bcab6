"""Perdure for LangGraph: a checkpointer that stores what changed, and a store for long-term memory.

    from perdure.langgraph import PerdureSaver, PerdureStore

    store = perdure.open("agent.db")
    graph = builder.compile(checkpointer=PerdureSaver(store), store=PerdureStore(store))

It needs the extra `langgraph`.
"""

from __future__ import annotations

from perdure.adapters import register_agents
from perdure.errors import ExtraMissing

try:
    import langgraph.checkpoint.base  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.langgraph", "langgraph") from error

from perdure.langgraph import nodes as _nodes  # noqa: F401 - lets steps and effects find the graph they run in
from perdure.langgraph import workers as _workers  # noqa: F401 - lets workers resume graphs
from perdure.langgraph.members import advance, as_agent
from perdure.langgraph.saver import PerdureSaver
from perdure.langgraph.saver_import import MigrationReport, import_langgraph
from perdure.langgraph.store import PerdureStore

__all__ = ["MigrationReport", "PerdureSaver", "PerdureStore", "advance", "import_langgraph"]

register_agents("langgraph", as_agent)
