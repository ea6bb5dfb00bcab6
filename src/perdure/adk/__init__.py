"""Perdure for Google's Agent Development Kit: durable agents, sessions and memory in a store.

    from perdure.adk import PerdureSessionService, durable

    root_agent = durable(LlmAgent(name="shop", model="gemini-3.5-flash", tools=[search, pay]))
    runner = Runner(agent=root_agent, app_name="shop", session_service=PerdureSessionService(store))

In a durable function model responses and tools are steps, with what a tool did to `tool_context.actions`. A tool that
is decorated with `@perdure.step` or `@perdure.effect` is that step or effect. It needs the extra `adk`.
"""

from __future__ import annotations

from perdure.errors import ExtraMissing

try:
    import google.adk.agents  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.adk", "adk") from error

from perdure.adk.agents import durable
from perdure.adk.services import PerdureMemoryService, PerdureSessionService

__all__ = ["PerdureMemoryService", "PerdureSessionService", "durable"]
