"""Agents of Google's ADK in durable functions, their sessions and memory in a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from agent_contract import AgentContract, SessionContract
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.errors._stale_session_error import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import perdure
from perdure.adk import PerdureMemoryService, PerdureSessionService, durable


class TestContract(AgentContract, SessionContract):
    module = "adk_shop"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("adk") / "store.db"), durability="normal") as opened:
        yield opened


class Calling(BaseLlm):
    """A model that calls its tool `look`, then says what came back. It counts its answers."""

    answers: int = 0

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.answers += 1
        last = (llm_request.contents[-1].parts or [types.Part(text="")])[-1]
        part = types.Part(function_call=types.FunctionCall(name="look", args={"cents": 900}, id="c1"))
        if last.function_response or not llm_request.tools_dict:
            part = types.Part(text=str(last.function_response and last.function_response.response))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def said(text: str, **state: Any) -> Event:
    return Event(author="ann", content=types.UserContent(text), actions=EventActions(state_delta=state))


def test_a_session_is_what_the_service_says(store: perdure.Store) -> None:
    async def used() -> None:
        sessions = PerdureSessionService(store)
        where: dict[str, Any] = {"app_name": "a/b", "user_id": "ann"}
        first = await sessions.create_session(**where, session_id="s1", state={"n": 1, "user:u": 1, "app:a": 1})
        assert first.state == {"n": 1, "user:u": 1, "app:a": 1}
        with pytest.raises(AlreadyExistsError):
            await sessions.create_session(**where, session_id="s1")
        assert await sessions.get_session(**where, session_id="nothing") is None
        event = said("one", n=2, **{"user:u": 2, "temp:t": 9})
        await sessions.append_event(first, event)
        await sessions.append_event(first, event)  # repeated: ignored
        await sessions.append_event(first, said("two"))
        assert await sessions.append_event(first, Event(author="ann", partial=True)) not in first.events
        again = await sessions.get_session(**where, session_id="s1")
        assert again is not None
        assert again.state == {"n": 2, "user:u": 2, "app:a": 1}
        assert [each.model_dump() for each in again.events] == [each.model_dump() for each in first.events]
        assert len(again.events) == 2
        assert again.last_update_time == first.last_update_time
        recent = await sessions.get_session(
            **where, session_id="s1", config=GetSessionConfig(num_recent_events=1, after_timestamp=0)
        )
        assert recent is not None
        assert recent.events == again.events[1:]
        await sessions.append_event(recent, said("three"))
        with pytest.raises(StaleSessionError):
            await sessions.append_event(first, said("late"))
        assert len(first.events) == 2
        other = await sessions.create_session(**where)
        assert other.state == {"user:u": 2, "app:a": 1}
        assert await sessions.get_user_state(**where) == {"u": 2}
        assert await sessions.get_user_state(app_name="a/b", user_id="bob") == {}
        await sessions.create_session(app_name="a/b", user_id="bob", session_id="s1")
        listed = (await sessions.list_sessions(**where)).sessions
        assert [each.id for each in listed] == ["s1", other.id]
        assert len((await sessions.list_sessions(app_name="a/b")).sessions) == 3
        for _ in range(2):
            await sessions.delete_session(**where, session_id="s1")
        assert await sessions.get_session(**where, session_id="s1") is None

    asyncio.run(used())


def test_a_session_that_another_process_created_again_is_appended_to(store: perdure.Store) -> None:
    async def used() -> None:
        mine, others = PerdureSessionService(store), PerdureSessionService(store)
        where: Any = {"app_name": "again", "user_id": "ann", "session_id": "s1"}
        old = await mine.create_session(**where)
        await mine.append_event(old, said("before"))
        await others.delete_session(**where)
        with pytest.raises(StaleSessionError):
            await mine.append_event(old, said("too late"))
        await others.create_session(**where)
        new = await mine.get_session(**where)
        assert new is not None
        await mine.append_event(new, said("after"))
        stored = await others.get_session(**where)
        assert stored is not None
        contents = [event.content for event in stored.events if event.content]
        assert [part.text for content in contents for part in content.parts or ()] == ["after"]

    asyncio.run(used())


def test_a_memory_finds_what_was_said(store: perdure.Store) -> None:
    async def used() -> list[str]:
        sessions, memory = PerdureSessionService(store), PerdureMemoryService(store)
        session = await sessions.create_session(app_name="m", user_id="ann")
        for text in ("My dog is called Rex", "I live in Graz"):
            await sessions.append_event(session, said(text))
        for _ in range(2):
            await memory.add_session_to_memory(session)
        found = (await memory.search_memory(app_name="m", user_id="ann", query="dog")).memories
        assert (await memory.search_memory(app_name="m", user_id="bob", query="dog")).memories == []
        return [str(entry.content.parts and entry.content.parts[0].text) for entry in found]

    texts = asyncio.run(used())
    assert texts[0] == "My dog is called Rex"
    assert len(texts) == len(set(texts))


def test_sub_agents_callbacks_and_what_a_tool_did_to_its_context_are_the_same_in_a_replay(store: perdure.Store) -> None:
    model, looked, called = Calling(model="calling"), [], []

    def look(cents: int, tool_context: ToolContext) -> dict[str, Any]:
        looked.append(cents)
        tool_context.state["seen"] = cents
        tool_context.actions.escalate = False
        return {"found": cents}

    def before(tool: Any, args: dict[str, Any], tool_context: ToolContext) -> None:
        called.append(tool.name)

    inner = LlmAgent(name="inner", model=model, tools=[look], before_tool_callback=before)
    with pytest.warns(DeprecationWarning, match="Workflow"):
        outer = SequentialAgent(name="outer", sub_agents=[inner])
    agent = durable(outer, effects={"look": {"timeout_s": 5}})

    @perdure.durable(name="adk.replayed")
    async def replayed() -> Any:
        runner = InMemoryRunner(agent=agent, app_name="replayed")
        await runner.session_service.create_session(app_name="replayed", user_id="ann", session_id="s")
        async for _ in runner.run_async(user_id="ann", session_id="s", new_message=types.UserContent("go")):
            pass
        session = await runner.session_service.get_session(app_name="replayed", user_id="ann", session_id="s")
        assert session is not None
        await perdure.ask("Go on?")
        answers = [event.actions for event in session.events if event.get_function_responses()]
        return [session.state, answers[0].state_delta, answers[0].escalate]

    run = store.run(replayed, id="replayed")
    store.answer("replayed", "yes")
    assert store.run(replayed, id="replayed").result() == [{"seen": 900}, {"seen": 900}, False]
    assert (model.answers, looked, called) == (2, [900], ["look", "look"])
    assert [step.kind for step in run.steps() if step.name == "inner.look"] == ["effect"]


def test_outside_of_a_run_the_agent_is_as_it_was() -> None:
    async def used() -> Any:
        agent = durable(durable(LlmAgent(name="plain", model=Calling(model="calling"), tools=[look])))
        events = await InMemoryRunner(agent=agent).run_debug("go", quiet=True)
        return events[-1].content and events[-1].content.parts

    def look(cents: int) -> str:
        return f"found {cents}"

    [part] = asyncio.run(used())
    assert part.text == "{'result': 'found 900'}"
