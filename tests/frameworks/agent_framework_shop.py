"""The shop of the agent contract as an agent of the Microsoft Agent Framework, with a history in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from agent_contract import decide, lose, pay, place, refund, search, weather, wire, work
from agent_framework import Agent, BaseChatClient, ChatResponse, Content, Message, tool
from agent_framework._middleware import ChatMiddlewareLayer
from agent_framework._tools import FunctionInvocationLayer

import perdure
from perdure.agent_framework import PerdureHistoryProvider, durability

__all__ = ["agent", "append", "member", "texts", "work"]


class Deciding(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **kwargs: Any) -> Awaitable[Any]:
        async def respond() -> ChatResponse:
            contents = [content for message in messages for content in message.contents]
            task = "\n".join(message.text for message in messages if message.role == "user")
            results = [content.result for content in contents if content.type == "function_result"]
            decided = decide(task, [str(result) for result in results])
            if isinstance(decided, str):
                said = [Content.from_text(decided)]
            else:
                said = [Content.from_function_call(call.id, call.name, arguments=call.arguments) for call in decided]
            return ChatResponse(messages=[Message(role="assistant", contents=said)], response_id="r")

        return respond()


tools = [tool(each, approval_mode="never_require") for each in (search, weather, pay, wire, lose, refund)]


def member() -> object:
    return Agent(Deciding(), name="shop", tools=tools, middleware=durability())


async def agent(task: str) -> str:
    store, id = place()
    history = PerdureHistoryProvider(store)
    shop = Agent(Deciding(), name="shop", tools=tools, middleware=durability(), context_providers=[history])
    answer = await shop.run(task, session=shop.create_session(session_id=id))
    assert task != "buy" or len(await history.get_messages(id)) == 6
    return answer.text


def append(store: perdure.Store, session: str, text: str) -> None:
    asyncio.run(PerdureHistoryProvider(store).save_messages(session, [Message(role="user", contents=[text])]))


def texts(store: perdure.Store, session: str) -> list[str]:
    return [message.text for message in asyncio.run(PerdureHistoryProvider(store).get_messages(session))]
