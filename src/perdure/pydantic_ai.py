"""Perdure for Pydantic AI: an agent that is called in a durable function resumes where it was killed.

    from perdure.pydantic_ai import PerdureDurability

    agent = Agent("openai:gpt-5", name="shop", capabilities=[PerdureDurability()])

Model requests, tools, MCP calls and the discovery of tools are steps. A tool is an effect if its metadata says so:
`{"perdure": {"effect": True, "timeout_s": 30}}`, with the options of `@perdure.effect`. A tool that is decorated with
`@perdure.step` or `@perdure.effect`, or whose metadata is `{"perdure": False}`, runs as a part of the run: it may ask
and sleep. It needs the extra `pydantic-ai`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from datetime import datetime
from typing import Any, Literal, cast

import perdure
from perdure.adapters import agent_call, in_run, is_journaled, journaled, register_agents, remembering, tool_call
from perdure.errors import ExtraMissing, NotApproved, UsageError

try:
    import pydantic_ai.durable_exec  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.pydantic_ai", "pydantic-ai") from error

from pydantic import TypeAdapter, ValidationError
from pydantic_ai import (
    DeferredToolRequests,
    DeferredToolResults,
    FunctionToolset,
    RunContext,
    ToolDefinition,
)
from pydantic_ai.capabilities.abstract import ValidatedToolArgs, WrapRunHandler, WrapToolExecuteHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    CallToolResult,
    DurabilityEngineSpec,
    DurableOperationId,
    JournalCallableOperationBackend,
    ModelRequestId,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    ToolsetKind,
    conversation_id_from_run_id,
)
from pydantic_ai.messages import AgentStreamEvent, ModelMessagesTypeAdapter, ToolCallPart
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import AgentDepsT
from pydantic_ai.toolsets import ToolsetTool
from pydantic_core import to_jsonable_python

__all__ = ["PerdureDurability", "emit_events"]

Options = dict[str, Any]
_EVENT: TypeAdapter[Any] = TypeAdapter(AgentStreamEvent)


class PerdureDurability(BaseDurabilityCapability[AgentDepsT]):
    """Makes an agent durable in the durable function that calls it. Elsewhere the agent is as it was.

    `model` and `tool` are options of `@perdure.step` for model requests and for tools: `model={"retries": 3}`. The
    others (`models`, `event_stream_handler`, `name`) are Pydantic AI's. Journals name the agent: keep its name.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Perdure",
        durable_unit_noun="step",
        durable_container_noun="run",
        codec=JSON_CODEC,
        # They arrive after the agent was made, so their calls would not be recorded.
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        tool_config_key="perdure",
    )

    def __init__(self, *, model: Options | None = None, tool: Options | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._model_options, self._tool_options = model or {}, tool or {}

    @property
    def in_durable_context(self) -> bool:
        return in_run()

    def get_default_run_id(self) -> str | None:
        return str(perdure.uuid()) if in_run() else None

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if in_run() else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        return perdure.now() if in_run() else None

    def get_durable_operation_backend(self) -> _Backend:
        tool = self._build_resolve_tool_config(self._tool_options)

        def options_of(id: DurableOperationId, called: object | None, name: str) -> Options | Literal[False]:
            if isinstance(called, ToolsetTool) and isinstance(called.toolset, FunctionToolset):
                known = called.toolset.tools.get(name)
                if known is not None and is_journaled(known.function):
                    return False
            options = tool(called if isinstance(called, ToolsetTool) else None, name)
            return False if options is False else dict(options)

        config = RoleBasedOperationConfig[Options](
            model=self._model_options, event={}, capability={}, tool=self._tool_options, resolve_tool=options_of
        )
        return _Backend(self.name, self.default_model_id, config)

    def _toolset_base_config(self, kind: ToolsetKind) -> Options:
        return self._tool_options

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        with agent_call(self.name):
            return await super().wrap_run(ctx, handler=handler)

    async def wrap_tool_execute(
        self,
        ctx: RunContext[AgentDepsT],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: ValidatedToolArgs,
        handler: WrapToolExecuteHandler,
    ) -> Any:
        """Run a tool in a branch of the run. If a person did not approve it, the model is told."""
        with tool_call(call.tool_name, call.tool_call_id):
            try:
                return await handler(args)
            except NotApproved as error:
                return str(error)

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[AgentDepsT], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Ask a person about each call that needs approval. The run is parked until the answers are there."""
        if not in_run() or not requests.approvals:
            return None
        asked = []
        for call in requests.approvals:
            shown = ", ".join(f"{name}={value!r}" for name, value in call.args_as_dict().items())
            with tool_call(call.tool_name, call.tool_call_id):
                asked.append(perdure.ask(f"May {call.tool_name}({shown}) run?", options=[True, False]))
        answers = await asyncio.gather(*asked)
        ids = [call.tool_call_id for call in requests.approvals]
        return requests.build_results(approvals=dict(zip(ids, answers, strict=True)))


class _Backend(JournalCallableOperationBackend[Options]):
    """Runs each operation of an agent as a step or an effect."""

    def __init__(self, agent: str, model: str | None, config: RoleBasedOperationConfig[Options]) -> None:
        super().__init__(agent_name=agent, default_model_id=model, config=config)
        self._agent = agent

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: Options,
    ) -> object:
        options = dict(config)
        kind: Literal["step", "effect"] = "effect" if options.pop("effect", False) else "step"
        key: dict[str, Any] = {}
        if isinstance(operation_id, ModelRequestId):
            name, key = f"{self._agent}.model", {"messages": len(cast(list[object], cache_key[1]))}
        elif isinstance(operation_id, ToolsetCallToolId):
            tool, arguments, ctx, *_ = cache_key
            name = f"{self._agent}.{tool}"
            key = {**_plain(arguments), "tool_call": cast(RunContext[Any], ctx).tool_call_id}
        result = await journaled(kind, name, key, body, **options)
        return result if kind == "step" else _as_recorded(result)


def _plain(arguments: object) -> dict[str, Any]:
    """Return arguments as JSON values. Objects without a JSON form are named by their class."""
    plain: dict[str, Any] = to_jsonable_python(arguments, serialize_unknown=True)
    return plain


def _as_recorded(result: object) -> object:
    """Return the result of an effect as Pydantic AI records it. A person, or `reconcile`, gave it as it is."""
    try:
        JSON_CODEC.load(CallToolResult, result)
    except ValidationError:
        return {"kind": "tool_return", "result": result}
    return result


async def emit_events(ctx: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
    """Send the events of an agent to the readers of the run: `PerdureDurability(event_stream_handler=emit_events)`."""
    async for event in events:
        perdure.emit(_EVENT.dump_python(event, mode="json"))


def _as_agent(agent: Any) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return an agent as the handler of a team's member. Its output is the answer."""
    if PerdureDurability.from_agent(agent) is None:
        raise UsageError("an agent in a team is durable: Agent(…, capabilities=[PerdureDurability()])")

    async def ask(message: str, history: Any) -> tuple[Any, Any]:
        result = await agent.run(message, message_history=ModelMessagesTypeAdapter.validate_python(history or []))
        return to_jsonable_python(result.output), to_jsonable_python(result.all_messages())

    return remembering(ask)


register_agents("pydantic_ai", _as_agent)
