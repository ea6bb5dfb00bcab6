"""Perdure for the OpenAI Agents SDK: sessions in a store, and agents that resume where they were killed.

    from perdure.openai_agents import PerdureSession, durable, run

    agent = durable(Agent(name="shop", tools=[search, pay]))          # once
    result = await run(agent, task, session=PerdureSession("ann", store))    # in a durable function

Model responses, function tools and guardrails are steps, also those of agents that are handed off to. A tool that is
decorated with `@perdure.step` or `@perdure.effect` below `@function_tool` is that step or effect. It needs the extra
`openai-agents`.
"""

from __future__ import annotations

from perdure.errors import ExtraMissing

try:
    import agents.run  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.openai_agents", "openai-agents") from error

from perdure.openai_agents.running import durable, run
from perdure.openai_agents.session import PerdureSession

__all__ = ["PerdureSession", "durable", "run"]
