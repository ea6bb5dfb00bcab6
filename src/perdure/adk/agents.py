"""`durable`: agents of ADK whose model responses and tools are steps of the run that they are in."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar
from uuid import uuid4

from google.adk.agents import BaseAgent, LlmAgent
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.flows.llm_flows.functions import AF_FUNCTION_CALL_ID_PREFIX
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import perdure
from perdure.adapters import in_run, is_journaled, journaled, register_agents, remembering, tool_call
from perdure.errors import NotApproved

A = TypeVar("A", bound=BaseAgent)
Options = Mapping[str, Any]


def durable(agent: A, *, model: Options | None = None, effects: Mapping[str, Options] | None = None) -> A:
    """Make an agent and its sub-agents durable in the durable function that runs them, and return it.

    Elsewhere they work as before. `model` has options of `@perdure.step` for model requests: `model={"retries": 3}`.
    `effects` names tools that act on the outside world, with options of `@perdure.effect`.
    """
    for each in agent.sub_agents:
        durable(each, model=model, effects=effects)
    if isinstance(agent, LlmAgent) and not isinstance(agent.model, _Llm):
        llm = agent.canonical_model
        if not isinstance(llm, _Llm):  # else it is that of a parent
            agent.model = _Llm(model=llm.model, inner=llm, agent=agent.name, options=dict(model or {}))
        agent.tools = [_tool(agent.name, tool, effects or {}) for tool in agent.tools]
    return agent


class _Llm(BaseLlm):
    """A model whose responses are steps."""

    inner: BaseLlm
    agent: str
    options: dict[str, Any]

    @property
    def capabilities(self) -> Any:
        return self.inner.capabilities

    def connect(self, llm_request: LlmRequest) -> Any:
        return self.inner.connect(llm_request)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yield the responses. In a run all go to `run.stream()` at once, and the whole ones to the caller later."""
        responses = self.inner.generate_content_async(llm_request, stream=stream)
        if not in_run():
            async for response in responses:
                yield response
            return

        async def body() -> list[Any]:
            whole = []
            async for response in responses:
                _number_calls(response)
                plain = response.model_dump(mode="json", exclude_none=True)
                if stream:
                    perdure.emit(plain)
                whole += [] if response.partial else [plain]
            return whole

        key = {"contents": len(llm_request.contents)}
        for plain in await journaled("step", f"{self.agent}.model", key, body, **self.options):
            yield LlmResponse.model_validate(plain)


def _number_calls(response: LlmResponse) -> None:
    """Give function calls that have no id one, before the response is recorded. ADK would do it anew in each replay."""
    for part in (response.content and response.content.parts) or ():
        if part.function_call is not None and not part.function_call.id:
            part.function_call.id = f"{AF_FUNCTION_CALL_ID_PREFIX}{uuid4()}"


def _tool(agent: str, tool: Any, effects: Mapping[str, Options]) -> Any:
    """Return a copy of a tool whose calls are steps or effects of the run."""
    if isinstance(tool, BaseToolset):
        return _Toolset(agent, tool, effects)
    if not isinstance(tool, BaseTool):
        tool = FunctionTool(tool)
    inner, name, options = tool.run_async, f"{agent}.{tool.name}", effects.get(tool.name)
    is_inline = is_journaled(getattr(tool, "func", None)) or isinstance(tool, AgentTool)

    async def run_async(*, args: dict[str, Any], tool_context: ToolContext) -> Any:
        async def body() -> Any:
            result = await inner(args=args, tool_context=tool_context)
            return [result, tool_context.actions.model_dump(mode="json", exclude_defaults=True)]

        with tool_call(tool.name, tool_context.function_call_id) as branch:
            if is_inline or branch is None:
                try:
                    return await inner(args=args, tool_context=tool_context)
                except NotApproved as declined:
                    return str(declined)
            key = {**args, "tool_call": tool_context.function_call_id}
            kind: Any = "step" if options is None else "effect"
            recorded = await journaled(kind, name, key, body, **(options or {}))
            if not isinstance(recorded, list):  # a person, or `reconcile`, gave the result as it is
                return recorded
            result, actions = recorded
            _restore(tool_context, EventActions.model_validate(actions))
            return result

    twin = copy.copy(tool)
    twin.run_async = run_async
    return twin


def _restore(context: ToolContext, recorded: EventActions) -> None:
    """Set what a tool did to the actions and the state of its call, as it was recorded."""
    for name in recorded.model_fields_set - {"state_delta"}:
        setattr(context.actions, name, getattr(recorded, name))
    context.state.update(recorded.state_delta)


class _Toolset(BaseToolset):
    """A toolset whose tools are steps. Which tools there are is asked again in a replay."""

    def __init__(self, agent: str, inner: BaseToolset, effects: Mapping[str, Options]) -> None:
        super().__init__(tool_filter=inner.tool_filter, tool_name_prefix=inner.tool_name_prefix)
        self._agent, self._inner, self._effects = agent, inner, effects

    async def get_tools(self, readonly_context: Any = None) -> list[BaseTool]:
        return [_tool(self._agent, tool, self._effects) for tool in await self._inner.get_tools(readonly_context)]

    async def process_llm_request(self, *, tool_context: ToolContext, llm_request: LlmRequest) -> None:
        await self._inner.process_llm_request(tool_context=tool_context, llm_request=llm_request)

    async def close(self) -> None:
        await self._inner.close()


def _as_agent(agent: BaseAgent) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return an agent as the handler of a team's member. The text of its final response is the answer."""
    durable(agent)

    async def ask(message: str, history: Any) -> tuple[str, list[Any]]:
        runner = InMemoryRunner(agent=agent, app_name="team")
        sessions = runner.session_service
        about: dict[str, Any] = {"app_name": "team", "user_id": "team"}
        session = await sessions.create_session(**about, session_id="member")
        for event in history or []:
            await sessions.append_event(session, Event.model_validate(event))
        answer = ""
        said = types.UserContent(message)
        async for event in runner.run_async(user_id="team", session_id="member", new_message=said):
            if event.is_final_response() and event.content is not None:
                answer = "".join(part.text or "" for part in event.content.parts or ())
        ended = await sessions.get_session(**about, session_id="member")
        assert ended is not None
        return answer, [each.model_dump(mode="json", exclude_none=True) for each in ended.events]

    return remembering(ask)


register_agents("google.adk", _as_agent)
