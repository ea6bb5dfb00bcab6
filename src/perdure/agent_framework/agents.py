"""The middleware that makes agents durable, and histories of sessions in a store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from agent_framework import (
    AgentContext,
    AgentMiddleware,
    AgentSession,
    ChatContext,
    ChatMiddleware,
    ChatResponse,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    HistoryProvider,
    Message,
)

import perdure
from perdure.adapters import (
    aextend,
    agent_call,
    arecall,
    checked_store,
    in_run,
    is_journaled,
    journaled,
    refuse_without_run,
    register_agents,
    remembering,
    tool_call,
)
from perdure.errors import NotApproved, UsageError

Options = Mapping[str, Any]
Next = Callable[[], Awaitable[None]]
_name: ContextVar[str] = ContextVar("perdure_agent_name", default="agent")


def durability(*, model: Options | None = None, effects: Mapping[str, Options] | None = None) -> list[Any]:
    """Return the middleware that makes an agent durable in the durable function that calls it.

    Elsewhere the agent works as before. Put it last in a list of middleware, so that the others see every call. `model`
    has options of `@perdure.step` for model requests: `model={"retries": 3}`. `effects` names tools that act on the
    outside world, with options of `@perdure.effect`: `effects={"pay": {"timeout_s": 30}}`.
    """
    return [_Agent(), _Chat(model or {}), _Function(effects or {})]


class _Agent(AgentMiddleware):
    async def process(self, context: AgentContext, call_next: Next) -> None:
        token = _name.set(context.agent.name or "agent")
        try:
            with agent_call(_name.get()):
                await call_next()
        finally:
            _name.reset(token)


class _Chat(ChatMiddleware):
    """Makes each response of the model a step."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def process(self, context: ChatContext, call_next: Next) -> None:
        if not in_run():
            tools = (context.options or {}).get("tools") or ()
            refuse_without_run(getattr(tool, "func", None) for tool in tools)
            await call_next()
            return
        if context.stream:
            raise UsageError("a durable run does not stream responses of the Agent Framework: call agent.run(…)")

        async def body() -> Any:
            await call_next()
            assert isinstance(context.result, ChatResponse)
            return context.result.to_dict()

        key = {"messages": len(context.messages)}
        recorded = await journaled("step", f"{_name.get()}.model", key, body, **self._options)
        context.result = ChatResponse.from_dict(recorded)


class _Function(FunctionMiddleware):
    """Makes each call of a function tool a step or an effect."""

    def __init__(self, effects: Mapping[str, Options]) -> None:
        self._effects = effects

    async def process(self, context: FunctionInvocationContext, call_next: Next) -> None:
        tool, id = context.function, context.metadata.get("call_id")

        async def body() -> Any:
            await call_next()
            return _plain(context.result)

        with tool_call(tool.name, id) as branch:
            if branch is None or is_journaled(tool.func):
                try:
                    await call_next()
                except NotApproved as declined:
                    context.result = str(declined)
                return
            arguments = context.arguments
            key = dict(arguments) if isinstance(arguments, Mapping) else arguments.model_dump(mode="json")
            options = self._effects.get(tool.name)
            kind: Any = "step" if options is None else "effect"
            name = f"{_name.get()}.{tool.name}"
            recorded = await journaled(kind, name, {**key, "tool_call": id}, body, **(options or {}))
            context.result = _restored(recorded)


def _plain(result: Any) -> Any:
    """Return the result of a tool as the journal can keep it. The framework makes a text of other values."""
    if isinstance(result, list) and all(isinstance(each, Content) for each in result):
        return {"contents": [each.to_dict() for each in result]}
    return str(result)


def _restored(recorded: Any) -> Any:
    if isinstance(recorded, dict) and recorded.keys() == {"contents"}:
        return [Content.from_dict(each) for each in recorded["contents"]]
    return str(recorded)  # also what a person, or `reconcile`, gave


class PerdureHistoryProvider(HistoryProvider):
    """Messages of sessions in a store: those of a session are a thread.

    Writers in any number of processes lose nothing. In a durable function each message is added once.
    """

    def __init__(self, store: perdure.Store, source_id: str = "perdure", **options: Any) -> None:
        super().__init__(source_id, **options)
        self._store = checked_store(store)

    def _thread(self, session_id: str | None) -> perdure.Thread:
        if session_id is None:
            raise UsageError("a history needs a session: agent.run(…, session=agent.create_session(session_id=…))")
        return self._store.thread(f"agent-framework/{session_id}", metadata={"session": session_id})

    async def get_messages(self, session_id: str | None, **options: Any) -> list[Message]:
        newest = await arecall(self._thread(session_id))
        return [] if newest is None else [Message.from_dict(each) for each in newest.state]

    async def save_messages(self, session_id: str | None, messages: Sequence[Message], **options: Any) -> None:
        await aextend(self._thread(session_id), [message.to_dict() for message in messages])


def _as_agent(agent: Any) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return an agent as the handler of a team's member. The text of its response is the answer."""
    if not any(isinstance(each, _Agent) for each in agent.middleware or ()):
        raise UsageError("an agent in a team is durable: Agent(…, middleware=durability())")
    if any(isinstance(each, PerdureHistoryProvider) for each in agent.context_providers):
        raise UsageError("the history of an agent in a team is in the member's state: leave PerdureHistoryProvider out")

    async def ask(message: str, history: Any) -> tuple[str, Any]:
        session = AgentSession.from_dict(history) if history else AgentSession(session_id=str(perdure.uuid()))
        answer = await agent.run(message, session=session)
        return answer.text, session.to_dict()

    return remembering(ask)


register_agents("agent_framework", _as_agent)
