"""Perdure for Strands Agents: durable agents, and sessions in a store.

    from perdure.strands import PerdureSessionManager, durability

    agent = Agent(model, tools=[search, pay], plugins=[durability()],
                  session_manager=PerdureSessionManager("ann", store))

In a durable function model responses and tools are steps. A tool that is decorated with `@perdure.step` or
`@perdure.effect` below `@tool` is that step or effect. It needs the extra `strands`.
"""

from __future__ import annotations

from perdure.errors import ExtraMissing

try:
    import strands.middleware  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.strands", "strands") from error

from perdure.strands.agents import durability
from perdure.strands.sessions import PerdureSessionManager

__all__ = ["PerdureSessionManager", "durability"]
