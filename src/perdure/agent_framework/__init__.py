"""Perdure for the Microsoft Agent Framework: durable agents, and histories and checkpoints of workflows in a store.

    from perdure.agent_framework import PerdureCheckpointStorage, PerdureHistoryProvider, durability

    agent = Agent(client, name="shop", tools=[search, pay], middleware=durability(),
                  context_providers=[PerdureHistoryProvider(store)])
    workflow = WorkflowBuilder(start_executor=search, checkpoint_storage=PerdureCheckpointStorage(store)).build()

In a durable function model responses and tools are steps. A tool that is decorated with `@perdure.step` or
`@perdure.effect` is that step or effect. It needs the extra `agent-framework`.
"""

from __future__ import annotations

from perdure.errors import ExtraMissing

try:
    import agent_framework  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.agent_framework", "agent-framework") from error

from perdure.agent_framework.agents import PerdureHistoryProvider, durability
from perdure.agent_framework.workflows import PerdureCheckpointStorage

__all__ = ["PerdureCheckpointStorage", "PerdureHistoryProvider", "durability"]
