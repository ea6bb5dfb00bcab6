"""Perdure under LangGraph: a checkpointer that stores what changed.

    from perdure.langgraph import PerdureSaver

    graph = builder.compile(checkpointer=PerdureSaver("agent.db"))

Needs the extra: `pip install "perdure[langgraph]"`.
"""

from __future__ import annotations

from perdure.errors import UsageError

try:
    import langgraph.checkpoint.base  # noqa: F401
except ModuleNotFoundError as error:
    raise UsageError('perdure.langgraph needs LangGraph: pip install "perdure[langgraph]"') from error

from perdure.langgraph import nodes as _nodes  # noqa: F401 - lets steps and effects find the graph they run in
from perdure.langgraph.saver import PerdureSaver
from perdure.langgraph.saver_import import MigrationReport, import_langgraph

__all__ = ["MigrationReport", "PerdureSaver", "import_langgraph"]
