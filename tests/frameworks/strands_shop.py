"""The shop of the agent contract as an agent of Strands, with a session in the store."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from agent_contract import ToolCall, decide, lose, pay, place, refund, search, weather, wire, work
from strands import Agent, tool
from strands.models import Model
from strands.types.content import ContentBlock, Message

import perdure
from perdure.strands import PerdureSessionManager, durability

__all__ = ["agent", "append", "member", "texts", "work"]


class Scripted(Model):
    """A model that streams what `decided` makes of the task and the results of tools."""

    def __init__(self, decided: Any) -> None:
        self.decided = decided

    def update_config(self, **config: Any) -> None:
        pass

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *args: Any, **options: Any) -> AsyncGenerator[dict[str, Any], None]:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterable[Any]:
        contents = [content for message in messages for content in message["content"]]
        said = [content for message in messages if message["role"] == "user" for content in message["content"]]
        task = "\n".join(content["text"] for content in said if "text" in content)
        results = [content["toolResult"]["content"][0]["text"] for content in contents if "toolResult" in content]
        decided = self.decided(task, results)
        yield {"messageStart": {"role": "assistant"}}
        for block in [decided] if isinstance(decided, str) else decided:
            for chunk in _chunks(block):
                yield chunk
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(decided, str) else "tool_use"}}


def _chunks(block: str | ToolCall) -> list[Any]:
    start: dict[str, Any] = {}
    delta: dict[str, Any] = {"text": block}
    if isinstance(block, ToolCall):
        start = {"toolUse": {"toolUseId": block.id, "name": block.name}}
        delta = {"toolUse": {"input": json.dumps(block.arguments)}}
    return [
        {"contentBlockStart": {"start": start}},
        {"contentBlockDelta": {"delta": delta}},
        {"contentBlockStop": {}},
    ]


tools: list[Any] = [tool(each) for each in (search, weather, pay, wire, lose, refund)]


def member() -> object:
    return Agent(Scripted(decide), name="shop", tools=tools, plugins=[durability()], callback_handler=None)


async def agent(task: str) -> str:
    store, id = place()
    shop = Agent(
        Scripted(decide),
        name="shop",
        tools=tools,
        plugins=[durability()],
        session_manager=PerdureSessionManager(id, store),
        callback_handler=None,
    )
    answer = await shop.invoke_async(task)
    assert task != "buy" or len(PerdureSessionManager(id, store).list_messages(id, "default")) == 6
    return str(answer).strip()


def append(store: perdure.Store, session: str, text: str) -> None:
    manager = PerdureSessionManager(session, store)
    talk = Agent(Scripted(decide), session_manager=manager, callback_handler=None)
    content: list[ContentBlock] = [{"text": text}]
    manager.append_message(Message(role="user", content=content), talk)


def texts(store: perdure.Store, session: str) -> list[str]:
    stored = PerdureSessionManager(session, store).list_messages(session, "default")
    return [each.message["content"][0]["text"] for each in stored]
