"""The shop of the agent contract as an agent of Pydantic AI."""

from __future__ import annotations

from agent_contract import decide, lose, pay, refund, search, weather, wire, work
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from perdure.pydantic_ai import PerdureDurability

__all__ = ["agent", "member", "work"]


def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    parts = [part for message in messages if isinstance(message, ModelRequest) for part in message.parts]
    task = "\n".join(str(part.content) for part in parts if isinstance(part, UserPromptPart))
    decided = decide(task, [str(part.content) for part in parts if isinstance(part, ToolReturnPart)])
    if isinstance(decided, str):
        return ModelResponse([TextPart(decided)])
    return ModelResponse([ToolCallPart(call.name, call.arguments, call.id) for call in decided])


shop = Agent(
    FunctionModel(respond),
    name="shop",
    tools=[search, weather, pay, wire, lose, refund],
    capabilities=[PerdureDurability()],
)


def member() -> object:
    return shop


async def agent(task: str) -> str:
    return (await shop.run(task)).output
