"""The shop of the agent contract as an agent of Google's ADK, with sessions in the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from agent_contract import decide, lose, pay, place, refund, search, weather, wire, work
from google.adk.agents import LlmAgent
from google.adk.errors._stale_session_error import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner, Runner
from google.genai import types

import perdure
from perdure.adk import PerdureSessionService, durable

__all__ = ["agent", "append", "member", "texts", "work"]


class Deciding(BaseLlm):
    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        parts = [part for content in llm_request.contents for part in content.parts or ()]
        said_by_user = [content for content in llm_request.contents if content.role == "user"]
        task = "\n".join(part.text for content in said_by_user for part in content.parts or () if part.text)
        outputs = [part.function_response.response for part in parts if part.function_response]
        decided = decide(task, [str(output["result"]) for output in outputs if output])
        if isinstance(decided, str):
            said = [types.Part(text=decided)]
        else:
            calls = [types.FunctionCall(name=call.name, args=call.arguments) for call in decided]  # as Gemini: no ids
            said = [types.Part(function_call=call) for call in calls]
        yield LlmResponse(content=types.Content(role="model", parts=said))


shop = durable(
    LlmAgent(name="shop", model=Deciding(model="deciding"), tools=[search, weather, pay, wire, lose, refund])
)


class Silent(BaseLlm):
    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="")]))


async def warm_up() -> None:
    """Import what ADK imports when an agent first runs: the processes that are killed need not."""
    runner = InMemoryRunner(agent=LlmAgent(name="warm_up", model=Silent(model="silent")))
    await runner.run_debug("go", quiet=True)


asyncio.run(warm_up())


def member() -> object:
    return shop


async def agent(task: str) -> str:
    store, id = place()
    sessions = PerdureSessionService(store)
    await sessions.create_session(app_name="shop", user_id="ann", session_id=id)
    runner = Runner(agent=shop, app_name="shop", session_service=sessions)
    message = types.Content(role="user", parts=[types.Part(text=task)])
    said = ""
    async for event in runner.run_async(user_id="ann", session_id=id, new_message=message):
        said = "".join(part.text or "" for part in (event.content and event.content.parts) or ())
    session = await sessions.get_session(app_name="shop", user_id="ann", session_id=id)
    assert session is not None
    assert task != "buy" or len(session.events) == 6
    return said


def append(store: perdure.Store, session: str, text: str) -> None:
    async def appended() -> None:
        sessions = PerdureSessionService(store)
        where: dict[str, Any] = {"app_name": "shop", "user_id": "ann", "session_id": session}
        while True:
            try:
                found = await sessions.get_session(**where) or await sessions.create_session(**where)
                await sessions.append_event(found, Event(author="ann", content=types.UserContent(text)))
                return
            except (StaleSessionError, AlreadyExistsError):
                continue

    asyncio.run(appended())


def texts(store: perdure.Store, session: str) -> list[str]:
    found = asyncio.run(PerdureSessionService(store).get_session(app_name="shop", user_id="ann", session_id=session))
    assert found is not None
    return [str(event.content.parts[0].text) for event in found.events if event.content and event.content.parts]
