"""The shop of the agent contract as an agent of the OpenAI Agents SDK, with a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from agent_contract import decide, lose, pay, place, refund, search, weather, wire, work
from agents import Agent, Model, ModelResponse, Usage, function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call

import perdure
from perdure.openai_agents import PerdureSession, durable, run

__all__ = ["agent", "append", "member", "texts", "work"]

set_tracing_disabled(True)


class Deciding(Model):
    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        items = [{"role": "user", "content": input}] if isinstance(input, str) else input
        task = "\n".join(item["content"] for item in items if item.get("role") == "user")
        decided = decide(task, [item["output"] for item in items if item.get("type") == "function_call_output"])
        if isinstance(decided, str):
            output = [assistant_message(decided)]
        else:
            output = [function_call(call.name, call.arguments, call_id=call.id) for call in decided]
        return ModelResponse(output, Usage(), None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


tools = [function_tool(each) for each in (search, weather, pay, wire, lose, refund)]
shop = durable(Agent(name="shop", model=Deciding(), tools=list(tools)))


def member() -> object:
    return shop


async def agent(task: str) -> str:
    store, id = place()
    session = PerdureSession(id, store)
    answer = (await run(shop, task, session=session)).final_output
    assert task != "buy" or len(await session.get_items()) == 8
    return str(answer)


def append(store: perdure.Store, session: str, text: str) -> None:
    asyncio.run(PerdureSession(session, store).add_items([{"role": "user", "content": text}]))


def texts(store: perdure.Store, session: str) -> list[str]:
    items = asyncio.run(PerdureSession(session, store).get_items())
    return [json.loads(json.dumps(item))["content"] for item in items]
